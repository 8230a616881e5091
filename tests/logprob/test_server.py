"""The server with fake replicas that return the weight version as score: queueing, versions and failures."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mtpctl.errors import RuntimeFailure
from mtpctl.logprob.protocol import DeadlineExceeded, QueueFull, RequestRefused, ScoreRequest, VersionGone
from mtpctl.logprob.rank import ScoreRank
from mtpctl.logprob.server import LogprobServer
from mtpctl.sync.protocol import Manifest, PlanMismatch, SectionPlan, TargetDirty, WeightsDiffer
from tests.fakes.logprob import Started, Store, manifest
from tests.fakes.logprob_ranks import Loop, serve


def request(tokens: int = 8, **fields: Any) -> ScoreRequest:
    return ScoreRequest([i % 300 for i in range(tokens)], **fields)


def settled(test: Callable[[], Awaitable[None]]) -> Callable[[Loop], None]:
    """A coroutine as a test."""

    def inner(run: Loop) -> None:
        run(test(), 20)

    inner.__doc__ = test.__doc__
    return inner


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@settled
async def test_weights_that_differ_from_the_sent_ones_fail_the_sync_and_stop_scoring() -> None:
    server = await serve(started := Started(), 1)
    sent = Manifest(1, "shm", "nowhere", {"target": SectionPlan((), {"w": "this"})})
    with pytest.raises(WeightsDiffer, match="version 1 these tensors differ from what was sent: w"):
        await server.update(sent, verify=True)
    (_, replica), *_ = server.replicas.live()
    with pytest.raises(TargetDirty, match="differ from those that were sent"):
        await replica.score([request()], 1)
    assert started.ranks[0].rank.batches == []


@settled
async def test_requests_for_wrong_weights_fail_and_the_sync_reports_why() -> None:
    server = await serve(Started(), 1)
    sent = Manifest(1, "shm", "nowhere", {"target": SectionPlan((), {"w": "this"})})
    async with server.quiesce():
        waiting = [asyncio.ensure_future(server.score(request())) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(WeightsDiffer, match="version 1 these tensors differ from what was sent: w"):
            await server.apply_update(sent, verify=True)
    for answer in waiting:
        with pytest.raises(TargetDirty, match="differ from those that were sent"):
            await asyncio.wait_for(answer, 1)
    assert server.replicas.slots[0].num_requests == 0


@settled
async def test_answers_belong_to_their_requests() -> None:
    server = await serve(Started(seconds=1e-5), 2)
    requests = [request(n, prompt_length=n // 2) for n in range(2, 100)]
    answers = await asyncio.gather(*map(server.score, requests))
    for requested, answer in zip(requests, answers, strict=True):
        assert answer.logprobs == [-float(i) for i in requested.token_ids[requested.prompt_length :]]
    await server.close()


@settled
async def test_queued_requests_are_batched_and_an_idle_server_starts_immediately() -> None:
    start = Started(seconds=1e-4)
    server = await serve(start, tokens_per_batch=100)
    await server.score(request(10))
    await asyncio.gather(*(server.score(request(10)) for _ in range(31)))
    batches = start.ranks[0].rank.batches
    assert batches[0] == [10] and batches[1] == [10]
    assert max(map(sum, batches)) == 100 and sum(map(sum, batches)) == 320
    await server.close()


@settled
async def test_waiting_requests_are_split_over_free_replicas() -> None:
    start = Started(seconds=1e-4)
    server = await serve(start, 2, tokens_per_batch=400)
    await server.dispatcher.pause()
    tasks = [asyncio.create_task(server.score(request(10))) for _ in range(40)]
    await until(lambda: server.queue.requests == 40)
    server.dispatcher.resume()
    await asyncio.gather(*tasks)
    assert [sum(map(sum, ranks.rank.batches)) for ranks in start.ranks] == [200, 200]
    await server.close()


@settled
async def test_full_queue_rejects_http_requests_and_delays_callers() -> None:
    server = await serve(Started(seconds=1e-4), tokens_per_batch=50, queue_tokens=100)
    tasks = [asyncio.create_task(server.score(request(50))) for _ in range(20)]
    await asyncio.sleep(0.01)
    assert server.queue.tokens <= 100
    with pytest.raises(QueueFull) as full:
        await server.score(request(50), wait=False)
    assert full.value.retry_after_s >= 1
    assert len(await asyncio.gather(*tasks)) == 20
    assert server.queue.tokens == 0 and server.queue._reserved == 0
    await server.close()


@settled
async def test_many_may_wait_for_room() -> None:
    """What one of them costs does not grow with how many there are."""

    async def cost(count: int) -> float:
        """CPU seconds of a request."""
        server, began = await serve(Started(), queue_tokens=1_000), time.process_time()
        assert len(await asyncio.gather(*(server.score(request(20)) for _ in range(count)))) == count
        assert server.queue._reserved == 0 and not server.queue._waiters
        await server.close()
        return (time.process_time() - began) / count

    few, many = await cost(500), await cost(8_000)
    assert many < 4 * few


@settled
async def test_cancelled_caller_leaves_the_queue() -> None:
    server = await serve(Started(seconds=1e-3), tokens_per_batch=50, queue_tokens=100)
    tasks = [asyncio.create_task(server.score(request(50))) for _ in range(8)]
    await asyncio.sleep(0.01)
    for task in tasks[2:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (server.queue.requests, server.queue._reserved, len(server.queue._waiters)) == (0, 0, 0)
    with pytest.raises(DeadlineExceeded):
        await server.score(request(at_least=9, deadline_s=0.01))
    assert server.queue.requests == 0
    await server.close()


@settled
async def test_queued_requests_survive_an_update_and_name_the_version_that_answered() -> None:
    start = Started(seconds=1e-4)
    server = await serve(start, 2, tokens_per_batch=40)
    tasks = [asyncio.create_task(server.score(request(20))) for _ in range(64)]
    await asyncio.sleep(0.02)
    await server.update(manifest(1))
    await server.update(manifest(2))
    versions = [answer.version for answer in await asyncio.gather(*tasks)]
    assert len(versions) == 64 and set(versions) <= {0, 1, 2} and 2 in versions
    assert (await server.score(request())).version == 2
    await server.close()


@settled
async def test_pinned_requests_wait_for_their_version_and_fail_after_it_is_replaced() -> None:
    server = await serve(Started())
    future = [asyncio.create_task(server.score(request(version=1))), asyncio.create_task(server.score(request(at_least=1)))]
    assert (await server.score(request(version=0))).version == 0
    await server.update(manifest(1))
    assert [answer.version for answer in await asyncio.gather(*future)] == [1, 1]
    with pytest.raises(VersionGone, match=r"no longer available; available versions: \[1\]"):
        await server.score(request(version=0))
    with pytest.raises(DeadlineExceeded, match="the newest weights are 1"):
        await server.score(request(at_least=9, deadline_s=0.02))
    with pytest.raises(VersionGone):
        await server.score(request(version=3, at_least=4))
    await server.close()


@settled
async def test_an_update_that_a_replica_refuses_leaves_it_serving_the_old_version() -> None:
    start = Started()
    server = await serve(start)
    start.ranks[0].rank.refuse = PlanMismatch("other shapes")
    with pytest.raises(PlanMismatch):
        await server.update(manifest(1))
    assert (await server.score(request())).version == 0
    await server.close()


@settled
async def test_requests_of_a_lost_replica_are_rescheduled_and_it_restarts_at_the_current_version() -> None:
    start, store = Started(seconds=2e-5), Store()
    server = await serve(start, 2, store, tokens_per_batch=100)
    store.there = [1]
    await server.update(manifest(1))
    tasks = [asyncio.create_task(server.score(request(20))) for _ in range(100)]
    await asyncio.sleep(0.01)
    start.ranks[0].kill()
    answers = await asyncio.gather(*tasks)
    assert {answer.version for answer in answers} == {1}
    await until(lambda: all(slot.replica is not None for slot in server.replicas.slots))
    assert [slot.replica.version for slot in server.replicas.slots if slot.replica] == [1, 1]
    assert server.replicas.num_restarts == 1 and server.counters.retried > 0
    await server.close()


@settled
async def test_kills_at_random_lose_nothing_and_mix_no_versions() -> None:
    """Every answer's version was current at some time between its request and its answer."""
    start, store, generator = Started(seconds=1e-5), Store(), random.Random(0)
    server = await serve(start, 2, store, tokens_per_batch=100, max_restarts=20)
    spans: list[tuple[int, int, int]] = []

    async def ask() -> None:
        before = server.version
        answer = await server.score(request(generator.randint(2, 60)))
        spans.append((before, answer.version, server.version))

    async def client() -> None:
        for _ in range(60):
            await ask()

    async def trouble() -> None:
        for number in range(1, 21):
            await asyncio.sleep(0.01)
            generator.choice([ranks for ranks in start.ranks[-2:]]).kill()
            if number % 2 == 0:
                store.there = [*store.there, number][-2:]
                await server.update(manifest(number))

    await asyncio.gather(trouble(), *(client() for _ in range(8)))
    assert len(spans) == 480
    assert all(before <= used <= after for before, used, after in spans)
    await server.close()


@settled
async def test_one_bad_request_fails_alone() -> None:
    server = await serve(Started(seconds=1e-4, poison=310))
    await server.dispatcher.pause()
    tasks = [asyncio.create_task(server.score(request(10))) for _ in range(5)]
    bad = asyncio.create_task(server.score(ScoreRequest([1, 310])))
    await until(lambda: server.queue.requests == 6)
    server.dispatcher.resume()
    with pytest.raises(RuntimeFailure, match=r"^scoring the request failed: ValueError: not a number$"):
        await bad
    assert len(await asyncio.gather(*tasks)) == 5 and server.replicas.num_restarts == 0
    await server.close()


@settled
async def test_request_is_scored_again_if_its_pass_failed_because_a_rank_died() -> None:
    """The other ranks report a broken connection before the death is known."""
    start = Started(poison=310)
    server = await serve(start, 1)
    first, call = start.ranks[0], start.ranks[0].call
    start.rank = {}

    def call_with_a_dead_peer(method: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        if method is ScoreRank.ping:
            first.kill()
        return call(method, *args)

    first.call = call_with_a_dead_peer  # type: ignore[method-assign]
    assert (await server.score(ScoreRequest([1, 310]))).version == 0
    assert server.replicas.num_restarts == 1
    await server.close()


@settled
async def test_requests_fail_when_no_replica_can_start() -> None:
    start = Started(seconds=1e-3)
    server = await serve(start, max_restarts=2)
    task = asyncio.create_task(server.score(request(100)))
    await asyncio.sleep(0.01)
    start.failing = 9
    start.ranks[0].kill()
    with pytest.raises(RuntimeFailure, match="every log-prob replica failed: 0: RuntimeFailure: no memory"):
        await task
    assert server.health()[0]["state"] == "quarantined"
    await server.close()


@settled
async def test_replica_busy_time_excludes_waiting_with_a_batch_in_advance() -> None:
    server = await serve(Started(seconds=2e-4), tokens_per_batch=50)
    began = time.monotonic()
    await asyncio.gather(*(server.score(request(50)) for _ in range(20)))
    assert 20 * 50 * 2e-4 <= server.counters.busy_s <= time.monotonic() - began
    await server.close()


@settled
async def test_requests_to_an_ended_server_fail() -> None:
    server = await serve(Started(seconds=1e-3), tokens_per_batch=100, queue_tokens=100)
    tasks = [asyncio.create_task(server.score(request(100))) for _ in range(4)]
    await asyncio.sleep(0.02)
    await server.close()
    tasks.append(asyncio.create_task(server.score(request(100))))
    answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
    assert [str(answer) for answer in answers] == ["the log-prob server has ended"] * 5, "under way, waiting, waiting for room, late"


@settled
async def test_batch_that_has_just_been_sent_fails_with_the_end_of_its_server() -> None:
    server = await serve(Started(), tokens_per_batch=100)
    waiting = asyncio.create_task(server.score(request(100)))
    while not server.dispatcher._tasks:
        await asyncio.sleep(0)
    server.dispatcher.close()
    with pytest.raises(RuntimeFailure, match="the log-prob server has ended"):
        await asyncio.wait_for(waiting, 2)
    await server.close()


@settled
async def test_versions_of_a_replica_are_those_of_its_ranks_after_an_abort() -> None:
    """The call that completes a version may have been cancelled here, and continues on the ranks."""
    started = Started()
    replica = await started(0)
    started.ranks[0].rank.version = 1
    await replica.abort_update()
    assert replica.versions == [1]


@settled
async def test_idle_replica_that_dies_is_detected() -> None:
    start = Started()
    server = await serve(start)
    watching = asyncio.create_task(server.watch(every_s=0.01))
    start.ranks[0].kill()
    await until(lambda: server.replicas.num_restarts == 1)
    watching.cancel()
    await server.close()


@settled
async def test_stream_yields_answers_as_they_finish() -> None:
    server = await serve(Started(seconds=1e-5), tokens_per_batch=64)
    result = {place: answer async for place, answer in server.stream([request(n) for n in range(2, 40)])}
    assert sorted(result) == list(range(38)) and [len(result[n].logprobs) for n in range(38)] == list(range(1, 39))
    await server.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": [1]}, "leave nothing to score"),
        ({"token_ids": [1] * 513}, "more than the 512 positions"),
        ({"token_ids": [1, 320]}, "320 is not a token"),
        ({"token_ids": [1, -1]}, "-1 is not a token"),
        ({"token_ids": [1, 2], "prompt_length": 2}, "prompt_length: must be 1 to 1"),
        ({"token_ids": [1, 2], "mask": [1, 1]}, "mask: has 2 entries for 1"),
        ({"token_ids": [1, 2], "temperature": float("nan")}, "temperature"),
        ({"token_ids": [1, 2], "topk": 321}, "topk: must be 0 to 320"),
    ],
)
def test_request_that_no_pass_can_score_is_rejected(fields: dict[str, Any], message: str, run: Loop) -> None:
    async def ask() -> LogprobServer:
        server = await serve(Started())
        with pytest.raises(RequestRefused, match=message):
            await server.score(ScoreRequest(**fields))
        return server

    run(run(ask()).close())
