"""Configs are read into shapes, and errors name the field that is invalid or not supported."""

from __future__ import annotations

from typing import Any

import pytest

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.families.configs import HUB_CONFIGS, hub_config
from mtpctl.families.reading import MTP_COUNTS, check_importable, describe_context, extend_context, shape_of
from mtpctl.families.registry import FAMILIES
from tests.fakes.toys import LLAMA_EAGLE3, SIZES, TOYS

MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 512,
    "num_nextn_predict_layers": 1,
    "rope_theta": 5000.0,
    "max_position_embeddings": 300,
}


def test_the_family_follows_the_architecture_before_the_model_type() -> None:
    shape = shape_of(MIMO)
    assert (shape.family, shape.architecture, shape.mtp_layers) == ("mimo", "MiMoForCausalLM", 1)
    assert (shape.head_dim, shape.kv_heads, shape.rope_theta, shape.max_positions) == (32, 2, 5000.0, 300)
    assert shape.qkv_bias and not shape.qk_norm and not shape.tied


def test_a_config_without_architectures_is_read_by_its_model_type() -> None:
    assert shape_of({**MIMO, "architectures": None, "num_nextn_predict_layers": 0}).family == "qwen2"


@pytest.mark.parametrize(
    ("architecture", "prenorm"),
    [
        ("MiMoForCausalLM", True),
        ("DeepseekV3ForCausalLM", False),
        ("Qwen3NextForCausalLM", False),
        ("Qwen3_5ForCausalLM", False),
        ("Glm4MoeForCausalLM", False),
    ],
)
def test_the_inputs_of_mtp_layers_follow_the_family(architecture: str, prenorm: bool) -> None:
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    shape = shape_of({**MIMO, **latent, **moe, "architectures": [architecture]})
    assert shape.mtp is not None
    assert shape.mtp_reads_prenorm == prenorm
    assert shape.mtp.blanks_first == (not architecture.startswith("Qwen"))
    assert shape.mtp.passes_prenorm == architecture.startswith("Glm")


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        shape_of({**MIMO, "architectures": ["Gemma3ForCausalLM"]})
    message = str(caught.value)
    assert "Gemma3ForCausalLM" in message and "\n" not in message
    assert all(f"{family.name} ({family.architectures[0]})" in message for family in FAMILIES)


@pytest.mark.parametrize("key", MTP_COUNTS)
@pytest.mark.parametrize("nested", [False, True])
def test_every_name_of_the_mtp_count_is_read(key: str, nested: bool) -> None:
    plain = {k: v for k, v in MIMO.items() if k != "num_nextn_predict_layers"}
    counted = {"text_config": {key: 2}} if nested else {key: 2}
    assert shape_of({**plain, **counted}).mtp_layers == 2
    assert shape_of(plain).mtp_layers == 0
    assert shape_of(plain).mtp is None


@pytest.mark.parametrize("hub_id", [name for name in HUB_CONFIGS if "MiMo-7B" in name])
def test_wrong_length_in_a_published_config_of_mimo_7b_is_corrected(hub_id: str) -> None:
    config = hub_config(hub_id)
    assert shape_of(config).max_positions == 32768
    assert shape_of({**config, "max_position_embeddings": 640000}).max_positions == 32768
    assert shape_of({**config, "max_position_embeddings": 131072}).max_positions == 131072


def test_hub_configs_are_copies() -> None:
    hub_config("XiaomiMiMo/MiMo-7B-RL")["vocab_size"] = 1
    assert hub_config("XiaomiMiMo/MiMo-7B-RL")["vocab_size"] == 151680


def test_full_attention_layers_follow_the_interval() -> None:
    shape = shape_of({**MIMO, "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 8, "full_attention_interval": 4})
    assert [i for i, kind in enumerate(shape.layer_kinds) if kind == "full_attention"] == [3, 7]
    assert shape.layer_kinds.count("full_attention") == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertModel"]}, r"architectures \['BertModel'\] is not a known family; known are mimo \(MiMoForCausalLM\)"),
        ({"architectures": [], "model_type": "bert"}, "model_type 'bert' is not a known family"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a positive integer, got '4'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 64}, r"head_dim 64 is not supported for mimo; expected 32 \(hidden_size"),
        ({"architectures": ["LlamaForCausalLM"]}, "1 MTP layers are named, but the family llama has none"),
        ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers must be a positive integer"),
        ({"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types must name"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_nextn_predict_layers": 0}, "moe_intermediate_size is missing"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number above 0, got '1e4'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0, got -1"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        ({"text_config": []}, r"text_config must be an object, got \[\]"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": "no", "num_nextn_predict_layers": 0}, "attention_bias must be true"),
        ({"architectures": "MiMoForCausalLM"}, "architectures must be a list, got 'MiMoForCausalLM'"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True, "num_nextn_predict_layers": 0},
            "attention_bias adds a bias to the output projections of qwen3, which is not supported",
        ),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True, "num_nextn_predict_layers": 0}, "mlp_bias adds a bias .* of llama"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is not supported; use linear, llama3 or yarn"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"RoPE scaling \['yarn'\] is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE scaling 'linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1}}, "'llama3' lacks high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "RoPE scaling 'yarn' lacks factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "RoPE scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "rope_type 'yarn' and type 'linear' contradict"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each kind of layer are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for mimo; expected 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor must be a number above 0, got '4'"),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "num_nextn_predict_layers": None, "mtp_num_hidden_layers": 2},
            "2 MTP layers of qwen3.5 would share one projection, which is not supported; expected 1",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; use silu"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"architectures": ["Glm4MoeForCausalLM"], "norm_topk_prob": False}, "norm_topk_prob false is not supported for glm4-moe"),
        ({"architectures": ["Qwen3NextForCausalLM"], "norm_topk_prob": False}, "norm_topk_prob false is not supported for qwen3-next"),
        ({"architectures": ["Qwen3_5ForCausalLM"], "layer_types": 4}, "layer_types must name"),
        ({"architectures": ["Qwen3_5ForCausalLM"], "layer_types": [{}, [], 1, 2]}, "layer_types must name"),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_nextn_predict_layers": 0,
                "moe_intermediate_size": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "mlp_only_layers": 1,
            },
            "mlp_only_layers must be a list of layers, got 1",
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "q_lora_rank": "8",
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
            },
            "q_lora_rank must be a positive integer, got '8'",
        ),
    ],
)
def test_an_invalid_field_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of({**MIMO, **fields})


TOY_OF = {**TOYS, "qwen2": {**MIMO, "architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}} | {
    name: {**SIZES, **fields, "architectures": [architecture], "num_nextn_predict_layers": 0}
    for name, architecture, fields in (
        ("llama", "LlamaForCausalLM", {}),
        ("qwen3", "Qwen3ForCausalLM", {}),
        ("qwen3-moe", "Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    )
}


UNSUPPORTED: dict[str, object] = {
    "attn_logit_softcapping": 50.0,
    "hidden_act": "gelu_pytorch_tanh",
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "mlp_bias": True,
    "moe_layer_freq": 2,
}
"""Fields of which a family could have its own check."""
UNSUPPORTED_EVERYWHERE: dict[str, object] = {
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "query_pre_attn_scalar": 224,
    "clip_qkv": 8.0,
    "hidden_activation": "gelu",
    "alibi": True,
    "is_causal": False,
    "position_embedding_type": "alibi",
    "dual_chunk_attention_config": {"chunk_size": 8192},
    "use_parallel_residual": True,
    "layer_scale": True,
}
"""Fields that one check rejects for all families."""


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [(family, key, value) for family in TOY_OF for key, value in UNSUPPORTED.items()]
    + [(family, key, value) for family in ("mimo", "deepseek-v3") for key, value in UNSUPPORTED_EVERYWHERE.items()],
)
def test_a_field_that_changes_the_model_is_an_error(family: str, key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"model config: {key} ") as caught:
        shape_of({**TOY_OF[family], key: value})
    assert "not supported" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3-next", {"attn_output_gate": False}, "attn_output_gate must be true for qwen3-next"),
        ("qwen3", {"attn_output_gate": True}, "attn_output_gate must be false for qwen3"),
        ("qwen3-next", {"qkv_bias": True}, "qkv_bias true is not supported for qwen3-next; expected false"),
        ("llama", {"qkv_bias": True}, "qkv_bias true is not supported for llama"),
        ("qwen2", {"qk_norm": True}, "qk_norm true is not supported for qwen2"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm false is not supported for qwen3"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias adds a bias to the output projections of deepseek-v3"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave False is not supported"),
        ("deepseek-v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for deepseek-v3"),
        (
            "deepseek-v3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "RoPE scaling 'linear' is not supported for deepseek-v3; expected yarn",
        ),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale and mscale_all_dim .* both be given"),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.1}}, "attention_factor is not supported"),
        ("deepseek-v3", {"index_topk": 2048}, "index_topk 2048 is not supported"),
        ("glm4-moe", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for glm4-moe; expected 'sigmoid'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for deepseek-v3; expected 'sigmoid'"),
        ("glm4-moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported for glm4-moe"),
        ("qwen3-moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5 is not supported for qwen3-moe; expected 1"),
        ("llama", {"sliding_window": 64}, "sliding_window 64 is not supported"),
        ("qwen3.5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings True is not supported"),
        ("deepseek-v3", {"num_experts_per_tok": 4}, "topk_group 1 with num_experts_per_tok 4 is not supported; expected 2"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported for nemotron-h; expected 'relu2'"),
        ("nemotron-h", {"use_conv_bias": False}, "use_conv_bias False is not supported for nemotron-h; expected True"),
        ("nemotron-h", {"n_shared_experts": 2}, "n_shared_experts 2 is not supported for nemotron-h; expected 1"),
        ("nemotron-h", {"moe_latent_size": 64}, "no experts with a latent width .*; use Nemotron 3 Nano or Nemotron 3.5 Lightning"),
        ("nemotron-h", {"time_step_limit": [0.001, 0.1]}, "time_step_limit .* vLLM ignores it"),
        ("nemotron-h", {"hybrid_override_pattern": "MEX"}, "layers_block_type must list linear_attention, .* got .*'X'"),
        ("nemotron-h", {"num_hidden_layers": 5}, "num_hidden_layers is 5, but layers_block_type has 6"),
        ("nemotron-h", {"mtp_hybrid_override_pattern": "ME"}, "mtp_layers_block_type .* is not supported for nemotron-h"),
        ("nemotron-h", {"hybrid_override_pattern": "M*M*M*"}, "layers_block_type needs at least one attention and one MoE layer, whose"),
        ("nemotron-h", {"n_groups": 4}, "mamba_num_heads 6 is not a multiple of n_groups 4"),
        ("nemotron-h", {"use_bias": True}, "use_bias adds a bias to the output projections of nemotron-h"),
        ("mimo-v2-flash", {"swa_head_dim": 64}, "swa_head_dim 64 is not supported for mimo-v2-flash with this config; expected 32"),
        ("mimo-v2-flash", {"swa_num_attention_heads": 6}, "swa_num_attention_heads 6 is not supported .*; expected 3"),
        ("mimo-v2-flash", {"swa_num_key_value_heads": 2}, "num_attention_heads 3 is not a multiple of swa_num_key_value_heads 2"),
        ("mimo-v2-flash", {"sliding_window": 8}, "sliding_window 8 is not supported .*; expected 7"),
        ("mimo-v2-flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True is not supported"),
        ("mimo-v2-flash", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5 is not supported"),
        ("mimo-v2-flash", {"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
        ("mimo-v2-flash", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype 'bfloat16' is not supported"),
        ("mimo-v2-flash", {"v_head_dim": 48, "swa_v_head_dim": 48}, "v_head_dim above head_dim is not supported"),
        ("mimo-v2-flash", {"partial_rotary_factor": 0.34375}, "makes the number of rotated dimensions odd"),
        ("mimo-v2-flash", {"partial_rotary_factor": None}, "partial_rotary_factor is missing; mimo-v2-flash needs it"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must be a list of 0 or 1 for each of 3 layers"),
        (
            "mimo-v2-flash",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling is not supported for mimo-v2-flash: vLLM ignores it",
        ),
        (
            "mimo-v2-flash",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 500.0}}},
            "rope_parameters of sliding_attention differ from swa_rope_theta, which vLLM reads; make them equal",
        ),
    ],
)
def test_a_field_that_one_family_does_not_support_is_an_error(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of({**TOY_OF[family], **fields})


def test_mistral_has_a_window_unless_its_config_disables_it() -> None:
    """Transformers and vLLM then use a window of 4,096 tokens."""
    config = TOY_OF["mistral with EAGLE-3"] | {"max_position_embeddings": 8192}
    assert shape_of(config).family == "mistral"
    with pytest.raises(UserError, match="sliding_window 4096 is not supported"):
        shape_of({name: value for name, value in config.items() if name != "sliding_window"})


@pytest.mark.parametrize("family", TOY_OF)
def test_fields_without_effect_are_accepted(family: str) -> None:
    unused = {
        "attention_dropout": 0.1,
        "pretraining_tp": 1,
        "ep_size": 1,
        "aux_loss_alpha": 0.001,
        "moe_layer_freq": 1,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "use_sliding_window": False,
        "sliding_window": 64,
        "max_window_layers": 2,
        "logit_scale": 1.0,
        "final_logit_softcapping": None,
        "is_causal": True,
        "mlp_bias": False,
        "unsloth_version": "2026.9",
    }
    if TOY_OF[family].get("sliding_window_size"):
        unused = {key: value for key, value in unused.items() if key not in ("sliding_window", "moe_layer_freq")}
    assert shape_of({**TOY_OF[family], **unused}) == shape_of(TOY_OF[family])


def test_an_unknown_hub_id_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="XiaomiMiMo/MiMo-7B-RL"):
        hub_config("missing/nothing")


@pytest.mark.parametrize("family", TOYS)
def test_a_missing_package_that_vllm_needs_for_the_family_is_an_error(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.families.reading.find_spec", lambda name: None)
    if not family.startswith("qwen3.5"):
        check_importable(TOYS[family])
        return
    with pytest.raises(PrerequisiteMissing, match=f"torchvision: is not installed, and vLLM needs it to serve {family}; reinstall"):
        check_importable(TOYS[family])


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("name", ["XiaomiMiMo/MiMo-7B-RL", "Qwen/Qwen3.5-35B-A3B", "zai-org/GLM-4.5-Air"])
def test_positions_are_raised_and_rope_stays(name: str) -> None:
    config = hub_config(name)
    before, after = shape_of(config), shape_of(extend_context(config, 524_288))
    assert (after.max_positions, after.rope_scaling, after.rope_theta) == (524_288, before.rope_scaling, before.rope_theta)
    assert "so later positions are extrapolated" in describe_context(before, after)


def test_scaling_refers_to_the_length_of_the_config() -> None:
    config = hub_config("XiaomiMiMo/MiMo-7B-RL")
    after = shape_of(extend_context(config, 131_072, YARN))
    assert after.rope_scaling == {**YARN, "original_max_position_embeddings": 32_768}
    assert describe_context(shape_of(config), after) == "131,072 positions, 4 times those of the config; RoPE scaled by yarn, factor 4"


def test_eagle3_drafter_gets_the_context_of_its_model() -> None:
    context = 2 * shape_of(LLAMA_EAGLE3).max_positions
    longer = extend_context(LLAMA_EAGLE3, context, YARN)
    drafter = longer["drafter"]
    assert isinstance(drafter, dict) and drafter["max_position_embeddings"] == context
    assert shape_of(longer).eagle3 is not None


def test_same_context_is_the_same_config() -> None:
    longer = extend_context(hub_config("XiaomiMiMo/MiMo-7B-RL"), 131_072, YARN)
    assert extend_context(longer, 131_072) == longer
    assert extend_context(longer, 131_072, YARN) == longer, "RoPE is scaled relative to the length that the model was trained with"


@pytest.mark.parametrize(
    ("context", "scaling", "message"),
    [
        (1_000, None, "model.context: the model has 32,768 positions, got 1,000"),
        (262_144, YARN, "model.rope_scaling: covers 131,072 positions, but model.context is 262,144"),
        (65_536, {"rope_type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
    ],
)
def test_invalid_context_extension_is_rejected(context: int, scaling: dict[str, object] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        extend_context(hub_config("XiaomiMiMo/MiMo-7B-RL"), context, scaling)
