"""Who is next: shares between callers, budgets, and no request waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.logprob.dispatch import MAX_CALLERS, FairQueue, QueuedRequest
from mtpctl.logprob.protocol import ScoreRequest


def waiting(tokens: int, caller: str = "a", **fields: int) -> QueuedRequest:
    return QueuedRequest(ScoreRequest([0] * tokens, caller=caller, **fields), answer=None)


def always(_: ScoreRequest) -> bool:
    return True


def test_a_batch_is_filled_up_to_its_budget_in_order() -> None:
    queue = FairQueue()
    items = [waiting(n) for n in (40, 50, 30, 10)]
    for item in items:
        queue.put(item)
    assert queue.take(100, always) == items[:2]
    assert queue.take(100, always) == items[2:]
    assert queue.take(100, always) == [] and (queue.tokens, queue.requests) == (0, 0)


def test_request_longer_than_the_budget_gets_its_own_batch() -> None:
    queue = FairQueue()
    long, short = waiting(500), waiting(10)
    queue.put(long)
    queue.put(short)
    assert queue.take(100, always) == [long]
    assert queue.take(100, always) == [short]


def test_callers_share_by_tokens_however_many_requests_one_has() -> None:
    queue = FairQueue()
    for _ in range(1000):
        queue.put(waiting(10, "greedy"))
    for _ in range(20):
        queue.put(waiting(50, "modest"))
    served = {"greedy": 0, "modest": 0}
    for _ in range(10):
        for item in queue.take(100, always):
            served[item.request.caller] += item.tokens
    assert abs(served["greedy"] - served["modest"]) <= 100


def test_late_request_of_another_caller_is_served_fairly() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.put(waiting(100, "first"))
    for _ in range(10):
        queue.take(100, always)
    late = waiting(100, "late")
    queue.put(late)
    assert late in [item for _ in range(2) for item in queue.take(100, always)]


@pytest.mark.parametrize("served_before", [0, 1])
def test_idle_caller_saves_up_no_share(served_before: int) -> None:
    """Neither for who was never there nor for who was served before the rest."""
    queue = FairQueue()
    for _ in range(served_before):
        queue.put(waiting(10, "rested"))
    for _ in range(100):
        queue.put(waiting(10, "busy"))
    for _ in range(50):
        queue.take(10, always)
    for _ in range(50):
        queue.put(waiting(10, "rested"))
    callers = [queue.take(10, always)[0].request.caller for _ in range(20)]
    assert 8 <= callers.count("rested") <= 12


def test_long_request_is_served_among_many_short_ones() -> None:
    queue = FairQueue()
    long = waiting(100, "long")
    queue.put(waiting(60, "short"))
    queue.put(long)
    batches = []
    for _ in range(5):
        batches.append(queue.take(100, always))
        queue.put(waiting(60, "short"))
    assert any(long in batch for batch in batches[:3])


def test_request_that_is_not_ready_keeps_its_position() -> None:
    queue = FairQueue()
    pinned, free = waiting(10, version=7), waiting(10)
    queue.put(pinned)
    queue.put(free)
    assert queue.take(100, lambda request: request.allows(6)) == [free]
    assert queue.take(100, lambda request: request.allows(7)) == [pinned]


def test_returned_requests_are_first_and_alone_if_marked() -> None:
    queue = FairQueue()
    items = [waiting(10) for _ in range(4)]
    for item in items:
        queue.put(item)
    failed = queue.take(20, always)
    for item in reversed(failed):
        item.isolated = True
        queue.put(item, first=True)
    assert [queue.take(100, always) for _ in range(3)] == [[items[0]], [items[1]], items[2:]]


def test_tokens_are_refunded_only_to_the_account_that_paid_them() -> None:
    """The account of a caller may be dropped while its batch is in flight; the next one begins at the level of the others."""
    queue = FairQueue()
    queue.put(failed := waiting(10))
    queue.take(10, always)
    queue._queues.pop("a", None)
    queue.put(failed, first=True)
    assert queue._queues["a"].account == queue._level


def test_accounts_of_absent_callers_are_dropped() -> None:
    queue = FairQueue()
    queue.put(waiting(1, "stays"))
    for number in range(3 * MAX_CALLERS):
        queue.put(waiting(1, f"caller {number}"))
        queue.take(1, lambda request: request.caller != "stays")
    assert len(queue._queues) <= MAX_CALLERS + 1


@given(
    st.lists(st.tuples(st.integers(1, 200), st.sampled_from("abc")), max_size=60),
    st.integers(1, 300),
)
def test_nothing_is_lost_or_doubled_and_no_budget_exceeded(wanted: list[tuple[int, str]], budget: int) -> None:
    queue = FairQueue()
    items = [waiting(tokens, caller) for tokens, caller in wanted]
    for item in items:
        queue.put(item)
    taken: list[QueuedRequest] = []
    while batch := queue.take(budget, always):
        assert len(batch) == 1 or sum(item.tokens for item in batch) <= budget
        taken += batch
    assert sorted(map(id, taken)) == sorted(map(id, items))
    assert (queue.tokens, queue.requests) == (0, 0)
