"""A collapse of draft acceptance after a sync is reported, but not noise or a drafter that was never good."""

from __future__ import annotations

from mtpctl.controller.weights import WINDOW_DRAFTS, AcceptanceWatch, Collapse
from mtpctl.samples import Sample, Speculation


def sample(rate: float, versions: list[int], drafts: int = 50) -> Sample:
    result = Sample("p", "g", [1])
    for version in versions:
        result.append([0] * 10, [0.0] * 10, version)
    result.speculation = Speculation(drafts, int(rate * drafts), [int(rate * drafts)], drafts)
    return result


def feed(watch: AcceptanceWatch, rate: float, version: int, samples: int = 8) -> list[Collapse]:
    return [collapse for _ in range(samples) if (collapse := watch.observe(sample(rate, [version])))]


def test_a_collapse_is_reported_once_after_enough_drafts() -> None:
    watch = AcceptanceWatch()
    watch.begin_version(1)
    assert not feed(watch, 0.8, 1)
    watch.begin_version(2)
    assert not feed(watch, 0.02, 2, samples=WINDOW_DRAFTS // 50 - 1)
    [collapse] = feed(watch, 0.02, 2)
    assert (collapse.version, collapse.acceptance, collapse.earlier_mean) == (2, 0.02, 0.8)
    assert "fell to 2.0% over the 200 drafts after the sync of version 2, from 80.0%" in str(collapse)


def test_half_the_mean_is_no_collapse() -> None:
    watch = AcceptanceWatch()
    feed(watch, 0.8, 0)
    watch.begin_version(1)
    assert not feed(watch, 0.4, 1)


def test_responses_of_the_previous_version_do_not_count() -> None:
    watch = AcceptanceWatch()
    feed(watch, 0.8, 0)
    watch.begin_version(1)
    assert not [c for _ in range(20) if (c := watch.observe(sample(0.0, [0])))]
    assert not [c for _ in range(20) if (c := watch.observe(sample(0.0, [0, 1])))]
    assert [c for _ in range(20) if (c := watch.observe(sample(0.0, [0, 1, 1])))]


def test_a_drafter_with_low_acceptance_cannot_collapse() -> None:
    watch = AcceptanceWatch()
    feed(watch, 0.06, 0)
    watch.begin_version(1)
    assert not feed(watch, 0.0, 1)


def test_a_slow_decline_between_syncs_is_no_collapse() -> None:
    watch = AcceptanceWatch()
    for rate in (0.8, 0.5, 0.2):
        assert not feed(watch, rate, 0)
