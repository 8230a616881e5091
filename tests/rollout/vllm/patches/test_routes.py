"""Rows of a request, which the core keeps until it ends, join at their positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import routes

ROWS = np.arange(600, dtype=np.uint8).reshape(300, 1, 2)


def request(prompt: int, start: int = 0) -> Any:
    return SimpleNamespace(
        request_id="p/0/1-a", num_prompt_tokens=prompt, sampling_params=SimpleNamespace(routed_experts_prompt_start=start)
    )


def joined(asked: Any, *steps: tuple[int, int]) -> np.ndarray[Any, Any]:
    kept: dict[str, routes.KeptRoutes] = {}
    for start, end in steps:
        routes._join(kept, asked, start, ROWS[start:end])
    return kept[asked.request_id].rows


@pytest.mark.parametrize(
    "steps", [[(0, 100), (100, 101), (101, 104)], [(0, 20), *((i, i + 1) for i in range(20, 299))], [(0, 100), (90, 104), (104, 105)]]
)
def test_steps_join_and_what_is_there_stays(steps: list[tuple[int, int]]) -> None:
    assert np.array_equal(joined(request(100), *steps), ROWS[: steps[-1][1]])


def test_a_request_that_goes_on_begins_where_the_sample_has_none() -> None:
    assert np.array_equal(joined(request(100, 60), (60, 100), (100, 102)), ROWS[60:102])


def test_a_gap_is_told() -> None:
    with pytest.raises(UpstreamMoved, match=r"routes of p/0/1-a came from token 102 on where those of token 101 were due"):
        joined(request(100), (0, 101), (102, 103))


def test_rows_pass_between_processes_as_bytes() -> None:
    kept: dict[str, routes.KeptRoutes] = {}
    routes._join(kept, request(100), 0, ROWS[:100])
    scheduler = SimpleNamespace(aux_output_connector=SimpleNamespace(mtpctl_kept_routes=kept))
    found = routes.pending_of(scheduler, ["p/0/1-a", "gone"])
    assert np.array_equal(routes.as_rows(*found["p/0/1-a"]), ROWS[:100]) and list(found) == ["p/0/1-a"]
    assert routes.pending_of(SimpleNamespace(aux_output_connector=None), ["p/0/1-a"]) == {}


class Capturer:
    """Gives each step's rows by their position in the request."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def snapshot_routing_data(self, count: int) -> torch.Tensor:
        assert count == len(self.places)
        return torch.from_numpy(ROWS[self.places])


class Batch:
    """A recorder of one request, which is told its steps."""

    def __init__(self, start: int = 0) -> None:
        self.capturer, self.generation = Capturer(), 0
        self.recorder = routes.Recorder(self.capturer)  # type: ignore[arg-type]
        self.begin(start)

    def begin(self, start: int, finished: tuple[str, ...] = ()) -> None:
        self.recorder.begin(SimpleNamespace(generation=self.generation, finished_requests=finished, requests={"r": start}))  # type: ignore[arg-type]

    def step(self, first: int, count: int, drafts: int = 0, sampled: int = 1) -> list[int] | None:
        """The positions of the rows that the step completes; None where there are none yet."""
        self.capturer.places = list(range(first, first + count))
        scheduled: Any = SimpleNamespace(
            num_scheduled_tokens={"r": count}, scheduled_spec_decode_tokens={"r": [0] * drafts} if drafts else {}
        )
        found = self.recorder.end(scheduled, ["r"], [first], [sampled]).get("r")
        if found is None:
            return None
        assert np.array_equal(found.rows, ROWS[found.token_start : found.token_start + len(found.rows)])
        return list(range(found.token_start, found.token_start + len(found.rows)))


def test_rejected_drafts_leave_no_rows_and_prompts_in_parts_wait_for_the_last() -> None:
    batch = Batch()
    assert batch.step(0, 64, sampled=0) is None
    assert batch.step(64, 36) == list(range(100))
    assert batch.step(100, 3, drafts=2, sampled=1) == [100], "both drafts were rejected"
    assert batch.step(101, 3, drafts=2, sampled=3) == [101, 102, 103]
    assert batch.step(104, 3, drafts=2, sampled=2) == [104, 105]


def test_what_is_read_again_is_not_told_again() -> None:
    """After a preemption the core names the first token that it wants, after a sync it counts on from a new generation."""
    batch = Batch()
    batch.step(0, 100)
    batch.step(100, 1)
    batch.begin(101, finished=("r",))
    assert batch.step(0, 64, sampled=0) is None
    assert batch.step(64, 38) == [101]
    batch.generation = 1
    batch.begin(102)
    assert batch.step(0, 103) == [102]
    other = Batch(start=40)
    assert other.step(0, 100) == list(range(40, 100))


def test_rows_that_nobody_computed_are_missed() -> None:
    with pytest.raises(UpstreamMoved, match="r was read from token 5 on, and its routes are wanted from token 0 on"):
        Batch().step(5, 3)
