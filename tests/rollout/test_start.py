"""Arguments with which a recipe's engines are started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mtpctl.environments.turns import load_turns
from mtpctl.errors import RuntimeFailure
from mtpctl.families.reading import shape_of
from mtpctl.plan.memory import engine_memory
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
        turns = load_turns(recipe.rollout, byte_tokenizer())
        asyncio.run(
            start.start_pool(
                recipe, model="folder", context=256, placement=place(recipe), tokenizer=byte_tokenizer().name, turn_runner=turns
            )
        )
    assert observed[0].args["skip_tokenizer_init"] is not reads_text
    assert (observed[0].args.get("tokenizer") == byte_tokenizer().name) is reads_text


def test_each_engine_gets_the_memory_that_its_share_of_a_gpu_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One engine on the trainer's GPU, two on another one: their caches are computed, because vLLM would count a neighbor's memory."""
    sets = ["cluster.device=cuda", "sync.transport=ipc", "rollout.kv_cache_bytes=null", "rollout.eager=false", "train.gpus=0.6"]
    recipe = load_recipe("tiny_mtp", sets=[*sets, "rollout.gpus=0.5", "rollout.replicas=3", "rollout.on_trainer_gpus=1"]).recipe
    (tmp_path / "config.json").write_text(json.dumps(recipe.model.config))
    observed: dict[str, Any] = {}

    async def refuse(settings: Any, *, name: str, options: Any) -> None:
        observed[name] = (settings, options["num_gpus"])
        raise RuntimeFailure("seen")

    monkeypatch.setattr(start, "start_replica", refuse)
    with pytest.raises(RuntimeFailure, match="seen"):
        asyncio.run(start.start_pool(recipe, model=str(tmp_path), context=256, placement=place(recipe)))
    memory = engine_memory(recipe, shape_of(recipe.model.config or {}))
    shares = {name: (settings.args["gpu_memory_utilization"], gpus) for name, (settings, gpus) in observed.items()}
    assert shares == {
        "rollout replica 0": (pytest.approx(0.38), 0.4),
        "rollout replica 1": (pytest.approx(0.475), 0.5),
        "rollout replica 2": (pytest.approx(0.475), 0.5),
    }
    assert {settings.outside_cache for settings, _ in observed.values()} == {memory.weights + memory.reserve}
    assert not any("kv_cache_memory_bytes" in settings.args for settings, _ in observed.values())
    assert all("cudagraph_capture_sizes" in settings.args["compilation_config"] for settings, _ in observed.values()), "a small model"
