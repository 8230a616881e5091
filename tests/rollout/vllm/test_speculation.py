"""Speculation with the MTP layers: accepted exactly when they are right, and never visible in what is sampled.

One engine with two draft tokens a step serves every test here; its weights are changed by updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import Tensors, cycle_tensors, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.speculation import CASES, CONFIG, STEP, check_distribution, requests, toy_tensors

Load = Callable[[Tensors], None]
Generate = Callable[[list[GenerationRequest]], list[Sample]]


@pytest.fixture(scope="module")
def engine(start_engine: Callable[[VllmSettings], VllmEngine], tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG | {"model_type": "mimo"}, cycle_tensors(CONFIG, STEP, STEP))
    return start_engine(cpu_settings(folder, k=2, max_in_flight=256))


@pytest.fixture(scope="module")
def load(engine: VllmEngine, run: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    store = VersionStore(tmp_path_factory.mktemp("store"))
    publisher = Publisher(store, bucket_bytes=1 << 30)

    def load(tensors: Tensors) -> None:
        run(engine.update(publisher.publish(tensors.items(), engine.version + 1)))

    yield load
    store.close()


@pytest.fixture(scope="module")
def generate(engine: VllmEngine, run: Loop) -> Generate:
    async def all_of(requests: list[GenerationRequest]) -> list[Sample]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return lambda requests: run(all_of(requests))


@pytest.mark.parametrize(("mtp_step", "accepted"), [(STEP, 1.0), (STEP + 1, 0.0)])
def test_the_cycle_is_accepted_exactly_when_the_drafter_knows_it(load: Load, generate: Generate, mtp_step: int, accepted: float) -> None:
    load(cycle_tensors(CONFIG, STEP, mtp_step))
    for sample in generate(requests(4, 60)):
        assert sample.response_ids.tolist() == [(3 + STEP * (place + 1)) % 128 for place in range(60)]
        counts = sample.speculation
        assert counts.drafted > 0
        assert counts.accepted == accepted * counts.drafted
        assert counts.steps == (20 if accepted else 59)
        assert max(abs(value) for value in sample.behaviour_logprobs) < 1e-5


@pytest.mark.parametrize("max_tokens", [58, 59, 60])
@pytest.mark.parametrize("mtp_step", [STEP, STEP + 1])
def test_drafts_behind_the_last_token_are_not_counted(load: Load, generate: Generate, mtp_step: int, max_tokens: int) -> None:
    load(cycle_tensors(CONFIG, STEP, mtp_step))
    (sample,) = generate(requests(1, max_tokens))
    counts, behind = sample.speculation, max_tokens - 1  # the first token is the prompt's
    if mtp_step == STEP:
        assert counts.drafted == counts.accepted == 2 * (behind // 3) + behind % 3
    else:
        assert (counts.drafted, counts.accepted) == (2 * behind - 1, 0)


@pytest.mark.parametrize("length", range(5, 11))
def test_drafts_behind_a_stop_token_are_not_counted(load: Load, generate: Generate, length: int) -> None:
    """The drafter is right up to the stop token, and does not know the target's tokens after it."""
    stop, other, tensors = 3 + STEP * length, 1, cycle_tensors(CONFIG, STEP, STEP)
    rows = tensors["model.embed_tokens.weight"]
    project = tensors["model.mtp_layers.0.input_proj.weight"]
    project[:, project.shape[0] :] += torch.outer(rows[other] - rows[stop], rows[stop]) / len(project)
    load(tensors)
    (sample,) = generate(requests(1, 60, stop_token_ids=[stop]))
    assert sample.response_ids.tolist() == [3 + STEP * place for place in range(1, length + 1)]
    assert sample.speculation.accepted == sample.speculation.drafted > 0


@pytest.mark.parametrize("case", CASES)
def test_speculation_does_not_change_the_distribution(load: Load, generate: Generate, case: str) -> None:
    tensors, logits = toy_tensors()
    load(tensors)
    check_distribution(generate(requests(32, 125, **CASES[case])), logits, CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_forty_thousand_samples_follow_the_distribution(load: Load, generate: Generate, case: str) -> None:
    tensors, logits = toy_tensors()
    load(tensors)
    check_distribution(generate(requests(320, 125, **CASES[case])), logits, CASES[case])
