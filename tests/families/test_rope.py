"""Rotary embeddings are read from a config as transformers, and therefore the engines, read them."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch

from mtpctl.families.reading import shape_of
from mtpctl.model.rope import rope_of, window_rope_of
from tests.fakes.toys import SIZES, TOYS

CONFIGS: dict[str, dict[str, Any]] = {
    **{family: config for family, config in TOYS.items() if not {"drafter", "swa_rope_theta", "mamba_num_heads"} & config.keys()},
    "qwen2": {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "llama": {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn, untrained length": {"type": "yarn", "factor": 2.0},
    "yarn, own magnitude": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
    "yarn, one magnitude": {**YARN, "mscale": 0.7},
    "yarn, attention factor": {**YARN, "attention_factor": 1.3, "truncate": False},
    "yarn, short": {**YARN, "original_max_position_embeddings": 4},
    "llama3": LLAMA3,
    "llama3, untrained length": {name: value for name, value in LLAMA3.items() if not name.startswith("original")},
    "linear": LINEAR,
    "linear, older name": {"type": "linear", "factor": 2.0},
}
OF_LATENT = ("yarn", "yarn, untrained length", "yarn, own magnitude", "yarn, short")
DEFAULT = {"rope_type": "default", "rope_theta": 5000.0}


def placements(scaling: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The ways in which published configs write a scaling; None removes a field of the toy."""
    return {
        "rope_scaling": {"rope_scaling": scaling},
        "rope_parameters": {"rope_theta": None, "rope_parameters": {**scaling, "rope_theta": 5000.0}},
        "rope_parameters without theta": {"rope_parameters": scaling},
        "both": {"rope_parameters": DEFAULT, "rope_scaling": scaling},
        "both without theta": {"rope_theta": None, "rope_parameters": DEFAULT, "rope_scaling": scaling},
        "another scaling in rope_parameters": {"rope_parameters": {**LINEAR, "rope_theta": 5000.0}, "rope_scaling": scaling},
        "empty rope_scaling": {"rope_parameters": {**scaling, "rope_theta": 5000.0}, "rope_scaling": {}},
    }


def reference(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies and scaling computed by transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    return ROPE_INIT_FUNCTIONS[read.rope_parameters["rope_type"]](read)


LATENT = ("deepseek-v3", "glm4-moe-lite")

# Reading is common to all families but for their defaults: all combinations for llama and latent attention, each value once for others.
CASES = [
    (family, scaling, placement)
    for family in CONFIGS
    for scaling in (OF_LATENT if family in LATENT else SCALINGS)
    for placement in placements(SCALINGS[scaling])
    if family in ("llama", *LATENT) or scaling == "yarn" or placement == "rope_scaling"
]


@pytest.mark.parametrize(("family", "scaling", "placement"), CASES)
def test_rope_scaling_is_read_as_transformers_reads_it(family: str, scaling: str, placement: str) -> None:
    fields = placements(SCALINGS[scaling])[placement]
    config = {name: value for name, value in {**CONFIGS[family], **fields}.items() if value is not None}
    frequencies, magnitude = reference(config)
    rope = rope_of(shape_of(config))
    torch.testing.assert_close(rope.inverse_frequencies, frequencies, rtol=2e-6, atol=0)
    assert math.isclose(rope.scaling, magnitude, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 1024),
        (LLAMA3, 256),
        (YARN, 256),
        ({**YARN, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_max_positions_include_the_scaling_as_in_the_engine(scaling: dict[str, Any] | None, positions: int) -> None:
    """vLLM multiplies `max_position_embeddings` by a linear factor, and covers factor times the trained length with YaRN."""
    assert shape_of({**CONFIGS["llama"], "rope_scaling": scaling}).max_positions == positions


def test_a_converted_config_keeps_the_positions_of_its_source() -> None:
    from mtpctl.convert.hf_folder import config_to_write

    config = {**CONFIGS["llama"], "rope_scaling": LINEAR}
    assert config_to_write(config, torch.bfloat16, mtp_layers=0)["max_position_embeddings"] == config["max_position_embeddings"]


def test_window_layers_have_their_own_rotary_embedding() -> None:
    from transformers.models.mimo_v2_flash.configuration_mimo_v2_flash import MiMoV2FlashConfig
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashRotaryEmbedding

    config = deepcopy(TOYS["mimo-v2-flash"])
    shape = shape_of(config)
    thetas = {"full_attention": config["rope_theta"], "sliding_attention": config["swa_rope_theta"]}
    parameters = {kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334} for kind, theta in thetas.items()}
    kinds = list(shape.layer_kinds)
    reference = MiMoV2FlashRotaryEmbedding(MiMoV2FlashConfig(**config, rope_parameters=parameters, layer_types=kinds))
    window = window_rope_of(shape)
    assert window is not None
    torch.testing.assert_close(rope_of(shape).inverse_frequencies, reference.full_attention_inv_freq, rtol=2e-6, atol=0)
    torch.testing.assert_close(window.inverse_frequencies, reference.sliding_attention_inv_freq, rtol=2e-6, atol=0)
    assert shape_of({**config, "rope_parameters": parameters, "layer_types": kinds}) == shape


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "head_dim", "max_position_embeddings", "partial_rotary_factor"])
def test_a_missing_field_has_the_default_of_transformers(family: str, key: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = {name: value for name, value in CONFIGS[family].items() if name != key}
    read = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    shape = shape_of(config)
    rope = read.rope_parameters
    assert (shape.rope_theta, shape.rms_eps, shape.max_positions) == (
        rope["rope_theta"],
        read.rms_norm_eps,
        read.max_position_embeddings,
    )
    if shape.latent is None:
        assert shape.rotary_fraction == rope.get("partial_rotary_factor", 1.0)
        assert shape.head_dim == (getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads)
