"""Weights arrive on every kind of CPU: after a sync an engine samples from the new ones, with AMX and without.

vLLM's choices are forced either way, on whatever CPU this is; the oracles are in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.cpus import linear_amx
from tests.fakes.engine_checkpoints import random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import START_S, Loop, cpu_settings

PROMPT = [5, 6, 7, 8, 9]
AMX = pytest.mark.parametrize("amx", [True, False], ids=["amx", "no-amx"])
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
"""With its own width of the compressed state, which vLLM's CPU kernels are made for. transformers knows `topk_method` and `scoring_func` by
itself; vLLM without them takes a softmax, and has no place for the router's bias."""


def sampled_after(settings: VllmSettings, run: Loop, weights: dict[str, torch.Tensor], store: Path) -> Sample:
    """An engine's answer of 40 tokens, after all of `weights` have come and were verified.

    It ends with this: vLLM's parallel groups are a process's, and a dense engine makes none for experts.
    """
    engine = run(VllmEngine.start(settings), START_S)
    try:
        manifest = Publisher(VersionStore(store), bucket_bytes=1 << 20).publish(weights.items(), 1, checksums=True)
        assert run(engine.update(manifest, verify=True)).verified == len(weights)
        return run(engine.generate(GenerationRequest(Sample("p", "g", PROMPT), 40, temperature=1.0)))
    finally:
        run(engine.shutdown())


@AMX
def test_small_linear_weights_are_synced_with_and_without_amx(
    amx: bool, run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, where AMX packs what is below 1 MiB: all of this model."""
    linear_amx(monkeypatch, amx)
    config = tiny_config(torch_dtype="bfloat16")
    first, second = ({name: value.bfloat16() for name, value in random_tensors(config, seed).items()} for seed in (0, 1))
    settings = cpu_settings(write_checkpoint(tmp_path / "hf", config, first), k=1, dtype="bf16")
    answer = sampled_after(settings, run, second, tmp_path / "store")
    expected = reference_logprobs(config, second, [*PROMPT, *answer.response_ids])[len(PROMPT) - 1 :]
    assert (torch.tensor(answer.behaviour_logprobs) - expected).abs().mean() < 0.05


@AMX
def test_latent_attention_is_synced_with_and_without_amx(amx: bool, run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek in fp32: prefill and decoding, whose weights vLLM derives from those that came."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK)).eval()
    model.set_experts_implementation("eager")  # the one that runs in fp64
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    save_file({name: 0.5 * value for name, value in weights.items()}, file, metadata={"format": "pt"})
    answer = sampled_after(cpu_settings(tmp_path / "hf", k=0, context=128), run, weights, tmp_path / "store")
    with torch.no_grad():
        logits = model.double()(torch.tensor([[*PROMPT, *answer.response_ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.response_ids)[:, None])[:, 0]
    assert (torch.tensor(answer.behaviour_logprobs) - expected).abs().max() < 1e-4
