"""`speculation.auto` in a real vLLM: the number of drafts changes while requests run, nothing else does, and none costs none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mtpctl.errors import UserError
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings, build_engine_settings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import Tensors, cycle_tensors, random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings

CONFIG = tiny_config(vocab_size=128, num_hidden_layers=1, intermediate_size=64)
STEP = 5


@pytest.fixture(scope="module")
def engine(start_engine: Callable[[VllmSettings], VllmEngine], tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, random_tensors(CONFIG, 0))
    return start_engine(cpu_settings(folder, speculation=SpeculationConfig(num_tokens=2, auto=True)))


@pytest.fixture(scope="module")
def load(engine: VllmEngine, run: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Tensors], None]]:
    store = VersionStore(tmp_path_factory.mktemp("store"))
    publisher = Publisher(store, bucket_bytes=1 << 30)
    yield lambda tensors: run(engine.update(publisher.publish(tensors.items(), engine.version + 1))) and None
    store.close()


async def answers(engine: VllmEngine, count: int, tokens: int) -> list[Sample]:
    requests = (GenerationRequest(Sample(f"p{index}", "g", [7, 3, index]), tokens, seed=index) for index in range(count))
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def test_logprobs_stay_those_of_the_policy_while_the_number_of_drafts_changes(engine: VllmEngine, run: Loop) -> None:
    async def drive() -> list[Sample]:
        task = asyncio.ensure_future(answers(engine, 8, 200))
        for drafts in (2, 0, 1, 0, 2, 1, 0):
            await engine.control_speculation(drafts)
            await asyncio.sleep(0.04)
        return await task

    weights = random_tensors(CONFIG, 0)
    for sample in run(drive()):
        assert len(sample.response_ids) == 200
        assert 0 < sample.speculation.steps < 200
        wanted = reference_logprobs(CONFIG, weights, sample.prompt_ids + sample.response_ids)[len(sample.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(sample.behaviour_logprobs, dtype=torch.float64), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_fixed_number_is_drafted_and_zero_skips_the_drafter(
    engine: VllmEngine, run: Loop, load: Callable[[Tensors], None], monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    load(cycle_tensors(CONFIG, STEP, STEP))
    runner = engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    called: Counter[str] = Counter()

    def watch(name: str, module: torch.nn.Module) -> None:
        upstream = module.forward

        def forward(*args: object, **kwargs: object) -> object:
            called[name] += 1
            return upstream(*args, **kwargs)

        monkeypatch.setattr(module, "forward", forward)

    run(engine.control_speculation(drafts))
    run(answers(engine, 4, 10))
    watch("drafter", runner.drafter.model)
    watch("rejection", runner.rejection_sampler)
    for sample in run(answers(engine, 4, 61)):
        assert sample.response_ids.tolist() == [(sample.prompt_ids[-1] + STEP * (place + 1)) % 128 for place in range(61)]
        counts = sample.speculation
        assert counts.accepted == counts.drafted
        assert counts.drafted == pytest.approx(60 * drafts / (1 + drafts), abs=2 * drafts)
    assert (called["drafter"] > 0, called["rejection"] > 0) == (drafts > 0, drafts > 0)
    state = run(engine.control_speculation())
    assert set(state["draft_s"]) == {drafts} - {0}
    assert all(0 < seconds < 1 for seconds in state["draft_s"].values())
    assert set(state["steps"]) == {drafts} and state["steps"][drafts] >= 70 // (1 + drafts)
    assert set(state["step_s"]) == {drafts} and 0 < state["step_s"][drafts] < 10
    again = run(engine.control_speculation())
    assert again["steps"] == again["step_s"] == {}


def test_a_drafter_that_is_never_right_is_switched_off(engine: VllmEngine, run: Loop, load: Callable[[Tensors], None]) -> None:
    load(cycle_tensors(CONFIG, STEP, STEP + 1))

    async def after_a_trial() -> SpeculationState:
        before = (await engine.control_speculation(-1))["trials"]
        while (state := await engine.control_speculation())["trials"] == before or state["in_trial"]:
            await answers(engine, 16, 100)
        return state

    for _ in range(20):
        # Steps of milliseconds are timed here, and what else the machine does may spoil several trials.
        if (state := run(after_a_trial()))["drafts"] == 0:
            break
    assert state["drafts"] == 0
    assert state["switches"] >= 1
    assert "0 draft tokens for about 16 concurrent requests" in state["message"]
    assert sum(sample.speculation.drafted for sample in run(answers(engine, 16, 20))) == 0


def test_new_weights_restart_the_choice_of_draft_tokens(engine: VllmEngine, run: Loop, load: Callable[[Tensors], None]) -> None:
    scheduler = engine._llm.engine_core.engine_core.scheduler
    scheduler.switch._next_trial_step = float("inf")
    load(cycle_tensors(CONFIG, STEP, STEP))
    assert scheduler.switch._next_trial_step == scheduler.switch._steps


def test_engine_without_auto_rejects_control(run: Loop) -> None:
    settings = build_engine_settings(VllmConfig(), model="m", precision="fp32", device="cpu")
    assert "scheduler_cls" not in settings.args


def test_max_in_flight_must_exceed_the_number_of_drafts(tmp_path: Path) -> None:
    config = VllmConfig(speculation=SpeculationConfig(num_tokens=3, auto=True), max_in_flight=3)
    with pytest.raises(UserError, match=r"rollout\.max_in_flight: 3 is too small for speculation.auto with num_tokens: 3"):
        build_engine_settings(config, model="m", precision="fp32", device="cpu")


def test_graphs_are_captured_for_every_number_of_drafts() -> None:
    config = VllmConfig(speculation=SpeculationConfig(num_tokens=2, auto=True), max_in_flight=16)
    args = build_engine_settings(config, model="m", precision="bf16", device="cuda").args
    sizes = args["compilation_config"]["cudagraph_capture_sizes"]
    assert {16, 32, 48} <= set(sizes), "16 requests with 0, 1 and 2 drafts each"
    assert max(sizes) == 48
    assert args["speculative_config"]["num_speculative_tokens_per_batch_size"] == [(1, 1, 0), (2, 2, 1), (3, 16, 2)]
    assert args["scheduler_cls"].endswith("AsyncSwitchingScheduler")
