"""A hybrid model that drafts up to the context limit, and while the number of drafts is reduced, on a CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from mtpctl.recipe.rollout import SpeculationConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.scored import scored
from tests.fakes.toys import QWEN3_5, toy_folder

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU path")

CONTEXT, PROMPT = 64, 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_folder(QWEN3_5, tmp_path_factory.mktemp("model") / "qwen3.5", 0, "bf16")


async def responses(engine: VllmEngine, count: int) -> list[Sample]:
    prompts = ([(3 * index + place) % 97 for place in range(PROMPT)] for index in range(count))
    requests = (
        GenerationRequest(Sample(f"p{index}", "g", prompt), CONTEXT, seed=index, temperature=1.0) for index, prompt in enumerate(prompts)
    )
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def test_drafts_up_to_the_context_limit_keep_the_logprobs_of_the_policy(run: Loop, folder: Path) -> None:
    drafts = SpeculationConfig(num_tokens=2, draft_method="probabilistic", auto=True)
    engine = run(VllmEngine.start(cpu_settings(folder, speculation=drafts, context=CONTEXT, precision="bf16")))

    async def with_changing_drafts() -> list[Sample]:
        task = asyncio.ensure_future(responses(engine, 16))
        for drafts in (2, 1, 0, 2, 0, 1):
            await engine.control_speculation(drafts)
            await asyncio.sleep(0.01)
        return await task

    try:
        run(engine.control_speculation(0))
        plain = run(responses(engine, 16))
        run(engine.control_speculation(2))
        drafted = run(responses(engine, 16)) + run(with_changing_drafts())
    finally:
        run(engine.shutdown())
    for sample in plain + drafted:
        assert len(sample.prompt_ids) + len(sample.response_ids) == CONTEXT or sample.finish_reason == "stop"
    assert sum(sample.speculation.accepted for sample in drafted) > 0
    # The same rounding with and without drafts; a state that is read at the wrong position differs by far more.
    assert scored(folder, drafted)["own"]["mean"] < 2 * scored(folder, plain)["own"]["mean"]
