"""`mtpctl bench mtp`: the gain from training and syncing the drafter in RL; or a comparison of draft losses, methods and numbers.

The four default arms differ only in the MTP layers: not used; frozen; trained and synced with the target; trained, but only the target is
synced. Acceptance is measured by the engine, over the last updates, when policies and drafters have changed most, and on the held-out
problems after the last update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mtpctl.bench.arms import Arm, Outcome, format_updates
from mtpctl.bench.report import Environment, markdown, number
from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.names import format_value

ARMS = (
    Arm("none", "no speculation", ("rollout.speculation.num_tokens=0",)),
    Arm("frozen", "drafter frozen", ("train.rl.train_mtp=false",)),
    Arm("trained", "drafter trained and synced", ("train.rl.train_mtp=true", "sync.sections=[target, draft]")),
    Arm("target-only", "drafter trained, only the target synced", ("train.rl.train_mtp=true", "sync.sections=[target]")),
)
TRAINED = ("train.rl.train_mtp=true", "sync.sections=[target, draft]")


def drafter_arms(losses: Sequence[str], methods: Sequence[str], counts: Sequence[int], *, layers: int, is_block: bool = False) -> list[Arm]:
    """An arm for each combination of loss, draft method and number of draft tokens, with the drafter trained and synced.

    layers: MTP layers of the model. A single layer is repeated for every draft token. In that case baselines are added that train it for
    the first draft token only, with cross-entropy and greedy drafts. is_block: whether the drafter drafts blocks, which are served as they
    are trained, without baselines.
    """
    as_served = [
        Arm(
            f"{loss}-{method}-k{count}",
            f"{loss}, {method} drafts, k = {count}",
            (
                *TRAINED,
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
    plain = ("mtp.loss=ce", "mtp.repeat=1", "rollout.speculation.draft_method=greedy")
    first_only = [
        Arm(
            f"first-k{count}",
            f"ce at the first draft token alone, greedy drafts, k = {count}",
            (*TRAINED, *plain, f"rollout.speculation.num_tokens={count}"),
        )
        for count in counts
        if layers == 1 and count > 1 and not is_block
    ]
    return as_served + first_only


TIMER = (
    "tokens/s: response tokens of the last updates over their wall time (updates, syncs and waiting included), and over the part of it "
    "in which the engines had requests; evaluations excluded"
)


@dataclass(frozen=True, slots=True)
class Result:
    """One arm over the last updates of its runs, with seeds pooled. Acceptances are fractions; None if nothing was drafted."""

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


def summarise(outcomes: list[Outcome], last: int) -> list[Result]:
    """One result for each arm, over the `last` updates of each run."""
    arms = list(dict.fromkeys(outcome.arm for outcome in outcomes))
    return [_result(arm, [o for o in outcomes if o.arm == arm], last) for arm in arms]


def gain(results: list[Result]) -> Gain | None:
    """Compare the trained arm with the frozen one. None if one of them was not run or drafted nothing."""
    by_name = {r.name: r for r in results}
    trained, frozen = by_name.get("trained"), by_name.get("frozen")
    if trained is None or frozen is None or trained.acceptance is None or frozen.acceptance is None:
        return None
    difference = trained.acceptance - frozen.acceptance
    variance = sum(r * (1 - r) / n for r, n in ((trained.acceptance, trained.drafted), (frozen.acceptance, frozen.drafted)))
    relative = difference / frozen.acceptance if frozen.acceptance else math.inf
    return Gain(100 * difference, relative, difference / math.sqrt(variance) if variance else math.inf)


def table(results: list[Result], last: int) -> str:
    plain = next((r for r in results if r.name == "none"), None)
    headings = "drafter | updates | acceptance | each seed | by position | expected | tokens a step | held out | tokens/s | while busy"
    rows = []
    for r in results:
        against = "" if plain is None else f"{r.tokens_per_busy_s / plain.tokens_per_busy_s - 1:+.1%}"
        counted = "–" if r.acceptance is None else f"{r.acceptance:.1%} ({r.accepted}/{r.drafted})"
        updates = ", ".join(format_updates(updates, r.updates_wanted) for updates in r.updates)
        acceptance = [counted, _shares(r.by_seed), _shares(r.by_position), _shares(r.expected_by_position)]
        speeds = [number(r.accept_length, ".2f"), _share(r.held_out_acceptance), f"{r.tokens_per_s:,.0f}", f"{r.tokens_per_busy_s:,.0f}"]
        accuracy = f"{_share(r.accuracy_before)} → {_share(r.accuracy_after)}"
        rows.append([r.meaning, updates, *acceptance, *speeds, against, accuracy])
    return f"Over the last {last} updates of each run:\n\n{markdown(f'{headings} | against none | accuracy'.split(' | '), rows)}"


def as_json(results: list[Result], environment: Environment, last: int) -> dict[str, object]:
    difference = gain(results)
    return {
        "bench": "mtp",
        "environment": environment,
        "timer": TIMER,
        "last_updates": last,
        "results": [asdict(r) for r in results],
        "trained_against_frozen": None if difference is None else asdict(difference),
    }


def _result(arm: Arm, outcomes: list[Outcome], last: int) -> Result:
    histories = [outcome.history for outcome in outcomes]
    rows = [row.metrics for h in histories for row in h.rows if row.phase == "rl" and 0 <= h.last_step("rl") - row.step < last]
    updates = [m for m in rows if "timing_s/step" in m]
    drafting = [m for m in updates if "rollout/spec_drafted" in m]
    drafted, accepted = (int(sum(m[f"rollout/spec_{kind}"] for m in drafting)) for kind in ("drafted", "accepted"))
    wall = sum(m["timing_s/step"] for m in updates)
    busy = sum(m["timing_s/step"] * (1 - m["async/rollout_idle"]) for m in updates)
    tokens = sum(m["rollout/tokens_per_s"] * m["timing_s/step"] for m in updates)
    positions = sorted({name for m in drafting for name in m if name.startswith("rollout/spec_accept_rate_")})
    kind = "" if outcomes[0].draft_method == "probabilistic" else "_greedy"
    expected = [name.replace("rollout/spec_accept_rate_", f"mtp/expected_rate{kind}_") for name in positions]
    return Result(
        name=arm.name,
        meaning=arm.meaning,
        seeds=len(histories),
        updates=[outcome.updates for outcome in outcomes],
        updates_wanted=max(outcome.requested_updates for outcome in outcomes),
        drafted=drafted,
        accepted=accepted,
        acceptance=accepted / drafted if drafted else None,
        by_seed=[rate for h in histories if (rate := _acceptance(h, last)) is not None],
        by_position=[_weighted(drafting, name) for name in positions],
        expected_by_position=[_weighted(drafting, name) for name in expected if any(name in m for m in drafting)],
        accept_length=_weighted(drafting, "rollout/spec_accept_length") if drafted else None,
        held_out_acceptance=_ends([h.series("eval/spec_accept_rate", "rl") for h in histories], -1),
        tokens_per_s=tokens / wall if wall else 0.0,
        tokens_per_busy_s=tokens / busy if busy else 0.0,
        accuracy_before=_ends([h.series("eval/accuracy", "rl") for h in histories], 0),
        accuracy_after=_ends([h.series("eval/accuracy", "rl") for h in histories], -1),
    )


def _acceptance(history: History, last: int) -> float | None:
    begin = history.last_step("rl") - last
    drafted, accepted = (
        sum(v for step, v in history.series(f"rollout/spec_{kind}", "rl") if step > begin) for kind in ("drafted", "accepted")
    )
    return accepted / drafted if drafted else None


def _weighted(rows: list[dict[str, float]], name: str) -> float:
    """Mean of a metric over updates, weighted by their number of draft tokens."""
    weighted = [(m[name], m["rollout/spec_drafted"]) for m in rows if name in m]
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)


def _ends(series: list[list[tuple[int, float]]], which: int) -> float | None:
    values = [points[which][1] for points in series if points]
    return sum(values) / len(values) if values else None


def _share(value: float | None) -> str:
    return "–" if value is None else format_value(value, "share")


def _shares(values: list[float]) -> str:
    return ", ".join(_share(v) for v in values) or "–"
