"""A real SGLang on a GPU: its log-probs are the policy's, its weights take updates of target and drafter, its drafts are counted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.errors import UserError
from mtpctl.rollout.protocol import ABORTED
from mtpctl.rollout.sglang.engine import SglangEngine
from mtpctl.rollout.sglang.settings import SglangSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.sync.protocol import Manifest, PlanMismatch
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from tests.fakes.engine_checkpoints import Tensors, cycle_tensors, random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, sglang_settings

pytestmark = pytest.mark.gpu
CONFIG = tiny_config(vocab_size=128, torch_dtype="bfloat16", max_position_embeddings=4096)
STEP = 5
LONG = 3000
"""Tokens of a response that is not done when something happens to it."""


def half(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def engine(start_engine: Callable[[SglangSettings], Any], tmp_path_factory: pytest.TempPathFactory) -> SglangEngine:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, half(random_tensors(CONFIG, 0)))
    engine: SglangEngine = start_engine(sglang_settings(folder, k=2))
    return engine


@pytest.fixture(scope="module")
def publish(engine: SglangEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Tensors], Manifest]]:
    store = VersionStore(tmp_path_factory.mktemp("store"))
    publisher = Publisher(store, bucket_bytes=1 << 16)
    yield lambda tensors: publisher.publish(half(tensors).items(), engine.version + 1, checksums=True)
    store.close()


def test_ranks_need_no_port_that_another_program_could_take(
    start_engine: Callable[[SglangSettings], Any], run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import server_args

    folder = write_checkpoint(tmp_path / "model", CONFIG, half(random_tensors(CONFIG, 0)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(server_args, "get_free_port", lambda: taken.getsockname()[1])
        engine = start_engine(sglang_settings(folder))
        assert len(run(answers(engine, 1))[0].response_ids) == 60
    run(engine.shutdown())


def request(index: int = 0, max_tokens: int = 60, **options: Any) -> GenerationRequest:
    return GenerationRequest(Sample(f"p{index}", "g", [3, 4, 5, 6 + index]), max_tokens, **options)


async def answers(engine: SglangEngine, count: int, max_tokens: int = 60, **options: Any) -> list[Sample]:
    return await asyncio.gather(*(engine.generate(request(index, max_tokens, **options)) for index in range(count)))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_policy(engine: SglangEngine, run: Loop, temperature: float) -> None:
    weights = half(random_tensors(CONFIG, 0))
    errors = []
    for sample in run(answers(engine, 8, temperature=temperature)):
        assert (sample.finish_reason, len(sample.response_ids)) == ("length", 60)
        assert sample.speculation.drafted > 0
        wanted = reference_logprobs(CONFIG, weights, sample.prompt_ids + sample.response_ids, temperature)[len(sample.prompt_ids) - 1 :]
        errors += (torch.tensor(sample.behaviour_logprobs, dtype=torch.float64) - wanted).abs().tolist()
    assert sum(errors) / len(errors) < 0.02


@pytest.mark.parametrize(("mtp_step", "accepted"), [(STEP, 1.0), (STEP + 1, 0.0)])
def test_an_update_reaches_target_and_drafter(
    engine: SglangEngine, run: Loop, publish: Callable[[Tensors], Manifest], mtp_step: int, accepted: float
) -> None:
    tensors = cycle_tensors(CONFIG, STEP, mtp_step)
    report = run(engine.update(publish(tensors), verify=True))
    assert report.verified == len(tensors)
    for sample in run(answers(engine, 4)):
        assert sample.response_ids.tolist() == [(sample.prompt_ids[-1] + STEP * (place + 1)) % 128 for place in range(60)]
        assert sample.speculation.accepted == pytest.approx(accepted * sample.speculation.drafted, abs=2)
        assert [span.version for span in sample.version_spans] == [engine.version]


def test_response_continues_with_new_weights(engine: SglangEngine, run: Loop, publish: Callable[[Tensors], Manifest]) -> None:
    async def drive() -> list[Sample]:
        task = asyncio.ensure_future(answers(engine, 4, LONG))
        await asyncio.sleep(0.3)
        await engine.update(publish(cycle_tensors(CONFIG, STEP + 2, STEP + 2)))
        return await task

    for sample in run(drive()):
        assert [span.version for span in sample.version_spans] == [engine.version - 1, engine.version]
        tokens, cut = sample.prompt_ids[-1:] + sample.response_ids, sample.version_spans[0].end
        steps = [(after - before) % 128 for before, after in pairwise(tokens)]
        assert steps == [STEP] * cut + [STEP + 2] * (LONG - cut)


def test_aborted_response_is_continued(engine: SglangEngine, run: Loop) -> None:
    async def cut() -> Sample:
        task = asyncio.ensure_future(engine.generate(request(0, LONG)))
        await asyncio.sleep(0.2)
        await engine.pause("abort")
        partial = await task
        await engine.resume()
        return partial

    partial = run(cut())
    assert partial.finish_reason == ABORTED
    retained = list(partial.response_ids)
    assert 0 < len(retained) < LONG
    whole = run(engine.generate(GenerationRequest(partial, LONG)))
    assert (len(whole.response_ids), whole.finish_reason) == (LONG, "length")
    assert whole.response_ids[: len(retained)] == retained


def test_a_stop_id_stops(engine: SglangEngine, run: Loop) -> None:
    whole = run(engine.generate(request(1)))
    # The token counts where it is there for the first time.
    place = next(place for place, token in enumerate(whole.response_ids) if place > 3 and token not in whole.response_ids[:place])
    stop = whole.response_ids[place]
    stopped = run(engine.generate(request(1, stop_token_ids=[stop])))
    assert (stopped.finish_reason, stopped.response_ids) == ("stop", whole.response_ids[: place + 1])


def test_weights_that_do_not_fit_change_nothing(engine: SglangEngine, run: Loop, tmp_path: Path) -> None:
    tensors = cycle_tensors(CONFIG, STEP, STEP)
    tensors["model.norm.weight"] = torch.ones(64)
    before = run(engine.checksums())
    manifest = Publisher(VersionStore(tmp_path), bucket_bytes=1 << 30).publish(half(tensors).items(), engine.version + 1)
    with pytest.raises(PlanMismatch, match=r"model.norm.weight has shape \(64,\)"):
        run(engine.update(manifest))
    assert run(engine.checksums()) == before
    assert run(engine.health()).alive


def test_top_p_is_refused(engine: SglangEngine, run: Loop) -> None:
    with pytest.raises(UserError, match="SGLang's log-probs do not account for top_p and top_k"):
        run(engine.generate(request(top_p=0.9)))
