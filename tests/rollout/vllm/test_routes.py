"""Routes of samples are the experts that the engine's routers selected, with drafts, aborts, syncs and preemption."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import section_of
from mtpctl.rollout.protocol import ABORTED
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.routes import RouteShape
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.routed import RouterLog
from tests.fakes.toys import SIZES, TOYS, toy_folder

QWEN3_MOE: dict[str, Any] = {
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
MODELS = {
    "qwen3-moe": QWEN3_MOE,
    **{
        name: TOYS[name]
        for name in ("qwen3-next", "qwen3.5-moe", "deepseek-v3", "glm4-moe", "glm4-moe-lite", "ernie4.5-moe", "mimo-v2-flash", "nemotron-h")
    },
}
PROMPT = 150
"""Tokens of the longest prompt."""


class Served:
    """An engine of a family's toy, its log, and weights to publish."""

    def __init__(self, family: str, drafts: int, root: Path, loop: Loop, **engine_args: Any) -> None:
        config = MODELS[family]
        dtype = "bf16" if "linear_conv_kernel_dim" in config else "fp32"
        self.shape, self.loop = shape_of(config), loop
        routes = RouteShape.of(self.shape)
        assert routes is not None
        self.routes = routes
        self.folders = [toy_folder(config, root / str(seed), seed, dtype) for seed in (0, 1)]
        settings = cpu_settings(self.folders[0], k=drafts, routes=routes.layers, dtype=dtype, max_in_flight=8, engine_args=engine_args)
        self.engine = loop(VllmEngine.start(settings), 200)
        self.log = RouterLog(self.engine, routes.layers)
        self.store = VersionStore(root / "store")
        self.publisher = Publisher(
            self.store, bucket_bytes=1 << 30, sections=["target", "draft"], section_of=lambda name: section_of(name, self.shape)
        )

    async def sync(self) -> None:
        version = self.engine.version + 1
        files = sorted(self.folders[version % 2].glob("*.safetensors"))
        await self.engine.update(self.publisher.publish([pair for f in files for pair in load_file(f).items()], version))

    async def answer(self, sample: Sample, tokens: int) -> Sample:
        """Continues after aborts, as a pool does."""
        while True:
            sample = await self.engine.generate(GenerationRequest(sample, tokens, seed=sample.index))
            if sample.finish_reason != ABORTED:
                return sample
            await asyncio.sleep(0.01)

    def steps(self, name: str) -> int:
        """Steps of the requests whose names begin with `name`, added up."""
        return sum(len(rows) for request, rows in self.log.rows.items() if request.startswith(name))

    async def wait_for_steps(self, name: str, count: int) -> None:
        """Wait until these requests have taken `count` more steps."""
        target = self.steps(name) + count
        while self.steps(name) < target:
            await asyncio.sleep(0)

    def check(self, samples: list[Sample]) -> None:
        """Each sample has the routes of all its tokens but the last, and those of the log."""
        for sample in samples:
            tokens, rows = sample.prompt_ids + sample.response_ids, self.log.routes_of(sample)
            assert sample.routes is not None
            assert self.routes.fault(sample.routes, len(tokens)) is None
            assert len(sample.routes) == len(rows) == len(tokens) - 1
            for place, row in enumerate(rows):
                assert row is not None and np.array_equal(sample.routes[place], row), f"{sample.name}, token {place}"


def prompts(count: int, name: str) -> list[Sample]:
    """Pairs that share a prompt, of different lengths."""
    draw = np.random.default_rng(3)
    common = draw.integers(3, 250, PROMPT).tolist()
    return [Sample(f"{name}{i // 2}", f"g{i // 2}", [*common[i // 2 * 3 :], 5, 6 + i // 2], index=i) for i in range(count)]


def drive(served: Served) -> list[Sample]:
    """Responses that are let alone, that are aborted, and that a sync meets."""

    async def run() -> list[Sample]:
        alone = await asyncio.gather(*(served.answer(s, 24) for s in prompts(6, "alone")))
        requested = [asyncio.ensure_future(served.answer(s, 24)) for s in prompts(6, "aborted")]
        for _ in range(2):
            await served.wait_for_steps("aborted", 12)
            await served.engine.pause("abort")
            await served.engine.resume()
        aborted = await asyncio.gather(*requested)
        requested = [asyncio.ensure_future(served.answer(s, 40)) for s in prompts(6, "synced")]
        await served.wait_for_steps("synced", 12)
        await served.sync()
        return [*alone, *aborted, *await asyncio.gather(*requested)]

    return served.loop(run())


@pytest.fixture(scope="module")
def glm(run: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served("glm4-moe", 2, tmp_path_factory.mktemp("glm"), run)
    yield served
    run(served.engine.shutdown())


def test_every_row_is_the_routers_own(glm: Served) -> None:
    samples = drive(glm)
    glm.check(samples)
    assert any(len(s.version_spans) > 1 for s in samples), "a sync met responses"
    assert {len(s.response_ids) for s in samples} == {24, 40}
    assert sum(s.speculation.drafted - s.speculation.accepted for s in samples) > 20, "drafts were rejected"


def turns(served: Served, cuts: int) -> Sample:
    """A response of three turns with an environment's replies between them. Each turn is aborted `cuts` times, each time by a sync."""
    (sample,) = prompts(1, f"turns{cuts}")

    async def turn(tokens: int) -> Sample:
        for _ in range(cuts):
            seed = served.steps(f"{sample.name}/")
            task = asyncio.ensure_future(served.engine.generate(GenerationRequest(sample, tokens, seed=seed)))
            await served.wait_for_steps(f"{sample.name}/", 2)
            await served.engine.pause("abort")
            await served.sync()
            await served.engine.resume()
            assert (await task).finish_reason == ABORTED
        return await served.answer(sample, tokens)

    for number in range(3):
        sample = served.loop(turn(30 * (number + 1) - 4))
        if number < 2:
            sample.truncate(len(sample.response_ids) - 2)
            sample.append([9, 8, 7 + number], [0.0] * 3, served.engine.version, trained=False)
    return sample


@pytest.mark.parametrize("cuts", [0, 2])
def test_turns_of_an_environment_have_their_routes(glm: Served, cuts: int) -> None:
    sample = turns(glm, cuts)
    assert len({span.version for span in sample.version_spans}) == 1 + 3 * cuts
    glm.check([sample])


def test_response_that_ends_within_a_step_has_no_extra_rows(glm: Served) -> None:
    (sample,) = prompts(1, "ended")
    result = glm.loop(glm.engine.generate(GenerationRequest(sample, 30, seed=1, stop_token_ids=list(range(3, 60)))))
    assert result.finish_reason == "stop"
    glm.check([result])


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("family", list(MODELS))
def test_every_family_with_any_number_of_drafts(family: str, drafts: int, run: Loop, tmp_path: Path) -> None:
    if drafts and not shape_of(MODELS[family]).mtp_layers:
        pytest.skip("no MTP layer drafts")
    served = Served(family, drafts, tmp_path, run)
    try:
        served.check([*drive(served), turns(served, 1)])
    finally:
        run(served.engine.shutdown())


@pytest.mark.slow
def test_preempted_responses_and_prompts_in_chunks(run: Loop, tmp_path: Path) -> None:
    """Prompts fill one block of the cache each, and there are too few for the second ones."""
    served = Served("glm4-moe", 1, tmp_path, run, num_gpu_blocks_override=8, max_num_batched_tokens=64)

    async def generate() -> list[Sample]:
        requested = [Sample(s.prompt_id, s.group_id, s.prompt_ids[-118:], index=s.index) for s in prompts(6, "tight")]
        return await asyncio.gather(*(served.answer(s, 24) for s in requested))

    try:
        served.check(run(generate()))
        logged = list(served.log.rows.values())
        assert any(sum(not each.start for each in rows) > 1 for rows in logged), "one was read again"
        assert any(len(rows[0].tokens) < 100 for rows in logged), "a prompt was read in parts"
    finally:
        run(served.engine.shutdown())


@pytest.mark.slow
def test_a_cached_prompt_has_the_rows_of_the_pass_that_read_it(run: Loop, tmp_path: Path) -> None:
    # Without drafts, for which vLLM reads the last block that it finds again: the prompt has one of 128 tokens.
    served = Served("glm4-moe", 0, tmp_path, run, enable_prefix_caching=True)
    first, second = prompts(2, "cached")
    try:
        first, second = run(served.answer(first, 24)), run(served.answer(second, 24))
        served.check([first])
        (steps,) = (rows for name, rows in served.log.rows.items() if name.startswith(f"{second.name}/"))
        cached = steps[0].start
        assert cached == 128
        logged = served.log.routes_of(second)
        assert first.routes is not None and second.routes is not None and len(second.routes) == len(logged)
        assert np.array_equal(second.routes[:cached], first.routes[:cached])
        assert all(np.array_equal(ours, row) for ours, row in zip(second.routes[cached:], logged[cached:], strict=True))
    finally:
        run(served.engine.shutdown())
