"""What is told of drafting: the median by the number of drafts, of the steps that have passed, once."""

from __future__ import annotations

import time

import pytest
import torch

from mtpctl.rollout.vllm.patches import draft_times
from mtpctl.rollout.vllm.patches.draft_times import KEPT, DraftTimes

CPU = torch.device("cpu")


def draft(times: DraftTimes, drafts: int, seconds: float, monkeypatch: pytest.MonkeyPatch, device: torch.device = CPU) -> None:
    clock = iter([10.0, 10.0 + seconds])
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        times.begin(drafts, device)()


def test_the_median_of_each_number_of_drafts_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = DraftTimes()
    for seconds in (0.25, 0.5, 8.0):
        draft(times, 1, seconds, monkeypatch)
    draft(times, 3, 2.0, monkeypatch)
    assert times.take() == {1: 0.5, 3: 2.0}
    assert times.take() == {}


def test_only_the_last_steps_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    times = DraftTimes()
    for seconds in [1.0] * KEPT + [2.0] * KEPT:
        draft(times, 1, seconds, monkeypatch)
    assert times.take() == {1: 2.0}


class Event:
    """A CUDA event that has passed, or not."""

    made: list[Event]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.passed = True
        Event.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        assert other.passed
        return 1.5


def test_steps_that_a_card_still_works_on_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made = []
    monkeypatch.setattr(draft_times.torch.cuda, "Event", Event)
    times = DraftTimes()
    for _ in range(2):
        times.begin(2, torch.device("cuda"))()
    times.begin(1, torch.device("cuda"))()
    Event.made[-1].passed = False
    assert times.take() == {2: pytest.approx(0.0015)}
