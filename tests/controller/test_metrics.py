"""Metrics of a batch against hand-computed values, and pass@k against its definition: the share of subsets with a correct response."""

from itertools import combinations

import pytest

from mtpctl.controller.metrics import (
    BusyClock,
    has_signal,
    mean_pass_at_k,
    pass_at_k,
    pass_at_k_values,
    speculation_metrics,
    trajectory_metrics,
)
from mtpctl.samples import EnvironmentUse, Sample, Speculation
from mtpctl.trainer.actor import mean_metrics


def sample(*versions: tuple[int, int], reward: float = 1.0) -> Sample:
    """A sample of `tokens` tokens under each `version`."""
    created = Sample(prompt_id="p", group_id="0", prompt_ids=[1])
    for tokens, version in versions:
        created.append([7] * tokens, [-1.0] * tokens, version)
    created.reward = reward
    return created


def test_staleness_is_counted_from_the_oldest_token() -> None:
    metrics = trajectory_metrics([sample((2, 3), (2, 5)), sample((4, 5), reward=0.0)], version=5)
    assert metrics["async/staleness_mean"] == 1.0
    assert metrics["async/staleness_max"] == 2.0
    assert metrics["async/partial_ratio"] == 0.5
    assert metrics["reward/mean"] == metrics["reward/std"] == 0.5


def test_staleness_is_averaged_over_tokens_and_counted_in_updates() -> None:
    """Published every 4 updates, 3 ago: a token of the version before is 7 updates old."""
    metrics = trajectory_metrics([sample((1, 4), (2, 5)), sample((5, 5))], version=5, sync_every=4, updates_since_sync=3)
    assert metrics["async/staleness_tokens_mean"] == 1 / 8
    assert metrics["async/staleness_mean"] == 1 / 2
    assert (metrics["async/staleness_updates_mean"], metrics["async/staleness_updates_max"]) == (3.5, 7.0)


def test_truncated_fraction_counts_any_length_limit() -> None:
    """The prompt may leave less room in the context than `max_tokens`, and the end token may be the last possible token."""
    cut, ended, empty = sample((3, 1)), sample((4, 1)), sample()
    cut.finish_reason, ended.finish_reason, empty.finish_reason = "length", "stop", "deadline"
    metrics = trajectory_metrics([cut, ended, empty], version=2)
    assert metrics["response/truncated_fraction"] == metrics["response/deadline_fraction"] == pytest.approx(1 / 3)
    assert metrics["async/staleness_mean"] == pytest.approx(2 / 3)


def test_environment_metrics_are_means_over_responses() -> None:
    plain, failed, quick = sample((3, 1)), sample((3, 1)), sample((3, 1))
    failed.environment = EnvironmentUse(turns=1, seconds=3.0, errors=1)
    quick.environment, quick.environment_reward = EnvironmentUse(turns=4, seconds=1.0, timeouts=1), 0.5
    metrics = trajectory_metrics([failed, quick], version=1)
    assert {name: value for name, value in metrics.items() if name.startswith("environment/")} == {
        "environment/turns": 2.5,
        "environment/seconds": 2.0,
        "environment/errors": 0.5,
        "environment/timeouts": 0.5,
        "environment/reward": 0.5,
    }
    assert not any(name.startswith("environment/") for name in trajectory_metrics([plain], version=1))


def test_agent_metrics_are_means_over_trajectories() -> None:
    one, two = sample((3, 1)), sample((3, 1))
    one.environment, two.environment = EnvironmentUse(turns=4, samples=3, rewritten=1), EnvironmentUse(turns=2, samples=1)
    metrics = trajectory_metrics([one, two], version=1)
    assert (metrics["environment/samples"], metrics["environment/rewritten"], metrics["environment/turns"]) == (2.0, 0.25, 3.0)


def test_a_trajectory_counts_once_in_rewards_and_finish_reasons() -> None:
    """Of two, the one without reward became nine samples: 0.5 and not 0.1."""
    one, forked = sample((3, 1)), sample((3, 1), reward=0.0)
    forked.earlier = [sample((2, 1), reward=0.0) for _ in range(8)]
    one.reward_parts, one.finish_reason = {"format": 1.0}, "deadline"
    for part in forked.trajectory:
        part.reward_parts, part.finish_reason = {"format": 0.0}, "length"
    metrics = trajectory_metrics([one, forked], version=1)
    assert metrics["reward/mean"] == metrics["reward/std"] == metrics["reward/format"] == 0.5
    assert metrics["response/deadline_fraction"] == metrics["response/truncated_fraction"] == 0.5
    assert metrics["response/length_mean"] == pytest.approx((2 * 3 + 8 * 2) / 10), "lengths are of samples"


def test_acceptance_is_counted_over_drafts_and_by_position_over_steps() -> None:
    one, two = sample((3, 1)), sample((3, 1))
    one.speculation = Speculation(drafted=8, accepted=5, accepted_by_position=[3, 2], steps=4)
    two.speculation = Speculation(drafted=2, accepted=1, accepted_by_position=[1, 0], steps=1)
    metrics = speculation_metrics([one, two])
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(0.6)
    assert metrics["rollout/spec_accept_length"] == pytest.approx(1 + 6 / 5)
    assert (metrics["rollout/spec_accept_rate_1"], metrics["rollout/spec_accept_rate_2"]) == pytest.approx((0.8, 0.4))


def test_without_drafts_there_is_no_acceptance() -> None:
    assert speculation_metrics([sample((2, 1))]) == {}


def test_a_mean_is_over_the_parts_that_have_the_metric() -> None:
    assert mean_metrics([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}


def test_busy_shares_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("mtpctl.controller.metrics.time.perf_counter", lambda: now[0])
    clock = BusyClock()
    for at, side, busy in ((0.0, "rollout", True), (4.0, "trainer", True), (6.0, "rollout", False), (8.0, "trainer", False)):
        now[0] = at
        clock.set(side, busy)
    now[0] = 10.0
    shares = clock.read_and_reset()
    assert shares["timing_s/step"] == pytest.approx(10.0)
    assert shares["async/rollout_idle"] == pytest.approx(0.4)
    assert shares["async/trainer_idle"] == pytest.approx(0.6)
    assert shares["async/overlap"] == pytest.approx(0.2)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n: int) -> None:
    for correct in range(n + 1):
        responses = [number < correct for number in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(responses, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_large_counts_do_not_overflow() -> None:
    assert pass_at_k(10_000, 3, 1) == pytest.approx(3e-4)
    assert pass_at_k(10_000, 5_000, 64) == pytest.approx(1.0)


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_responses_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} is undefined for 4 responses"):
        pass_at_k(4, 1, k)


def test_pass_at_k_is_reported_for_powers_of_two_and_n() -> None:
    assert [pass_at_k_values(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert mean_pass_at_k([0, 4], 4) == {1: 0.5, 2: 0.5, 4: 0.5}


def test_group_has_signal_if_rewards_differ() -> None:
    assert has_signal([0.0, 1.0, 0.0])
    assert not has_signal([1.0, 1.0, 1.0])
    assert not has_signal([0.1 + 0.2, 0.3])
    assert not has_signal([1.0])
