"""The count of a response's last step is cut with its tokens."""

from __future__ import annotations

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from mtpctl.rollout.vllm.patches import verification


@pytest.mark.parametrize(
    ("accepted", "retained", "drafted", "counted"),
    [
        (3, 4, 3, 3),  # the whole step is of the response
        (3, 2, 2, 2),  # the second draft was its end
        (1, 1, 1, 1),  # so was the first one; what came behind it was unknown
        (0, 1, 1, 0),  # the end came in place of the first draft: that one was wrong, the others were behind it
        (1, 2, 2, 1),
    ],
)
def test_drafts_behind_the_end_are_not_counted(accepted: int, retained: int, drafted: int, counted: int) -> None:
    verification.install_draft_counts()
    counts = RequestSpecDecodeMetrics.new(3)
    counts.observe(3, 2)
    counts.observe(3, accepted)
    verification.trim_last_step(counts, retained)
    assert counts.num_draft_tokens == 3 + drafted
    assert sum(counts.histogram) == 2
    assert sum(taken * times for taken, times in enumerate(counts.histogram)) == 2 + counted


def test_trimming_twice_keeps_the_shorter_length() -> None:
    """Where the scheduler ended a response by its length, and the front end finds a stop string before that."""
    verification.install_draft_counts()
    counts = RequestSpecDecodeMetrics.new(3)
    counts.observe(3, 3)
    for retained in (2, 1):
        verification.trim_last_step(counts, retained)
    assert (counts.num_draft_tokens, counts.histogram) == (1, [0, 1, 0, 0])


def test_detailed_level_keeps_every_step() -> None:
    verification.install_draft_counts()
    counts = RequestSpecDecodeMetrics.new(3)
    counts.observe(3, 1, detailed=True)
    counts.observe(2, 0, detailed=True)
    assert (counts.per_step_drafted, counts.per_step_accepted) == ([3, 2], [1, 0])
