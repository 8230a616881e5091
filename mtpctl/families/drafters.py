"""Adds drafters to the configs of models without one, and describes how engines draft, from a model's config alone."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mtpctl.errors import UserError
from mtpctl.families.fields import object_field
from mtpctl.families.reading import (
    DFLASH_ARCHITECTURE,
    DRAFTER,
    EAGLE3_ARCHITECTURES,
    MTP_COUNTS,
    default_boundaries,
    family_of,
    missing_fields,
    shape_of,
    unsupported_by_vllm_cpu,
)
from mtpctl.families.shape import ModelShape

DrafterKind = Literal["mtp", "eagle3", "dflash"]

DRAFTER_TITLES: dict[DrafterKind, str] = {"eagle3": "EAGLE-3", "dflash": "DFlash"}

MTP_ARCHITECTURES = {"Qwen2ForCausalLM": "MiMoForCausalLM"}
"""Maps an architecture without MTP layers to one that has the same trunk, and MTP layers in addition."""

_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_COPIED_FIELDS = (
    *_ROPE_FIELDS,
    "rms_norm_eps",
    "hidden_act",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "dtype",
)


def default_drafter_kind(config: Mapping[str, object]) -> DrafterKind:
    """`mtp` if vLLM supports MTP layers with the model's trunk, else `eagle3`."""
    family = family_of(config)
    return "mtp" if family.mtp is not None or family.architectures[0] in MTP_ARCHITECTURES else "eagle3"


def add_drafter_config(config: Mapping[str, object], kind: DrafterKind | None = None, layers: int = 1) -> dict[str, object]:
    """Return the config of the model with a drafter of `layers` layers. `kind` defaults to `default_drafter_kind`.

    Raises UserError if the model already has a drafter, or if such a drafter is not supported for it.
    """
    shape, family = shape_of(config), family_of(config)
    if shape.mtp_layers:
        raise UserError(f"model: this {shape.family} already has a drafter ({shape.mtp_layers} layers); train it without adding one")
    kind = kind or default_drafter_kind(config)
    result = deepcopy(dict(config))
    if kind != "mtp":
        if family.mtp is not None:
            raise UserError(f"model.drafter.kind: {DRAFTER_TITLES[kind]} is not supported for {shape.family}; use mtp")
        if kind == "eagle3" and layers != 1:
            raise UserError(f"model.drafter.layers: an EAGLE-3 drafter has 1 layer, not {layers}")
        if kind == "dflash" and layers > shape.layers:
            raise UserError(
                f"model.drafter.layers: {layers} exceeds the model's {shape.layers} layers, from which the drafter's layers are copied"
            )
        result[DRAFTER] = _eagle3_config(config, shape) if kind == "eagle3" else _dflash_config(config, shape, layers)
    elif default_drafter_kind(config) == "mtp":
        result["architectures"] = [MTP_ARCHITECTURES.get(shape.architecture, shape.architecture)]
        key = MTP_COUNTS[family.name.startswith("qwen3.5")]
        text_config = result.get("text_config")
        (text_config if isinstance(text_config, dict) else result)[key] = layers
    else:
        raise UserError(f"model.drafter.kind: vLLM has no MTP layers for {shape.family}; use eagle3")
    shape_of(result)  # Rejects combinations that are not supported.
    return result


def _eagle3_config(config: Mapping[str, object], shape: ModelShape) -> dict[str, object]:
    boundaries = _choose_boundaries(shape)
    return _layer_fields(config, shape) | {
        "architectures": [EAGLE3_ARCHITECTURES[0]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": boundaries,
        "num_aux_hidden_states": len(boundaries),
    }


def _dflash_config(config: Mapping[str, object], shape: ModelShape, layers: int) -> dict[str, object]:
    eos = config.get("eos_token_id")
    mask_token = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(mask_token, int):
        raise UserError("model config: eos_token_id is missing; add it, because a DFlash drafter uses it as its mask token")
    return _layer_fields(config, shape) | {
        "architectures": [DFLASH_ARCHITECTURE],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": [boundary - 1 for boundary in _choose_boundaries(shape)]},
    }


def _choose_boundaries(shape: ModelShape) -> list[int]:
    layers = shape.layers
    return list(default_boundaries(layers)) if layers > 6 else sorted({1, (layers + 1) // 2, layers})


def _layer_fields(config: Mapping[str, object], shape: ModelShape) -> dict[str, object]:
    """The fields that EAGLE-3 and DFlash drafters have in common."""
    model_fields = {**config, **object_field(config, "text_config")}
    result: dict[str, object] = {key: deepcopy(model_fields[key]) for key in _COPIED_FIELDS if model_fields.get(key) is not None}
    return result | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn or (shape.moe.ffn * shape.moe.experts_per_token if shape.moe else 0),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.vocab,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_eps,
    }


SGLANG_TESTED = ("mimo",)
"""Families whose drafts in SGLang are covered by mtpctl's tests."""


class Drafting(NamedTuple):
    """Descriptions of a model's drafter, and of how each engine drafts; empty for an engine that cannot draft."""

    drafter: str
    vllm: str
    sglang: str


@dataclass(frozen=True, slots=True)
class Support:
    """A supported model. cpu_limits: restrictions of vLLM on a CPU for this model, in fp32 or bf16."""

    shape: ModelShape
    drafting: Drafting
    cpu_limits: tuple[str, ...]


def check_support(config: Mapping[str, object]) -> Support:
    """Describe how the model of a config is supported. Raises UserError, which names the missing part, if it is not supported."""
    shape = shape_of(config)
    if errors := list(missing_fields(config)):
        raise UserError(errors[0])
    fp32, bf16 = (list(unsupported_by_vllm_cpu(shape, dtype)) for dtype in ("fp32", "bf16"))
    return Support(shape, describe_drafting(config, shape), tuple(dict.fromkeys([*fp32, *bf16])))


def describe_drafting(config: Mapping[str, object], shape: ModelShape) -> Drafting:
    if shape.eagle3 is not None:
        return Drafting("an EAGLE-3 drafter", "its EAGLE-3 drafter", "")
    if shape.dflash is not None:
        count = f"{shape.dflash.layers} layer{'s' * (shape.dflash.layers > 1)}"
        return Drafting(f"a DFlash drafter with {count}", "its DFlash drafter", "")
    if not shape.mtp_layers:
        if default_drafter_kind(config) == "eagle3":
            return Drafting("none; mtpctl add-drafter creates an EAGLE-3 drafter", "the EAGLE-3 drafter of mtpctl add-drafter", "")
        added_layer = "the MTP layer of mtpctl add-drafter"
        return Drafting("none; mtpctl add-drafter creates an MTP layer", added_layer, added_layer)
    limitation = "" if shape.family in SGLANG_TESTED else "; mtpctl's tests do not cover this family"
    sglang = f"EAGLE over the MTP layers, on GPUs{limitation}"
    if shape.mtp_layers == 1:
        return Drafting("1 MTP layer", "the MTP layer, repeated for each further draft token", sglang)
    vllm = "each MTP layer at its depth on GPUs; the first layer, for one draft token, on a CPU"
    return Drafting(f"{shape.mtp_layers} MTP layers", vllm, sglang)
