"""Log-probs that arrive with the end of a response equal those that vLLM appends step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from mtpctl.rollout.vllm.patches import logprobs


@pytest.fixture(autouse=True)
def installed() -> None:
    logprobs.install_logprobs()


def processor(*, late: bool, flat: bool = True) -> Any:
    requested = SamplingParams(logprobs=0, flat_logprobs=flat, extra_args=dict(logprobs.DEFERRED) if late else None)
    return LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=requested))  # type: ignore[arg-type]


def rows(count: int, columns: int = 1) -> LogprobsLists:
    """Rows of sampled tokens; behind each, as many others as another request in the step needs."""
    draw = np.random.default_rng(count)
    ids = draw.integers(1000, size=(count, columns))
    return LogprobsLists(ids, -draw.random((count, columns)).astype(np.float32), draw.integers(9, size=count))


@pytest.mark.parametrize("counts", [(5,), (1, 1, 3), (2, 7)])
def test_deferred_logprobs_equal_vllms(counts: tuple[int, ...]) -> None:
    ours, theirs = processor(late=True), processor(late=False)
    for count in counts:
        for each in (ours, theirs):
            each._update_sample_logprobs(rows(count))
    assert ours.logprobs == theirs.logprobs and len(ours.logprobs) == sum(counts)
    assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-12)


def test_deferred_logprobs_are_appended_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*row: Any) -> None:
        raise AssertionError("a position by itself")

    monkeypatch.setattr("vllm.v1.engine.logprobs.append_logprobs_for_next_position", refuse)
    processor(late=True)._update_sample_logprobs(rows(5))
    with pytest.raises(AssertionError, match="by itself"):
        processor(late=False)._update_sample_logprobs(rows(5))


def test_only_the_sampled_token_is_stored_in_mixed_batches() -> None:
    mine, wide = processor(late=True), rows(4, columns=3)
    mine._update_sample_logprobs(wide)
    assert mine.logprobs.token_ids == wide.logprob_token_ids[:, 0].tolist()
    assert [list(each) for each in mine.logprobs] == [[token] for token in mine.logprobs.token_ids]


def test_without_flat_logprobs_vllms_path_is_used() -> None:
    mine = processor(late=True, flat=False)
    mine._update_sample_logprobs(rows(2))
    assert isinstance(mine.logprobs, list) and len(mine.logprobs) == 2


def test_stored_logprobs_stay_until_the_response_ends() -> None:
    mine, scheduler = logprobs.PendingLogprobs(), SimpleNamespace(mtpctl_pending_logprobs={})
    mine.tokens.extend([7, 8])
    mine.logprobs.extend([-0.5, -0.25])
    scheduler.mtpctl_pending_logprobs["cut"] = mine
    for _ in range(2):
        assert logprobs.read_stored_logprobs(scheduler, ["cut", "ended"]) == {"cut": ([7, 8], [-0.5, -0.25])}


def test_aborted_response_gets_its_stored_logprobs() -> None:
    mine = processor(late=True)
    for _ in range(2):
        logprobs.replace_logprobs(mine, [7, 8, 9], [-0.5, -0.25, -1.0])
        assert mine.logprobs.token_ids == [7, 8, 9] and mine.logprobs.logprobs == [-0.5, -0.25, -1.0]
        assert mine.cumulative_logprob == -1.75
