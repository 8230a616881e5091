"""Checks of a model config for what an engine refuses, or computes otherwise than the trainer, before an engine starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from mtpctl.errors import EnvironmentMissing
from mtpctl.families.reading import family_of
from mtpctl.families.shape import ModelShape

CPU_LATENT = 576
"""Elements of a token's latent cache that vLLM 0.32's CPU kernel is compiled for: DeepSeek-V3's own."""


def missing_fields(config: Mapping[str, object]) -> Iterator[str]:
    """Complaints about fields that a config lacks and whose defaults differ between engines and trainer."""
    text = config.get("text_config")
    for key, value in family_of(config).required_values:
        if config.get(key, text.get(key) if isinstance(text, Mapping) else None) is None:
            yield f"model config: {key} is missing, and vLLM takes another than the trainer computes; add {key}: {value}"


def unsupported_by_vllm_cpu(shape: ModelShape, dtype: str) -> Iterator[str]:
    """Complaints about layers of a model in `dtype` (`fp32` or `bf16`) that vLLM 0.32's CPU kernels do not compute."""
    if "linear_attention" in shape.layer_kinds and dtype != "bf16":
        yield f"train.precision: vLLM on a CPU computes the linear attention of {shape.family} in bf16 alone; set bf16"
    if shape.latent is not None and (held := shape.latent.kv_rank + shape.latent.rope_dim) != CPU_LATENT:
        yield (
            f"model config: kv_lora_rank and qk_rope_head_dim make {held}, and vLLM on a CPU computes latent attention of {CPU_LATENT} "
            f"alone; set them to {CPU_LATENT - 64} and 64, or use a GPU"
        )


def check_importable(config: Mapping[str, object]) -> None:
    """Raise EnvironmentMissing where a package is not installed that vLLM's module of the model's family imports."""
    family = family_of(config)
    for package in family.imports:
        if find_spec(package) is None:
            raise EnvironmentMissing(
                f"{package}: is not installed, and vLLM needs it to serve {family.name}; install the project anew, "
                f"or run mtpctl doctor for the release"
            )
