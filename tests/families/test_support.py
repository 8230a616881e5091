"""What is reported about a model from its config alone: drafters of supported models, reasons and alternatives for others."""

from __future__ import annotations

from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.families.configs import HUB_CONFIGS, hub_config
from mtpctl.families.support import support_of
from mtpctl.families.unsupported import UNSUPPORTED, check_hub_name, missing_parts
from tests.fakes.toys import DEEPSEEK_V3, LLAMA_EAGLE3, MIMO, SIZES, TOYS


@pytest.mark.parametrize("name", TOYS)
def test_every_toy_is_supported_and_drafts_in_vllm(name: str) -> None:
    support = support_of(TOYS[name])
    assert support.shape.mtp_layers == 1 and support.drafting.vllm
    assert bool(support.drafting.sglang) == (" with " not in name)


def test_one_mtp_layer_is_repeated_and_several_are_used_at_their_depths() -> None:
    assert support_of(MIMO).drafting.drafter == "1 MTP layer"
    assert "repeated" in support_of(MIMO).drafting.vllm
    several = support_of(MIMO | {"num_nextn_predict_layers": 3}).drafting
    assert several.drafter == "3 MTP layers" and "each MTP layer at its depth" in several.vllm


def test_model_without_a_drafter_names_the_one_that_can_be_added() -> None:
    plain = {key: value for key, value in LLAMA_EAGLE3.items() if key != "drafter"}
    drafting = support_of(plain).drafting
    assert drafting.drafter == "none; mtpctl add-drafter creates an EAGLE-3 drafter" and drafting.sglang == ""
    qwen2 = support_of(SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}).drafting
    assert qwen2.drafter == "none; mtpctl add-drafter creates an MTP layer" and qwen2.sglang


def test_conditions_of_vllm_on_a_cpu_are_listed() -> None:
    assert support_of(MIMO).cpu_limits == ()
    (limit,) = support_of(TOYS["qwen3.5"]).cpu_limits
    assert "only in bf16" in limit
    (limit,) = support_of(DEEPSEEK_V3 | {"kv_lora_rank": 256}).cpu_limits
    assert "latent attention of 576" in limit


def test_missing_field_whose_default_differs_is_an_error() -> None:
    with pytest.raises(UserError, match="scoring_func is missing"):
        support_of({key: value for key, value in DEEPSEEK_V3.items() if key != "scoring_func"})


@pytest.mark.parametrize("hub_id", HUB_CONFIGS)
def test_every_hub_config_is_supported(hub_id: str) -> None:
    assert support_of(hub_config(hub_id)).shape.layers > 0


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
        support_of({**SIZES, **config})
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
    types = {kind for each in UNSUPPORTED for kind in each.model_types}
    for hub_id, config in HUB_CONFIGS.items():
        check_hub_name(hub_id)
        assert config["model_type"] not in types


def test_a_part_that_is_switched_off_is_not_missing() -> None:
    assert missing_parts({"sliding_window": None, "final_logit_softcapping": 0, "text_config": {"index_topk": 2048}}) == [
        "sparse attention with an indexer"
    ]
