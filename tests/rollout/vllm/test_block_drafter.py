"""A DFlash drafter does not change the distribution of sampled tokens: the toy of `test_speculation`, three drafts per step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpctl.convert.drafter import add_drafter
from mtpctl.recipe.rollout import SpeculationConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import Sample
from tests.fakes.engine_checkpoints import write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.speculation import CASES, CONFIG, check_distribution, requests, toy_tensors

MASK = 100
"""A token that the toy hardly ever says."""


def toy(root: Path) -> tuple[Path, torch.Tensor]:
    """The toy with a drafter whose drafts depend on the context, and the toy's logits by the last token.

    The embedding of the mask passes through the drafter, so the first draft follows the toy's distribution after that token, apart from
    what attention adds.
    """
    tensors, logits = toy_tensors()
    trunk = {name: value for name, value in tensors.items() if ".mtp_layers." not in name}
    logits[MASK, :8] = 2 * logits[:8, :8].mean(0)  # prefers tokens that are often right
    embedding = trunk["model.embed_tokens.weight"]
    trunk["lm_head.weight"] = (logits.T @ embedding / 128).contiguous()
    config = CONFIG | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 0, "eos_token_id": MASK}
    folder = add_drafter(write_checkpoint(root / "model", config, trunk), root / "pair", "dflash").path
    file = folder / "drafter" / "model.safetensors"
    drafter = load_file(file)
    generator = torch.Generator().manual_seed(5)
    for name in drafter:
        if "self_attn" in name and name.endswith("proj.weight"):
            drafter[name] = torch.randn(drafter[name].shape, generator=generator) * (0.02 if "o_proj" in name else 0.1)
    save_file(drafter, file, metadata={"format": "pt"})
    return folder, logits


@pytest.mark.slow
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_forty_thousand_tokens_follow_the_distribution(
    method: Literal["greedy", "probabilistic"],
    start_engine: Callable[[VllmSettings], VllmEngine],
    run: Loop,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, logits = toy(tmp_path_factory.mktemp("toy"))
    engine = start_engine(cpu_settings(folder, speculation=SpeculationConfig(num_tokens=3, draft_method=method), max_in_flight=256))

    async def samples(case: str) -> list[Sample]:
        return await asyncio.gather(*(engine.generate(each) for each in requests(320, 125, **CASES[case])))

    for case in ("T=0.7", "T=1.0", "top-p"):
        check_distribution(run(samples(case)), logits, CASES[case])
