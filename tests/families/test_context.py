"""Contexts beyond the one in a model's config: positions, RoPE scaling, and the mistakes that are rejected."""

from __future__ import annotations

import pytest

from mtpctl.errors import UserError
from mtpctl.families.configs import hub_config
from mtpctl.families.context import describe_context, with_context
from mtpctl.families.reading import shape_of
from tests.fakes.toys import LLAMA_EAGLE3

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("name", ["XiaomiMiMo/MiMo-7B-RL", "Qwen/Qwen3.5-35B-A3B", "zai-org/GLM-4.5-Air"])
def test_positions_are_raised_and_rope_stays(name: str) -> None:
    config = hub_config(name)
    before, after = shape_of(config), shape_of(with_context(config, 524_288))
    assert (after.max_positions, after.rope_scaling, after.rope_theta) == (524_288, before.rope_scaling, before.rope_theta)
    assert "so later positions are extrapolated" in describe_context(before, after)


def test_scaling_refers_to_the_length_of_the_config() -> None:
    config = hub_config("XiaomiMiMo/MiMo-7B-RL")
    after = shape_of(with_context(config, 131_072, YARN))
    assert after.rope_scaling == {**YARN, "original_max_position_embeddings": 32_768}
    assert describe_context(shape_of(config), after) == "131,072 positions, 4 times those of the config; RoPE scaled by yarn, factor 4"


def test_eagle3_drafter_gets_the_context_of_its_model() -> None:
    context = 2 * shape_of(LLAMA_EAGLE3).max_positions
    longer = with_context(LLAMA_EAGLE3, context, YARN)
    drafter = longer["drafter"]
    assert isinstance(drafter, dict) and drafter["max_position_embeddings"] == context
    assert shape_of(longer).eagle3 is not None


def test_same_context_is_the_same_config() -> None:
    longer = with_context(hub_config("XiaomiMiMo/MiMo-7B-RL"), 131_072, YARN)
    assert with_context(longer, 131_072) == longer


@pytest.mark.parametrize(
    ("context", "scaling", "message"),
    [
        (1_000, None, "model.context: the model has 32,768 positions, got 1,000"),
        (262_144, YARN, "model.rope_scaling: covers 131,072 positions, but model.context is 262,144"),
        (65_536, {"rope_type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
    ],
)
def test_mistakes_are_rejected(context: int, scaling: dict[str, object] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_context(hub_config("XiaomiMiMo/MiMo-7B-RL"), context, scaling)
