"""Drafters that can be added to a model: the kind of each family, the config with it, and configs that are rejected in one line."""

from __future__ import annotations

from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.families.configs import HUB_CONFIGS, hub_config
from mtpctl.families.drafters import add_drafter_config, check_support, default_drafter_kind
from mtpctl.families.reading import default_boundaries, mtp_layers_of, shape_of
from mtpctl.families.registry import UNSUPPORTED_MODELS, check_hub_name, missing_parts
from mtpctl.families.tensors import count_parameters, section_of, tensor_shapes
from tests.fakes.toys import DEEPSEEK_V3, DFLASH, EAGLE3, GLM4_MOE, LLAMA_DFLASH, LLAMA_EAGLE3, MIMO, QWEN3_MOE_EAGLE3, SIZES, TOYS


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


LLAMA = without(LLAMA_EAGLE3, "drafter")
HEADLESS: dict[str, dict[str, Any]] = {
    "qwen2": {**without(SIZES, "head_dim"), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    **{
        name.removesuffix(" with EAGLE-3"): without(config, "drafter", "num_nextn_predict_layers", "mtp_num_hidden_layers")
        for name, config in TOYS.items()
        if "DFlash" not in name
    },
}
HEADLESS["mimo-v2-flash"]["num_nextn_predict_layers"] = 0  # without the field it has three
KINDS = dict.fromkeys(HEADLESS, "mtp") | dict.fromkeys(("llama", "mistral", "qwen3", "qwen3-moe"), "eagle3")


@pytest.mark.parametrize("family", HEADLESS)
def test_default_kind_is_mtp_if_engines_have_mtp_layers_for_the_trunk(family: str) -> None:
    assert default_drafter_kind(HEADLESS[family]) == KINDS[family]


@pytest.mark.parametrize("family", HEADLESS)
def test_config_with_a_drafter_has_the_trunk_of_the_model(family: str) -> None:
    config = HEADLESS[family]
    result = add_drafter_config(config)
    before, shape = shape_of(config), shape_of(result)
    assert mtp_layers_of(result) == shape.mtp_layers == 1 and (shape.eagle3 is not None) == (KINDS[family] == "eagle3")
    assert shape.family == {"qwen2": "mimo"}.get(family, before.family)
    tensors = tensor_shapes(shape)
    trunk = {name: size for name, size in tensors.items() if section_of(name, shape) == "target"}
    assert trunk == tensor_shapes(before)
    counts = count_parameters(shape)
    assert counts["total"] - counts["mtp"] == count_parameters(before)["total"] and counts["mtp"]
    assert config == HEADLESS[family] and not shape_of(config).mtp_layers, "the given config is not changed"


@pytest.mark.parametrize(("family", "count"), [("qwen2", 3), ("glm4-moe", 2), ("qwen3.5", 1)])
def test_number_of_mtp_layers_is_written_under_the_key_of_the_family(family: str, count: int) -> None:
    result = add_drafter_config(HEADLESS[family], "mtp", count)
    assert shape_of(result).mtp_layers == count
    assert result["mtp_num_hidden_layers" if family == "qwen3.5" else "num_nextn_predict_layers"] == count


def test_parameters_of_an_eagle3_drafter() -> None:
    """fc reads 3 states of 96; q, k and v read pairs; one MLP as wide as the model's; norms of embedding, state, MLP and output."""
    hidden, q, kv, ffn = 96, 3 * 32, 1 * 32, 104
    expected = 3 * hidden * hidden + 2 * hidden * (q + 2 * kv) + q * hidden + 3 * hidden * ffn + 4 * hidden
    assert count_parameters(shape_of(add_drafter_config(LLAMA)))["mtp"] == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("layers", [1, 2])
def test_dflash_drafter_has_separate_layers_and_the_end_token_as_mask(family: str, layers: int) -> None:
    result = add_drafter_config(HEADLESS[family], "dflash", layers)
    before, shape = shape_of(HEADLESS[family]), shape_of(result)
    assert shape.dflash is not None and shape.mtp_layers == 1 and shape.eagle3 is None
    assert (shape.dflash.layers, shape.dflash.mask_token) == (layers, SIZES["eos_token_id"])
    assert shape.boundaries == shape_of(add_drafter_config(HEADLESS[family], "eagle3")).boundaries
    tensors = tensor_shapes(shape)
    assert {name: size for name, size in tensors.items() if section_of(name, shape) == "target"} == tensor_shapes(before)
    width = shape.heads * shape.head_dim
    ffn = shape.dflash.ffn
    layer = 96 * (width + 2 * 32) + width * 96 + 3 * 96 * ffn + 2 * 96 + 2 * 32
    assert count_parameters(shape)["mtp"] == len(shape.boundaries) * 96 * 96 + 2 * 96 + layers * layer


def test_first_of_several_end_tokens_is_the_mask_of_a_dflash_drafter() -> None:
    shape = shape_of(add_drafter_config(LLAMA | {"eos_token_id": [7, 8]}, "dflash"))
    assert shape.dflash is not None and shape.dflash.mask_token == 7
    with pytest.raises(UserError, match=r"^model config: eos_token_id is missing; add it, because a DFlash drafter uses it"):
        add_drafter_config(without(LLAMA, "eos_token_id"), "dflash")


def test_drafter_of_a_sparse_model_is_as_wide_as_its_active_experts() -> None:
    drafter = add_drafter_config(without(QWEN3_MOE_EAGLE3, "drafter", "intermediate_size") | {"intermediate_size": 0})["drafter"]
    assert isinstance(drafter, dict) and drafter["intermediate_size"] == 2 * 40


def test_default_boundaries_are_those_of_vllm() -> None:
    """`get_eagle3_default_aux_hidden_state_layers` of a model with 30 layers."""
    from types import SimpleNamespace

    from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3

    class Decoder(EagleModelMixin):
        layers = tuple(range(30))

    model = SimpleNamespace(model=Decoder())
    expected = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(model)  # type: ignore[arg-type]
    assert default_boundaries(30) == expected == (2, 15, 27)
    config = {**LLAMA_EAGLE3, "num_hidden_layers": 30, "drafter": without(EAGLE3, "eagle_aux_hidden_state_layer_ids")}
    eagle3 = shape_of(config).eagle3
    assert eagle3 is not None and eagle3.boundaries == expected
    added = add_drafter_config({**LLAMA, "num_hidden_layers": 30})["drafter"]
    assert isinstance(added, dict) and added["eagle_aux_hidden_state_layer_ids"] == list(expected)


@pytest.mark.parametrize(("layers", "boundaries"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 3, 5]), (6, [1, 3, 6]), (7, [2, 3, 4])])
def test_boundaries_of_shallow_models_are_within_them(layers: int, boundaries: list[int]) -> None:
    """With fewer than three boundaries, vLLM needs their number."""
    drafter = add_drafter_config({**LLAMA, "num_hidden_layers": layers})["drafter"]
    assert isinstance(drafter, dict)
    assert (drafter["eagle_aux_hidden_state_layer_ids"], drafter["num_aux_hidden_states"]) == (boundaries, len(boundaries))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_eagle3_drafter_has_the_rotary_embedding_of_the_model(family: str) -> None:
    scaled = {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    drafter = add_drafter_config(HEADLESS[family] | scaled)["drafter"]
    assert isinstance(drafter, dict) and {key: drafter[key] for key in scaled} == scaled
    shape_of({**HEADLESS[family], **scaled, "drafter": drafter})


@pytest.mark.parametrize(
    ("family", "kind", "layers", "message"),
    [
        ("llama", "mtp", 1, "model.drafter.kind: vLLM has no MTP layers for llama; use eagle3"),
        ("llama", "eagle3", 2, "model.drafter.layers: an EAGLE-3 drafter has 1 layer, not 2"),
        ("glm4-moe", "eagle3", 1, "model.drafter.kind: EAGLE-3 is not supported for glm4-moe; use mtp"),
        ("mimo", "eagle3", 1, "model.drafter.kind: EAGLE-3 is not supported for mimo; use mtp"),
        ("deepseek-v3", "eagle3", 1, "model.drafter.kind: EAGLE-3 is not supported for deepseek-v3; use mtp"),
        ("mimo", "dflash", 1, "model.drafter.kind: DFlash is not supported for mimo; use mtp"),
        ("llama", "dflash", 5, "model.drafter.layers: 5 exceeds the model's 4 layers"),
        ("qwen3.5", "mtp", 2, "model config: 2 MTP layers of qwen3.5 would share one projection"),
    ],
)
def test_drafters_that_no_engine_serves_are_rejected(family: str, kind: Any, layers: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        add_drafter_config(HEADLESS[family], kind, layers)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mimo", "llama with EAGLE-3"])
def test_second_drafter_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match=r"^model: this \S+ already has a drafter \(1 layers\); train it without adding one$"):
        add_drafter_config(TOYS[name])


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["LlamaForCausalLM"]},
        "drafter config: architectures ['LlamaForCausalLM'] is not supported; LlamaForCausalLMEagle3 and DFlashDraftModel are",
    ),
    ({"architectures": "LlamaForCausalLMEagle3"}, "drafter config: architectures must be a list"),
    ({"hidden_size": 64}, "drafter config: hidden_size 64 is not supported with this model; expected 96"),
    ({"hidden_size": None}, "drafter config: hidden_size is missing"),
    ({"target_hidden_size": 64}, "drafter config: target_hidden_size 64 is not supported with this model; expected 96"),
    ({"num_attention_heads": 6}, "drafter config: num_attention_heads 6 is not supported with this model; expected 3"),
    ({"num_key_value_heads": None}, "drafter config: num_key_value_heads 3 is not supported with this model; expected 1"),
    ({"head_dim": 64}, "drafter config: head_dim 64 is not supported with this model; expected 32"),
    ({"vocab_size": 400}, "drafter config: vocab_size 400 is not supported with this model; expected 331"),
    ({"draft_vocab_size": 100}, "drafter config: draft_vocab_size 100 is not supported with this model; expected 331"),
    ({"num_hidden_layers": 2}, "drafter config: num_hidden_layers 2 is not supported with this model; expected 1"),
    ({"intermediate_size": None}, "drafter config: intermediate_size is missing"),
    ({"rms_norm_eps": 1e-5}, "drafter config: rms_norm_eps 1e-05 is not supported with this model; expected 1e-06"),
    ({"hidden_act": "gelu"}, "drafter config: hidden_act 'gelu' is not supported; use silu"),
    ({"attention_bias": True}, "drafter config: attention_bias adds a bias to"),
    ({"mlp_bias": True}, "drafter config: mlp_bias adds a bias to"),
    ({"logit_scale": 0.5}, "drafter config: logit_scale 0.5 is not supported"),
    ({"rope_theta": 5000.0}, "drafter config: rope_theta and rope_scaling must be the model's"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "drafter config: rope_theta and rope_scaling must be the model's"),
    ({"partial_rotary_factor": 0.5}, "drafter config: partial_rotary_factor 0.5 is not supported for llama; expected 1"),
    *(
        ({key: True}, f"drafter config: {key} is not supported: the trainer would compute the drafter without it")
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
    ),
    ({"norm_output": "yes"}, "drafter config: norm_output must be true or false, got 'yes'"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "drafter config: eagle_config is not supported"),
    *(
        (
            {"eagle_aux_hidden_state_layer_ids": layers},
            "drafter config: eagle_aux_hidden_state_layer_ids must be increasing numbers from 1 to 4",
        )
        for layers in ([0, 1, 2], [1, 2, 5], [2, 1, 4], [1, 1, 4], ["1", 2, 4])
    ),
    ({"eagle_aux_hidden_state_layer_ids": [1, 4]}, "drafter config: num_aux_hidden_states is 3, but there are 2 layers to read"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=[f"{next(iter(fields))}-{n}" for n, (fields, _) in enumerate(MISTAKES)])
def test_drafter_that_the_trainer_does_not_compute_is_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        shape_of({**LLAMA_EAGLE3, "drafter": {**EAGLE3, **fields}})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_drafter_does_not_fit_a_model_with_mtp_layers() -> None:
    with pytest.raises(UserError, match=r"^model config: the model has both MTP layers and an EAGLE-3 drafter; keep one of them$"):
        shape_of({**GLM4_MOE, "drafter": EAGLE3})
    with pytest.raises(UserError, match=r"^drafter config: an EAGLE-3 drafter is not supported for glm4-moe; use its MTP layers$"):
        shape_of({**GLM4_MOE, "num_nextn_predict_layers": 0, "drafter": EAGLE3})
    with pytest.raises(UserError, match=r"^drafter config: drafter must be an object"):
        shape_of({**LLAMA_EAGLE3, "drafter": "somewhere"})


DFLASH_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": None}, "drafter config: num_key_value_heads is missing"),
    ({"head_dim": 64}, "drafter config: head_dim 64 is not supported with this model; expected 32"),
    ({"attention_bias": True}, "drafter config: attention_bias adds a bias to the output projections"),
    ({"rope_theta": 5000.0}, "drafter config: rope_theta and rope_scaling must be the model's"),
    ({"is_causal": True}, "drafter config: is_causal: true is not supported; leave it out"),
    ({"is_neox_style": False}, "drafter config: is_neox_style: false is not supported; leave it out"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "drafter config: layer_types with windows are not supported"),
    *(
        ({"dflash_config": DFLASH["dflash_config"] | {key: True}}, f"drafter config: dflash_config.{key} is not supported")
        for key in ("causal", "use_swa", "attention_sink_bias")
    ),
    *(
        (
            {"dflash_config": DFLASH["dflash_config"] | {"mask_token_id": mask}},
            "drafter config: dflash_config.mask_token_id must be a token id below 331",
        )
        for mask in (None, 331, "2")
    ),
    *(
        (
            {"dflash_config": DFLASH["dflash_config"] | {"target_layer_ids": layers}},
            "drafter config: dflash_config.target_layer_ids must be increasing numbers from 0 to 3",
        )
        for layers in (None, [], [0, 4], [1, 0], ["0"])
    ),
]


@pytest.mark.parametrize(("fields", "message"), DFLASH_MISTAKES, ids=[f"{next(iter(f))}-{n}" for n, (f, _) in enumerate(DFLASH_MISTAKES)])
def test_dflash_drafter_that_the_trainer_does_not_compute_is_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        shape_of({**LLAMA_DFLASH, "drafter": {**DFLASH, **fields}})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_dflash_fields_that_change_nothing_are_accepted() -> None:
    neutral = {"dflash_config": DFLASH["dflash_config"] | {"causal": False, "use_swa": False}, "is_causal": False, "block_size": 16}
    assert shape_of({**LLAMA_DFLASH, "drafter": {**DFLASH, **neutral}}) == shape_of(LLAMA_DFLASH)
    with pytest.raises(UserError, match=r"^drafter config: a DFlash drafter is not supported for glm4-moe; use its MTP layers$"):
        shape_of({**GLM4_MOE, "num_nextn_predict_layers": 0, "drafter": DFLASH})


@pytest.mark.parametrize("name", TOYS)
def test_every_toy_is_supported_and_drafts_in_vllm(name: str) -> None:
    support = check_support(TOYS[name])
    assert support.shape.mtp_layers == 1 and support.drafting.vllm
    assert bool(support.drafting.sglang) == (" with " not in name)


def test_one_mtp_layer_is_repeated_and_several_are_used_at_their_depths() -> None:
    assert check_support(MIMO).drafting.drafter == "1 MTP layer"
    assert "repeated" in check_support(MIMO).drafting.vllm
    several = check_support(MIMO | {"num_nextn_predict_layers": 3}).drafting
    assert several.drafter == "3 MTP layers" and "each MTP layer at its depth" in several.vllm


def test_model_without_a_drafter_names_the_one_that_can_be_added() -> None:
    plain = {key: value for key, value in LLAMA_EAGLE3.items() if key != "drafter"}
    drafting = check_support(plain).drafting
    assert drafting.drafter == "none; mtpctl add-drafter creates an EAGLE-3 drafter" and drafting.sglang == ""
    qwen2 = check_support(SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}).drafting
    assert qwen2.drafter == "none; mtpctl add-drafter creates an MTP layer" and qwen2.sglang


def test_conditions_of_vllm_on_a_cpu_are_listed() -> None:
    assert check_support(MIMO).cpu_limits == ()
    (limit,) = check_support(TOYS["qwen3.5"]).cpu_limits
    assert "only in bf16" in limit
    (limit,) = check_support(DEEPSEEK_V3 | {"kv_lora_rank": 256}).cpu_limits
    assert "latent attention of 576" in limit


def test_missing_field_whose_default_differs_is_an_error() -> None:
    with pytest.raises(UserError, match="scoring_func is missing"):
        check_support({key: value for key, value in DEEPSEEK_V3.items() if key != "scoring_func"})


@pytest.mark.parametrize("hub_id", HUB_CONFIGS)
def test_every_hub_config_is_supported(hub_id: str) -> None:
    assert check_support(hub_config(hub_id)).shape.layers > 0


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}, "GLM-5 is not supported: .* indexer; use GLM-4.7"),
    ({"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}, "DeepSeek-V3.2 is .* indexer; use DeepSeek-V3"),
    ({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}, "DeepSeek-V4 is .* compressed keys .*; use DeepSeek-V3"),
    # The architecture is that of a supported family.
    ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}, "Kimi-K2 is not supported: .*; use DeepSeek-V3"),
    ({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"model_type": "kimi_k2"}}, "Kimi-K2 is not supported"),
    ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "gpt-oss is not supported: .* sinks, .*; use Qwen3-30B-A3B"),
    (
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 512, "final_logit_softcapping": 30.0},
        r"\['Gemma3ForCausalLM'\] is not a known family, and the trainer has no sliding windows and no soft caps on logits; known are",
    ),
    ({"architectures": ["BertModel"], "model_type": "bert"}, r"\['BertModel'\] is not a known family; known are"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "")
def test_unsupported_model_gives_one_line_with_reason_and_alternative(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_support({**SIZES, **config})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "hub_id",
    [
        "zai-org/GLM-5.1-FP8",
        "deepseek-ai/DeepSeek-V3.2-Exp",
        "moonshotai/Kimi-K2-Instruct",
        "openai/gpt-oss-120b",
        "Qwen/Qwen3.8-Flash-Next",
    ],
)
def test_unsupported_hub_model_is_recognized_by_its_name(hub_id: str) -> None:
    with pytest.raises(UserError, match=f"^{hub_id}: .* is not supported: .*; use "):
        check_hub_name(hub_id)


def test_names_and_types_of_supported_models_are_not_unsupported() -> None:
    types = {kind for each in UNSUPPORTED_MODELS for kind in each.model_types}
    for hub_id, config in HUB_CONFIGS.items():
        check_hub_name(hub_id)
        assert config["model_type"] not in types


def test_a_part_that_is_switched_off_is_not_missing() -> None:
    assert missing_parts({"sliding_window": None, "final_logit_softcapping": 0, "text_config": {"index_topk": 2048}}) == [
        "sparse attention with an indexer"
    ]
