"""What an inference engine refuses, or would compute otherwise than the trainer, told from a config before an engine starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from mtpctl.errors import EnvironmentMissing
from mtpctl.families.reading import family_of
from mtpctl.families.shape import ModelShape

CPU_LATENT = 576
"""Elements of a token's latent cache that vLLM 0.32's CPU kernel is compiled for: DeepSeek-V3's own."""


def left_to_engines(config: Mapping[str, Any]) -> Iterator[str]:
    """Complaints about fields that a config lacks and that engines then take other values for than the trainer."""
    text = config.get("text_config") or {}
    for key, value in family_of(config).spelled_out:
        if config.get(key, text.get(key)) is None:
            yield f"model config: {key} is missing, and vLLM takes another than the trainer computes; add {key}: {value}"


def beyond_vllm_on_a_cpu(shape: ModelShape, dtype: str) -> Iterator[str]:
    """Complaints about what vLLM 0.32's CPU kernels do not compute, of a model served in `dtype` (`fp32` or `bf16`)."""
    if "linear_attention" in shape.layer_kinds and dtype != "bf16":
        yield f"train.precision: vLLM on a CPU computes the linear attention of {shape.family} in bf16 alone; set bf16"
    if shape.latent is not None and (held := shape.latent.kv_rank + shape.latent.rope_dim) != CPU_LATENT:
        yield (
            f"model config: kv_lora_rank and qk_rope_head_dim make {held}, and vLLM on a CPU computes latent attention of {CPU_LATENT} "
            f"alone; set them to {CPU_LATENT - 64} and 64, or use a GPU"
        )


def check_importable(config: Mapping[str, Any]) -> None:
    """Raise EnvironmentMissing where vLLM's module of this model's family cannot be imported here."""
    family = family_of(config)
    for package in family.imports:
        if find_spec(package) is None:
            raise EnvironmentMissing(
                f"{package}: is not installed, and vLLM needs it to serve {family.name}; install the project anew, "
                f"or run mtpctl doctor for the release"
            )
