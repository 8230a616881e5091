"""Toy models with matrices that are large enough for FP8 blocks. Some have rows that are no multiple of a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtpctl.convert.model_weights import ModelWeights
from mtpctl.families.quantization import select_fp8_names
from mtpctl.families.tensors import section_of
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.convert_models import change_config, converted, model, tensors, write
from tests.fakes.engines import Loop

ATTENTION = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 36,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "head_dim": 36,
}
WINDOWS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 96,
    "v_head_dim": 80,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 96,
    "swa_v_head_dim": 80,
}

SIZES: dict[str, dict[str, Any]] = {
    "mimo": ATTENTION | {"hidden_size": 256},
    "qwen3": ATTENTION,
    "qwen3-moe": ATTENTION | EXPERTS,
    "qwen3-next": ATTENTION | EXPERTS | DELTA,
    "qwen3.5": ATTENTION | DELTA,
    "qwen3.5-vl": ATTENTION | DELTA,
    "qwen3.5-moe": ATTENTION | EXPERTS | DELTA,
    "deepseek-v3": ATTENTION | EXPERTS | LATENT,
    "glm4-moe": ATTENTION | EXPERTS,
    "ernie4.5-moe": ATTENTION | EXPERTS,
    "mimo-v2-flash": ATTENTION | EXPERTS | WINDOWS,
    "nemotron-h": ATTENTION
    | EXPERTS
    | {"mamba_num_heads": 6, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 64, "moe_shared_expert_intermediate_size": 256},
}


def fp8_model(case: str, path: Path, **sizes: int) -> None:
    """Create a bf16-sized toy of the case at `path`. sizes: config fields to change."""
    model(case, path, **SIZES[case] | sizes)


CPU_SIZES: dict[str, dict[str, int]] = {
    "qwen3.5-moe": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "deepseek-v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}
"""Sizes that vLLM's CPU kernels need."""


FIELDS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"shared_expert_intermediate_size": None},  # vLLM would expect shared experts
    "deepseek-v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""Changes of the toys' configs."""


PROMPT = [5, 6, 7, 8]


def changed(weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """The weights of a version. Scales differ from those of other versions, but version 2 changes only a few elements of version 1."""
    if version == 2:
        weights = changed(weights, 1)
        for value in weights.values():
            value.view(-1)[: 1 + value.numel() // 500] *= 1.5
        return weights
    generator = torch.Generator().manual_seed(version)
    return {
        name: (0.5**version * value + 0.01 * torch.randn(value.shape, generator=generator)).to(value.dtype)
        for name, value in weights.items()
    }


class Model:
    """A folder in bf16, and publishers of its changed weights."""

    def __init__(self, root: Path, case: str, **sizes: int) -> None:
        self.root, self.case = root, case
        fp8_model(case, root / "hf", **CPU_SIZES.get(case, {}) | sizes)
        change_config(root / "hf", **FIELDS.get(case, {}))
        write(root / "hf", {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors(root / "hf").items()})
        self.weights = dict(ModelWeights(root / "hf").items())
        self.shape = ModelWeights(root / "hf").shape
        self.store = VersionStore(root / "store")

    def options(self, *, drafter: bool = True, quantized: bool = True) -> Any:
        names = select_fp8_names(self.shape, mtp=drafter) if quantized else frozenset()
        return {"bucket_bytes": 1 << 16, "section_of": lambda name: section_of(name, self.shape), "quantized": names}

    def publisher(self, *, delta: bool = False, **options: bool) -> Publisher:
        return Publisher(self.store, delta=delta, **self.options(**options))

    def publish(self, publisher: Publisher, version: int) -> Manifest:
        return publisher.publish(changed(self.weights, version).items(), version, checksums=True)

    def exported(self, version: int) -> Path:
        """The folder that `convert-hf --dtype fp8` writes of this version's checkpoint."""
        plain, checkpoint, folder = (self.root / f"{kind}-{version}" for kind in ("plain", "checkpoint", "fp8"))
        plain.mkdir()
        (plain / "config.json").write_bytes((self.root / "hf" / "config.json").read_bytes())
        write(plain, changed(self.weights, version))
        converted(plain, checkpoint)
        converted(checkpoint, folder, dtype="fp8")
        return folder


def answer(engine: VllmEngine, run: Loop) -> Sample:
    return run(engine.generate(GenerationRequest(Sample("p", "g", PROMPT), 16, temperature=0.0)))
