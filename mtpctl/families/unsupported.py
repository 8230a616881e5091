"""Models that are not supported, with the parts that the trainer lacks and supported alternatives.

`UNSUPPORTED` names the lacking parts of known models, according to their modules in transformers and vLLM. For other architectures,
`missing_parts` derives them from the fields of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mtpctl.errors import UserError


class Unsupported(NamedTuple):
    """A group of models that lack the same parts in the trainer.

    model_types: values of `model_type` in the config or its `text_config`. names: lower-case prefixes of hub names, without the
    organization. missing: the parts, as the end of the sentence "the trainer has no …". fields: pairs of a supported
    `model_type` and a config field that only the unsupported models of this type set.
    """

    title: str
    model_types: tuple[str, ...]
    names: tuple[str, ...]
    missing: str
    alternative: str
    fields: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        return f"{self.title} is not supported: the trainer has no {self.missing}; use {self.alternative}"


UNSUPPORTED = (
    Unsupported(
        "GLM-5", ("glm_moe_dsa", "glm5_next", "glm5_next_text"), ("glm-5",), "sparse attention with an indexer", "GLM-4.7 or GLM-4.7-Flash"
    ),
    Unsupported("DeepSeek-V3.2", ("deepseek_v32",), ("deepseek-v3.2",), "sparse attention with an indexer", "DeepSeek-V3"),
    Unsupported(
        "DeepSeek-V4", ("deepseek_v4",), ("deepseek-v4",), "sparse attention over compressed keys and no hyper-connections", "DeepSeek-V3"
    ),
    Unsupported(
        "Kimi-K2",
        ("kimi_k2", "kimi_k25"),
        ("kimi-k2",),
        "configuration for its model_type, and its published weights have no MTP layers",
        "DeepSeek-V3, which has the same kinds of layers",
    ),
    Unsupported(
        "Kimi Linear",
        ("kimi_linear", "kimi_k3"),
        ("kimi-linear", "kimi-k3"),
        "Kimi Delta Attention",
        "Qwen3.5, which has gated DeltaNet layers",
    ),
    Unsupported(
        "gpt-oss",
        ("gpt_oss",),
        ("gpt-oss",),
        "attention sinks, sliding windows or biased experts",
        "Qwen3-30B-A3B with a drafter from mtpctl add-drafter",
    ),
    Unsupported(
        "Qwen3.8-Flash",
        ("qwen4_exp", "qwen4_exp_text"),
        ("qwen3.8-flash",),
        "sparse attention with an indexer and no n-gram embeddings",
        "Qwen3.6-35B-A3B",
    ),
    Unsupported(
        "MiMo-V2 after MiMo-V2-Flash",
        ("mimo_v2", "mimo_v2_omni"),
        ("mimo-v2-pro", "mimo-v2-omni", "mimo-v2.5", "mimo-v2.6"),
        "mapping for fused QKV weights",
        "MiMo-V2-Flash",
    ),
    Unsupported(
        "Nemotron 3 Super or Ultra",
        (),
        ("nvidia-nemotron-3-super", "nvidia-nemotron-3-ultra", "nemotron-3-super", "nemotron-3-ultra"),
        "experts with a latent width (moe_latent_size)",
        "Nemotron 3 Nano or Nemotron 3.5 Lightning",
        (("nemotron_h", "moe_latent_size"),),
    ),
    Unsupported(
        "Nemotron 3 Omni",
        ("nemotron_h_omni",),
        ("nvidia-nemotron-3-nano-omni", "nemotron-3-nano-omni"),
        "encoders for images and audio",
        "Nemotron 3 Nano",
    ),
)

PARTS: dict[str, tuple[str, ...]] = {
    "sparse attention with an indexer": ("index_topk", "index_n_heads", "indexer_n_heads"),
    "Mamba layers outside Nemotron-H": ("ssm_state_size", "mamba_num_heads", "mamba_d_state", "hybrid_override_pattern"),
    "sliding windows": ("sliding_window", "sliding_window_size", "attention_chunk_size"),
    "hyper-connections": ("hc_mult", "hc_count"),
    "soft caps on logits": ("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap"),
    "encoder": ("is_encoder_decoder", "encoder_layers"),
}
"""Parts that the trainer lacks, each with the config fields that indicate it."""


def check_architecture(config: Mapping[str, object]) -> None:
    """Raise UserError for a model whose `model_type` or fields are in `UNSUPPORTED`."""
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, Mapping) else {})}
    types = (config.get("model_type"), fields.get("model_type"))
    for each in UNSUPPORTED:
        if any(kind in each.model_types for kind in types) or any(kind in types and fields.get(key) for kind, key in each.fields):
            raise UserError(f"model config: {each.reason}")


def check_hub_name(name: str) -> None:
    """Raise UserError if the hub id `name` belongs to a model in `UNSUPPORTED`. Call it before the config is downloaded."""
    short = name.rpartition("/")[2].lower()
    for each in UNSUPPORTED:
        if short.startswith(each.names):
            raise UserError(f"{name}: {each.reason}")


def missing_parts(config: Mapping[str, object]) -> list[str]:
    """The parts of `PARTS` that the fields of a config indicate."""
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, Mapping) else {})}
    return [part for part, keys in PARTS.items() if any(fields.get(key) not in (None, False, 0, "") for key in keys)]
