"""From the recipe to SGLang's options, what it cannot do, and how long a response may become; all without SGLang."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.recipe.checks import list_complaints
from mtpctl.recipe.rollout import SglangConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.sglang.engine import SglangEngine
from mtpctl.rollout.sglang.settings import SglangSettings, build_sglang_settings
from mtpctl.samples import GenerationRequest, Sample


def args(**rollout: Any) -> dict[str, Any]:
    return build_sglang_settings(SglangConfig(**rollout), model="m", precision="bf16", seed=3).args


def test_a_chain_of_drafts() -> None:
    result = args(speculation={"num_tokens": 3})
    assert (result["speculative_num_steps"], result["speculative_eagle_topk"], result["speculative_num_draft_tokens"]) == (3, 1, 4)
    assert result["speculative_draft_model_path"] == "m", "the MTP layers are in the trunk's folder"
    assert result["disable_prefill_cuda_graph"], "a replayed graph passes the final norm by"


def test_a_tree_of_drafts() -> None:
    result = args(speculation={"num_tokens": 7}, draft_steps=3, draft_top_k=2)
    assert (result["speculative_num_steps"], result["speculative_eagle_topk"], result["speculative_num_draft_tokens"]) == (3, 2, 8)


def test_zero_draft_tokens_disable_speculation() -> None:
    assert not [name for name in args(speculation={"num_tokens": 0}) if name.startswith("speculative")]


def test_engine_args_override_settings() -> None:
    assert args(gpu_memory=0.5, engine_args={"mem_fraction_static": 0.3})["mem_fraction_static"] == 0.3


BASE: dict[str, Any] = {"engine": "sglang"}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"top_p": 0.9}, "rollout.top_p: SGLang's log-probs are those of the unfiltered"),
        ({"top_k": 5}, "rollout.top_k: SGLang's log-probs"),
        ({"kv_cache_bytes": 1 << 30}, "rollout.kv_cache_bytes: SGLang sizes its cache"),
        ({"speculation": {"num_tokens": 1, "auto": True}}, "rollout.speculation.auto: works with rollout.engine: vllm"),
        ({"speculation": {"num_tokens": 3}, "draft_steps": 2}, "rollout.draft_steps: a chain of 3 draft tokens takes 3 steps, got 2"),
        ({"speculation": {"num_tokens": 4}, "draft_top_k": 2}, "rollout.draft_steps: a tree of draft tokens"),
        ({"python": "/nowhere/python"}, "rollout.python: there is no interpreter /nowhere/python"),
    ],
)
def test_unsupported_settings_are_rejected_by_the_recipe(rollout: dict[str, Any], message: str) -> None:
    recipe = Recipe.model_validate({"model": {"path": "XiaomiMiMo/MiMo-7B-RL"}, "rollout": BASE | rollout})
    assert any(complaint.startswith(message) for complaint in list_complaints(recipe))


def test_seeds_need_its_deterministic_mode() -> None:
    recipe = {"model": {"path": "XiaomiMiMo/MiMo-7B-RL"}, "rollout": BASE, "async": {"deterministic": True}}
    assert any("enable_deterministic_inference" in complaint for complaint in list_complaints(Recipe.model_validate(recipe)))
    recipe["rollout"] = BASE | {"engine_args": {"enable_deterministic_inference": True}}
    assert not any("enable_deterministic_inference" in complaint for complaint in list_complaints(Recipe.model_validate(recipe)))


class Upstream:
    """SGLang's engine as far as its limits go: what its tokenizer manager and scheduler do with a request's length."""

    def __init__(self, context: int, reserved: int, capacity: int = 1 << 16) -> None:
        self.limit = min(context, capacity) - 2
        self.server_args = SimpleNamespace(speculative_algorithm="EAGLE" if reserved else None)
        self.tokenizer_manager = SimpleNamespace(
            context_len=context, num_reserved_tokens=reserved, max_req_input_len=min(context, capacity) - 6
        )

    def get_all_child_pids(self) -> list[int]:
        return []

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> dict[str, Any]:
        manager, wanted = self.tokenizer_manager, sampling_params["max_new_tokens"]
        if len(input_ids) >= manager.max_req_input_len or wanted + len(input_ids) + manager.num_reserved_tokens > manager.context_len:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        created = min(wanted, self.limit - len(input_ids))
        meta = {"output_token_logprobs": [(-1.0, 7, None)] * created, "finish_reason": {"type": "length"}, "weight_version": "0"}
        return {"output_ids": [7] * created, "meta_info": meta}


def answer(upstream: Upstream, prompt: int, response: int = 0, max_tokens: int = 1000) -> Sample:
    settings = SglangSettings({"max_running_requests": 1, "skip_tokenizer_init": True})
    sample = Sample("p0", "g", [1] * prompt)
    sample.append([7] * response, [-1.0] * response, 0)
    return asyncio.run(SglangEngine(upstream, settings, 0).generate(GenerationRequest(sample, max_tokens)))


@pytest.mark.parametrize(("reserved", "room"), [(0, 254), (2, 254), (3, 253), (8, 248)])
def test_response_ends_at_sglangs_context_limit(reserved: int, room: int) -> None:
    """As it does with vLLM, which keeps nothing of the context back; asked for more, SGLang would refuse the request."""
    for prompt in (3, 200, 240):
        result = answer(Upstream(256, reserved), prompt)
        assert (result.finish_reason, len(result.response_ids)) == ("length", room - prompt)
    assert len(answer(Upstream(256, reserved), 3, max_tokens=20).response_ids) == 20


@pytest.mark.parametrize("response", [247, 250, 254])
def test_response_aborted_near_the_end_of_the_context_is_finished(response: int) -> None:
    result = answer(Upstream(256, 0), 3, response)
    assert (result.finish_reason, len(result.response_ids)) == ("length", response)


@pytest.mark.parametrize(("prompt", "capacity"), [(250, 1 << 16), (256, 1 << 16), (94, 100)])
def test_prompt_that_fills_the_context_is_named_in_the_error(prompt: int, capacity: int) -> None:
    with pytest.raises(UserError, match=rf"prompt p0 has {prompt} tokens"):
        answer(Upstream(256, 2, capacity), prompt)
