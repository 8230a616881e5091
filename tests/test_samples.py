"""A sample grows by whole fields, and is unchanged by JSON."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import fields

import numpy as np
import pytest

from mtpctl.samples import EnvironmentUse, Sample, Speculation, VersionSpan, logprobs_of, response_limit


def sample() -> Sample:
    return Sample(prompt_id="p", group_id="g", prompt_ids=[1, 2, 3])


def test_append_adds_tokens_log_probs_mask_and_version() -> None:
    s = sample()
    s.append([10, 11], [-0.125, -0.25], version=4)
    s.append([12], [-0.375], version=4)
    s.append([13, 14], [-0.5, -0.5], version=6)
    assert s.response_ids.tolist() == [10, 11, 12, 13, 14]
    assert s.behaviour_logprobs.tolist() == [-0.125, -0.25, -0.375, -0.5, -0.5]
    assert s.version_spans == [VersionSpan(0, 3, 4), VersionSpan(3, 5, 6)], "one span a version, end to end"
    assert s.loss_mask.tolist() == [1] * 5 and s.length == 8


def test_tokens_with_a_stale_cache_have_separate_spans() -> None:
    s = sample()
    s.append([10, 11], [-0.125, -0.25], version=4)
    s.append([12], [-0.375], version=5, stale_kv=True)
    s.append([13], [-0.375], version=5, stale_kv=True)
    s.append([14], [-0.5], version=5)
    assert s.version_spans == [VersionSpan(0, 2, 4), VersionSpan(2, 4, 5, stale_kv=True), VersionSpan(4, 5, 5)]
    assert pickle.loads(pickle.dumps(s)) == s == Sample.from_dict(json.loads(json.dumps(s.to_dict())))


def test_tokens_of_the_environment_are_not_trained() -> None:
    s = sample()
    s.append([10], [-0.125], version=1)
    s.append([20, 21], [0.0, 0.0], version=1, trained=False)
    s.append([11], [-0.25], version=1)
    assert s.loss_mask.tolist() == [1, 0, 0, 1]
    assert s.version_spans == [VersionSpan(0, 4, 1)]


def test_appending_nothing_changes_nothing() -> None:
    s = sample()
    s.append([], [], version=9)
    assert s == sample()


def test_tokens_without_log_probs_are_refused_and_do_not_change_the_sample() -> None:
    s = sample()
    with pytest.raises(ValueError, match="got 2 tokens, but 1 log-probs"):
        s.append([1, 2], [-0.125], version=0)
    assert s == sample()


def test_a_sample_is_equal_after_json() -> None:
    s = sample()
    s.append([10, 11], [-0.125, -0.25], version=4)
    s.append([12], [-0.375], version=5)
    s.old_logprobs, s.old_version = logprobs_of([-0.125, -0.25, -0.375]), 5
    s.reward, s.finish_reason = 1.0, "stop"
    s.speculation = Speculation(drafted=4, accepted=2, accepted_by_position=[2, 0], steps=2)
    s.environment, s.environment_reward = EnvironmentUse(turns=2, seconds=0.5, errors=1, failure="tool.py:3: KeyError"), 0.25
    assert Sample.from_dict(json.loads(json.dumps(s.to_dict()))) == s
    assert s.copy() == s and s.copy().environment is not s.environment


def test_an_unknown_field_is_ignored() -> None:
    """For example in the buffer of a checkpoint that another version saved."""
    assert Sample.from_dict({**sample().to_dict(), "old_entropy": None}) == sample()


def test_unknown_fields_of_spans_are_ignored() -> None:
    s = sample()
    s.append([10], [-0.125], version=4)
    s.append([11], [-0.25], version=5, stale_kv=True)
    plain = json.loads(json.dumps(s.to_dict()))
    assert plain["version_spans"][0] == {"start": 0, "end": 1, "version": 4, "stale_kv": False}
    plain["version_spans"][1]["host"] = "a"
    assert Sample.from_dict(plain) == s


def test_samples_share_no_arrays() -> None:
    first, second = sample(), sample()
    first.append([1], [-0.125], version=0)
    first.speculation.drafted = 3
    assert second.response_ids.tolist() == [] and second.speculation.drafted == 0


def test_cut_truncates_all_per_token_fields() -> None:
    sample = Sample("p", "g", [1])
    sample.append([5, 6], [-1.0, -2.0], 1)
    sample.append([7, 8], [-3.0, -4.0], 2)
    sample.truncate(3)
    assert (*sample.response_ids, *sample.behaviour_logprobs, *sample.loss_mask) == (5, 6, 7, -1.0, -2.0, -3.0, 1, 1, 1)
    assert sample.version_spans == [VersionSpan(0, 2, 1), VersionSpan(2, 3, 2)]
    sample.truncate(2)
    assert sample.version_spans == [VersionSpan(0, 2, 1)]


def test_a_copy_is_equal_and_shares_no_mutable_field() -> None:
    s = sample()
    s.append([10, 11], [-0.125, -0.25], version=4)
    s.old_logprobs, s.speculation = logprobs_of([-0.125, -0.25]), Speculation(drafted=2, accepted=1, accepted_by_position=[1], steps=1)
    other = s.copy()
    assert other == s
    mutable = [each.name for each in fields(s) if not isinstance(getattr(s, each.name), str | int | float | None)]
    assert "response_ids" in mutable and "speculation" in mutable
    for name in mutable:
        assert getattr(other, name) is not getattr(s, name), name
    assert other.version_spans[0] is not s.version_spans[0]
    assert other.speculation.accepted_by_position is not s.speculation.accepted_by_position


@pytest.mark.parametrize(("context", "limit"), [(64, 8), (11, 8), (10, 7), (4, 1)])
def test_the_response_limit_is_max_tokens_or_the_rest_of_the_context(context: int, limit: int) -> None:
    assert response_limit(sample(), max_tokens=8, context=context) == limit


def test_routes_cover_all_tokens_but_the_last_and_are_copied_and_pickled() -> None:
    """Across an abort, the environment's reply and a cut. The next request provides the row of the previously last token."""
    s, rows = sample(), np.arange(20, dtype=np.uint8).reshape(10, 1, 2)
    assert s.num_routed == 0
    s.append([10, 11], [-0.125, -0.25], version=4)
    s.add_routes(rows[:5])  # the core had read the last token too
    assert s.num_routed == 4 and s.routes is not None
    s.append([20, 21], [0.0, 0.0], version=4, trained=False)
    s.append([12], [-0.125], version=5)
    s.add_routes(rows[4:7])
    assert np.array_equal(s.routes, rows[:7]) and s.num_routed == s.length - 1
    again = Sample.from_dict(json.loads(json.dumps(s.to_dict())))
    assert again.routes is not None and again.routes.dtype == np.uint8 and np.array_equal(again.routes, s.routes)
    copy = s.copy()
    copy.truncate(2)
    assert (copy.num_routed, s.num_routed) == (4, 7) and Sample.from_dict(copy.to_dict()) == copy


def test_arrays_are_created_from_any_iterable() -> None:
    """For example in a user's tests, and from a checkpoint's JSON."""
    created = Sample(
        "p", "g", [1, 2], response_ids=range(3), loss_mask=[True, 0, 1], behaviour_logprobs=(-0.5, 0.0, -1.0), old_logprobs=[-1] * 3
    )
    assert created.token_ids.tolist() == [1, 2, 0, 1, 2] and created.num_sampled == 2
    assert json.loads(json.dumps(created.to_dict()))["loss_mask"] == [1, 0, 1]
    assert Sample.from_dict(created.to_dict()) == created
    assert created.response_ids and not Sample("p", "g", [1]).response_ids


def test_a_token_takes_13_bytes_in_memory_and_in_a_message() -> None:
    """Four for its id, four for each log-prob, one for its mask, plus the spare capacity of growing arrays."""
    created, tokens = Sample("p", "g", []), 4096
    for _ in range(64):
        created.append([7] * (tokens // 64), [-0.5] * (tokens // 64), 1)
    created.old_logprobs = created.behaviour_logprobs[:]
    stored = (created.response_ids, created.behaviour_logprobs, created.loss_mask, created.old_logprobs)
    assert sum(sys.getsizeof(each) for each in stored) <= 1.15 * 13 * tokens
    assert len(pickle.dumps(created, pickle.HIGHEST_PROTOCOL)) <= 13 * tokens + 1000
