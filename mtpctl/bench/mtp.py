"""`mtpctl bench mtp`: the gain from training and syncing the drafter in RL, or a comparison of draft losses, methods and token counts.

The four default arms differ only in the MTP layers: not used; frozen; trained and synced with the target; trained, but only the target is
synced. The engine measures acceptance over the last updates, when policies and drafters have changed most, and on the held-out problems
after the last update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mtpctl.bench.arms import Arm, Outcome, format_updates
from mtpctl.bench.report import Environment, format_number, markdown_table
from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.names import format_value

ARMS = (
    Arm("none", "no speculation", ("rollout.speculation.num_tokens=0",)),
    Arm("frozen", "drafter frozen", ("train.rl.train_mtp=false",)),
    Arm("trained", "drafter trained and synced", ("train.rl.train_mtp=true", "sync.sections=[target, draft]")),
    Arm("target-only", "drafter trained, only the target synced", ("train.rl.train_mtp=true", "sync.sections=[target]")),
)
TRAINED_OVERRIDES = ("train.rl.train_mtp=true", "sync.sections=[target, draft]")


def make_drafter_arms(
    losses: Sequence[str], methods: Sequence[str], counts: Sequence[int], *, layers: int, is_block: bool = False
) -> list[Arm]:
    """An arm for each combination of loss, draft method and number of draft tokens, with the drafter trained and synced.

    layers: MTP layers of the model. A single layer is repeated for every draft token. In that case, each number of draft tokens above 1 has
    a baseline that trains the layer for the first draft token only, with cross-entropy and greedy drafts. is_block: whether the drafter
    drafts blocks. It then has no baselines.
    """
    trained_arms = [
        Arm(
            f"{loss}-{method}-k{count}",
            f"{loss}, {method} drafts, k = {count}",
            (
                *TRAINED_OVERRIDES,
                f"mtp.loss={loss}",
                f"mtp.repeat={count if layers == 1 else 1}",
                f"rollout.speculation.draft_method={method}",
                f"rollout.speculation.num_tokens={count}",
            ),
        )
        for count in counts
        for loss in losses
        for method in methods
    ]
    baseline_overrides = ("mtp.loss=ce", "mtp.repeat=1", "rollout.speculation.draft_method=greedy")
    baselines = [
        Arm(
            f"first-k{count}",
            f"ce at the first draft token alone, greedy drafts, k = {count}",
            (*TRAINED_OVERRIDES, *baseline_overrides, f"rollout.speculation.num_tokens={count}"),
        )
        for count in counts
        if layers == 1 and count > 1 and not is_block
    ]
    return trained_arms + baselines


TIMED_WORK = (
    "tokens/s: response tokens of the last updates, divided by the wall time of those updates (syncs and waiting included, evaluations "
    "excluded). While busy: divided only by the time in which the engines had requests"
)


@dataclass(frozen=True, slots=True)
class Result:
    """One arm over the last updates of its runs, with seeds pooled. Acceptances are fractions, or None if nothing was drafted.

    updates: completed updates of each run. by_seed, by_position: acceptance of each run, and of the draft token at each position.
    expected_by_position: acceptance at each position that the trainer computed from the probabilities of trunk and drafter.
    """

    name: str
    meaning: str
    seeds: int
    updates: list[int]
    updates_wanted: int
    drafted: int
    accepted: int
    acceptance: float | None
    by_seed: list[float]
    by_position: list[float]
    expected_by_position: list[float]
    accept_length: float | None
    held_out_acceptance: float | None
    tokens_per_s: float
    tokens_per_busy_s: float
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(frozen=True, slots=True)
class Gain:
    """Difference in acceptance between the trained and the frozen drafter: in points, relative, and in (binomial) standard errors."""

    points: float
    relative: float
    standard_errors: float


def summarize(outcomes: list[Outcome], last_updates: int) -> list[Result]:
    """One result for each arm, over the last `last_updates` updates of each run."""
    arms = list(dict.fromkeys(outcome.arm for outcome in outcomes))
    return [_make_result(arm, [o for o in outcomes if o.arm == arm], last_updates) for arm in arms]


def compute_gain(results: list[Result]) -> Gain | None:
    """Compare the trained arm with the frozen one. None if one of them was not run or drafted nothing."""
    by_name = {result.name: result for result in results}
    trained, frozen = by_name.get("trained"), by_name.get("frozen")
    if trained is None or frozen is None or trained.acceptance is None or frozen.acceptance is None:
        return None
    difference = trained.acceptance - frozen.acceptance
    variance = sum(rate * (1 - rate) / n for rate, n in ((trained.acceptance, trained.drafted), (frozen.acceptance, frozen.drafted)))
    infinite = math.copysign(math.inf, difference) if difference else 0.0
    relative = difference / frozen.acceptance if frozen.acceptance else infinite
    return Gain(100 * difference, relative, difference / math.sqrt(variance) if variance else infinite)


def format_table(results: list[Result], last_updates: int) -> str:
    baseline = next((r for r in results if r.name == "none"), None)
    headings = (
        "drafter | updates | acceptance | each seed | by position | expected | tokens per decoding step | held out | tokens/s | while busy"
    )
    rows = []
    for r in results:
        relative_speed = "" if baseline is None else f"{r.tokens_per_busy_s / baseline.tokens_per_busy_s - 1:+.1%}"
        acceptance_text = "–" if r.acceptance is None else f"{r.acceptance:.1%} ({r.accepted}/{r.drafted})"
        updates_text = ", ".join(format_updates(done, r.updates_wanted) for done in r.updates)
        acceptance = [acceptance_text, _format_shares(r.by_seed), _format_shares(r.by_position), _format_shares(r.expected_by_position)]
        speed_cells = [
            format_number(r.accept_length, ".2f"),
            _format_share(r.held_out_acceptance),
            f"{r.tokens_per_s:,.0f}",
            f"{r.tokens_per_busy_s:,.0f}",
        ]
        accuracy = f"{_format_share(r.accuracy_before)} → {_format_share(r.accuracy_after)}"
        rows.append([r.meaning, updates_text, *acceptance, *speed_cells, relative_speed, accuracy])
    return (
        f"Over the last {last_updates} updates of each run:\n\n{markdown_table(f'{headings} | against none | accuracy'.split(' | '), rows)}"
    )


def to_document(results: list[Result], environment: Environment, last_updates: int) -> dict[str, object]:
    gain = compute_gain(results)
    return {
        "bench": "mtp",
        "environment": environment,
        "timer": TIMED_WORK,
        "last_updates": last_updates,
        "results": [asdict(r) for r in results],
        "trained_against_frozen": None if gain is None else asdict(gain),
    }


def _make_result(arm: Arm, outcomes: list[Outcome], last_updates: int) -> Result:
    histories = [outcome.history for outcome in outcomes]
    rows = [
        row.metrics
        for history in histories
        for row in history.rows
        if row.phase == "rl" and 0 <= history.last_step("rl") - row.step < last_updates
    ]
    update_rows = [m for m in rows if "timing_s/step" in m]
    drafting_rows = [m for m in update_rows if "rollout/spec_drafted" in m]
    drafted, accepted = (int(sum(m[f"rollout/spec_{count}"] for m in drafting_rows)) for count in ("drafted", "accepted"))
    wall_s = sum(m["timing_s/step"] for m in update_rows)
    busy_s = sum(m["timing_s/step"] * (1 - m["async/rollout_idle"]) for m in update_rows)
    tokens = sum(m["rollout/tokens_per_s"] * m["timing_s/step"] for m in update_rows)
    accept_rate_names = sorted(
        {name for m in drafting_rows for name in m if name.startswith("rollout/spec_accept_rate_")},
        key=lambda name: int(name.rpartition("_")[2]),
    )
    suffix = "" if outcomes[0].draft_method == "probabilistic" else "_greedy"
    expected_rate_names = [name.replace("rollout/spec_accept_rate_", f"mtp/expected_rate{suffix}_") for name in accept_rate_names]
    return Result(
        name=arm.name,
        meaning=arm.meaning,
        seeds=len(histories),
        updates=[outcome.updates for outcome in outcomes],
        updates_wanted=max(outcome.requested_updates for outcome in outcomes),
        drafted=drafted,
        accepted=accepted,
        acceptance=accepted / drafted if drafted else None,
        by_seed=[rate for history in histories if (rate := _acceptance_rate(history, last_updates)) is not None],
        by_position=[_weighted_mean(drafting_rows, name) for name in accept_rate_names],
        expected_by_position=[_weighted_mean(drafting_rows, name) for name in expected_rate_names if any(name in m for m in drafting_rows)],
        accept_length=_weighted_mean(drafting_rows, "rollout/spec_accept_length") if drafted else None,
        held_out_acceptance=_mean_at([history.series("eval/spec_accept_rate", "rl") for history in histories], -1),
        tokens_per_s=tokens / wall_s if wall_s else 0.0,
        tokens_per_busy_s=tokens / busy_s if busy_s else 0.0,
        accuracy_before=_mean_at([history.series("eval/accuracy", "rl") for history in histories], 0),
        accuracy_after=_mean_at([history.series("eval/accuracy", "rl") for history in histories], -1),
    )


def _acceptance_rate(history: History, last_updates: int) -> float | None:
    begin = history.last_step("rl") - last_updates
    drafted, accepted = (
        sum(value for step, value in history.series(f"rollout/spec_{count}", "rl") if step > begin) for count in ("drafted", "accepted")
    )
    return accepted / drafted if drafted else None


def _weighted_mean(rows: list[dict[str, float]], name: str) -> float:
    """Mean of a metric over updates, weighted by their number of draft tokens."""
    pairs = [(m[name], m["rollout/spec_drafted"]) for m in rows if name in m]
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _mean_at(series: list[list[tuple[int, float]]], index: int) -> float | None:
    values = [points[index][1] for points in series if points]
    return sum(values) / len(values) if values else None


def _format_share(value: float | None) -> str:
    return "–" if value is None else format_value(value, "share")


def _format_shares(values: list[float]) -> str:
    return ", ".join(_format_share(v) for v in values) or "–"
