"""From the recipe to SGLang's options, and what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from mtpctl.recipe import Recipe
from mtpctl.recipe.checks import complaints_of
from mtpctl.recipe.schema import SglangConfig
from mtpctl.rollout import sglang_engine_settings


def args(**rollout: Any) -> dict[str, Any]:
    return sglang_engine_settings(SglangConfig(**rollout), model="m", precision="bf16", seed=3).args


def test_a_chain_of_drafts() -> None:
    found = args(speculation={"num_tokens": 3})
    assert (found["speculative_num_steps"], found["speculative_eagle_topk"], found["speculative_num_draft_tokens"]) == (3, 1, 4)
    assert found["speculative_draft_model_path"] == "m", "the MTP layers lie beside the trunk"
    assert found["disable_prefill_cuda_graph"], "a replayed graph passes the final norm by"


def test_a_tree_of_drafts() -> None:
    found = args(speculation={"num_tokens": 7}, draft_steps=3, draft_top_k=2)
    assert (found["speculative_num_steps"], found["speculative_eagle_topk"], found["speculative_num_draft_tokens"]) == (3, 2, 8)


def test_no_drafts() -> None:
    assert not [name for name in args(speculation={"num_tokens": 0}) if name.startswith("speculative")]


def test_engine_args_win() -> None:
    assert args(gpu_memory=0.5, engine_args={"mem_fraction_static": 0.3})["mem_fraction_static"] == 0.3


BASE: dict[str, Any] = {"engine": "sglang"}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"top_p": 0.9}, "rollout.top_p: SGLang's log-probs are of the whole distribution"),
        ({"top_k": 5}, "rollout.top_k: SGLang's log-probs"),
        ({"kv_cache_bytes": 1 << 30}, "rollout.kv_cache_bytes: SGLang sizes its cache"),
        ({"speculation": {"num_tokens": 1, "auto": True}}, "rollout.speculation.auto: works with rollout.engine: vllm"),
        ({"speculation": {"num_tokens": 3}, "draft_steps": 2}, "rollout.draft_steps: a chain of 3 draft tokens takes 3 steps, got 2"),
        ({"speculation": {"num_tokens": 4}, "draft_top_k": 2}, "rollout.draft_steps: a tree of draft tokens"),
        ({"python": "/nowhere/python"}, "rollout.python: there is no interpreter /nowhere/python"),
    ],
)
def test_what_it_cannot_do_is_refused_by_the_recipes_checks(rollout: dict[str, Any], message: str) -> None:
    recipe = Recipe.model_validate({"model": {"path": "XiaomiMiMo/MiMo-7B-RL"}, "rollout": BASE | rollout})
    assert any(complaint.startswith(message) for complaint in complaints_of(recipe))


def test_seeds_need_its_deterministic_mode() -> None:
    recipe = {"model": {"path": "XiaomiMiMo/MiMo-7B-RL"}, "rollout": BASE, "async": {"deterministic": True}}
    assert any("enable_deterministic_inference" in complaint for complaint in complaints_of(Recipe.model_validate(recipe)))
    recipe["rollout"] = BASE | {"engine_args": {"enable_deterministic_inference": True}}
    assert not any("enable_deterministic_inference" in complaint for complaint in complaints_of(Recipe.model_validate(recipe)))
