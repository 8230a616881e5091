"""What engines are started with, for what is to be asked of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mtpctl.environments.turns import turns_for
from mtpctl.errors import RuntimeFailure
from mtpctl.plan.placement import place
from mtpctl.recipe.loading import load_recipe
from mtpctl.rollout import start
from tests.fakes.scripted_engine import byte_tokenizer


@pytest.mark.parametrize(
    ("sets", "reads_text"),
    [
        ([], False),
        (["rollout.stop=[x]"], True),
        (["rollout.environment=calculator"], True),
        (["rollout.agent=AGENT"], True),
        (["rollout.gateway=true"], True),
    ],
)
def test_engines_have_a_tokenizer_if_stop_strings_are_possible(
    sets: list[str], reads_text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text("async def run(problem, base_url): ...\n")
    recipe = load_recipe("tiny_mtp", sets=[each.replace("AGENT", f"{tmp_path}/agent.py:run") for each in sets]).recipe
    observed: list[Any] = []

    async def refuse(settings: Any, **_: object) -> None:
        observed.append(settings)
        raise RuntimeFailure("seen")

    monkeypatch.setattr(start, "start_replica", refuse)
    with pytest.raises(RuntimeFailure, match="seen"):
        turns = turns_for(recipe.rollout, byte_tokenizer())
        asyncio.run(
            start.start_pool(recipe, model="folder", context=256, placement=place(recipe), tokenizer=byte_tokenizer().name, turns=turns)
        )
    assert observed[0].args["skip_tokenizer_init"] is not reads_text
    assert (observed[0].args.get("tokenizer") == byte_tokenizer().name) is reads_text
