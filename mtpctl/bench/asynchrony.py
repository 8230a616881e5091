"""`mtpctl bench async`: the same samples and updates on the same cards, from synchronous to asynchronous with a log-prob server.

What counts is the time until held-out accuracy reaches a fixed level, not only the time of an update: samples of older
weights may teach less. The level is the highest that every arm of a seed reaches, unless one is asked for, and the moment
is interpolated between the evaluations around it. So an arm that was cut short still counts: what it had reached is the level then.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

from mtpctl.bench.arms import Arm, Experiment, Outcome, share_of
from mtpctl.bench.mtp import mean_curve
from mtpctl.telemetry import History
from mtpctl.telemetry.charts import Chart, Phase, Points, Series, render_chart

_ALONE = "logprob.standalone=false"
SYNCHRONOUS = "synchronous"
OWN_RECOMPUTE = "partial"
BY_SERVER = "partial-server"
ARMS = (
    Arm(
        SYNCHRONOUS,
        "generate a batch, train on it, sync",
        ("async.staleness_threshold=0", "async.sync_every=1", "async.partial_rollout=false", _ALONE),
    ),
    Arm(
        "streaming",
        "a sync every 4 updates, nothing generated ahead",
        ("async.staleness_threshold=0", "async.sync_every=4", "async.partial_rollout=false", _ALONE),
    ),
    Arm("stale", "samples ahead by the recipe's threshold; a sync waits for those in flight", ("async.partial_rollout=false", _ALONE)),
    Arm(OWN_RECOMPUTE, "the same; responses in flight go on under new weights", ("async.partial_rollout=true", _ALONE)),
    Arm(BY_SERVER, "the same; old log-probs by the log-prob server", ("async.partial_rollout=true", "logprob.standalone=true")),
)
TIMER = "RL from its first update, all waiting and syncs included; evaluations excluded, and beside it with them"


@dataclass(frozen=True, slots=True)
class Result:
    """One arm with one seed. Times in seconds; `units` are whole GPUs, or CPU cores claimed where there are none."""

    name: str
    meaning: str
    seed: int
    units: float
    updates: int
    updates_wanted: int
    step_s: float
    old_logprob_s: float
    to_level_s: float | None
    to_level_with_evaluations_s: float | None
    accuracy_after: float
    overlap: float
    trainer_idle: float
    rollout_idle: float
    staleness: float


def evaluated(experiment: Experiment) -> Experiment:
    """With evaluations, from which the time to an accuracy is read: where the recipe has none, ten over RL."""
    train = experiment.load("probe", 0).train
    if train.eval_every:
        return experiment
    return replace(experiment, sets=[*experiment.sets, f"train.eval_every={max(1, train.rl.steps // 10)}"])


def summarise(outcomes: list[Outcome], level: float | None) -> tuple[list[Result], dict[int, float]]:
    """One result a run, and the accuracy that counts for each seed. Arms that were not evaluated after an update do not lower it."""
    levels: dict[int, float] = {}
    for seed in dict.fromkeys(o.seed for o in outcomes):
        curves = [accuracy(o.history) for o in outcomes if o.seed == seed]
        reached = [max(y for _, y in points) for points in curves if any(x > 0 for x, _ in points)]
        levels[seed] = min(reached, default=0.0) if level is None else level
    return [_result(outcome, levels[outcome.seed]) for outcome in outcomes], levels


def accuracy(history: History, *, evaluations: bool = False) -> Points:
    """(seconds since RL's first update began, held-out accuracy). `evaluations`: their own time counts too."""
    points: Points = []
    elapsed = 0.0
    for row in history.rows:
        if row.phase != "rl":
            continue
        elapsed += row.metrics.get("timing_s/step", 0.0)
        if "eval/accuracy" in row.metrics:
            points.append((elapsed, row.metrics["eval/accuracy"]))
            if evaluations and row.step > 0:
                elapsed += row.metrics.get("timing_s/evaluation", 0.0)
    return points


def time_to(points: Points, level: float) -> float | None:
    """Seconds until the curve first reaches `level`, on the line between the evaluations around it; None where it never does."""
    for i, (x, y) in enumerate(points):
        if y >= level:
            if i == 0:
                return x
            x0, y0 = points[i - 1]
            return x0 + (x - x0) * (level - y0) / (y - y0)
    return None


def table(results: list[Result], levels: dict[int, float]) -> str:
    """For a terminal, and for docs/benchmarks.md. Speed-ups are against the synchronous arm of the same seed."""
    lines = [
        "Held-out accuracy that counts: " + ", ".join(f"{100 * level:.1f}% (seed {seed})" for seed, level in levels.items()),
        "",
        "| arm | seed | GPUs or cores | updates | s an update | s to accuracy | with evaluations | speed-up | per unit | old log-probs, s "
        "| both busy | trainer idle | rollout idle | staleness | accuracy at the end |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = {r.seed: r for r in results if r.name == SYNCHRONOUS}
    for r in results:
        speedup = _speedup(base.get(r.seed), r)
        per_unit = "–" if speedup is None else f"{speedup * base[r.seed].units / r.units:.2f}x"
        lines.append(
            f"| {r.name} | {r.seed} | {r.units:g} | {share_of(r.updates, r.updates_wanted)} | {r.step_s:.2f} "
            f"| {_seconds(r.to_level_s)} | {_seconds(r.to_level_with_evaluations_s)} "
            f"| {'–' if speedup is None else f'{speedup:.2f}x'} | {per_unit} | {r.old_logprob_s:.2f} | {r.overlap:.0%} "
            f"| {r.trainer_idle:.0%} | {r.rollout_idle:.0%} | {r.staleness:.2f} | {r.accuracy_after:.1%} |"
        )
    for gain in server_gains(results):
        to_level = "" if gain.to_level is None else f", {gain.to_level:.2f}x to accuracy"
        ratios = f"{gain.update:.2f}x an update, {gain.update_per_unit:.2f}x per unit{to_level}"
        lines += ["", f"Log-prob server against own recompute (seed {gain.seed}): {ratios}"]
    return "\n".join(lines)


def best_speedup(results: list[Result]) -> float | None:
    """Mean over seeds of the best arm's time to accuracy against the synchronous arm's.

    An arm that never gets where the synchronous one does has won nothing there: 0. None where no synchronous arm got there.
    """
    base = {r.seed: r for r in results if r.name == SYNCHRONOUS and r.to_level_s}
    by_arm: dict[str, list[float]] = {}
    for r in results:
        if r.name == SYNCHRONOUS or r.seed not in base:
            continue
        found = 0.0 if r.to_level_s is None else _speedup(base[r.seed], r)
        if found is not None:
            by_arm.setdefault(r.name, []).append(found)
    return max((statistics.mean(values) for values in by_arm.values()), default=None)


@dataclass(frozen=True, slots=True)
class ServerGain:
    """What the log-prob server wins over the trainer's own recompute, for one seed: ratios of seconds an update and to the accuracy."""

    seed: int
    update: float
    update_per_unit: float
    to_level: float | None


def server_gains(results: list[Result]) -> list[ServerGain]:
    """One a seed in which both arms ran."""
    own = {r.seed: r for r in results if r.name == OWN_RECOMPUTE}
    gains = []
    for r in results:
        if r.name == BY_SERVER and (base := own.get(r.seed)):
            update = base.step_s / r.step_s
            gains.append(ServerGain(r.seed, update, update * base.units / r.units, _speedup(base, r)))
    return gains


def figures(outcomes: list[Outcome]) -> str:
    """Held-out accuracy over time and over updates, as HTML."""
    arms = list(dict.fromkeys(o.arm for o in outcomes))
    by_time = [Series(f"{o.arm.name} {o.seed}", accuracy(o.history), "share", True, arms.index(o.arm)) for o in outcomes]
    by_step = [Series(arm.name, mean_curve([o.history for o in outcomes if o.arm == arm], "eval/accuracy"), "share", True) for arm in arms]
    charts = []
    for title, note, counts, series in (
        ("Held-out accuracy over time", "of RL, evaluations excluded", "seconds", by_time),
        ("Held-out accuracy over updates", "the mean of the seeds", "step", by_step),
    ):
        end = max((x for s in series for x, _ in s.points), default=1)
        charts.append(render_chart(Chart(title, note, series, [Phase("rl", 0, end, 0)], counts=counts)))
    return f'<section class="charts">{"".join(charts)}</section>'


def as_json(results: list[Result], levels: dict[int, float], environment: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "bench": "async",
        "environment": environment,
        "timer": TIMER,
        "levels": levels,
        "best_speedup": best_speedup(results),
        "server_gains": [asdict(gain) for gain in server_gains(results)],
        "results": [asdict(r) for r in results],
    }


def _result(outcome: Outcome, level: float) -> Result:
    history, placement = outcome.history, outcome.placement
    rows = [row.metrics for row in history.rows if row.phase == "rl" and "timing_s/step" in row.metrics]

    def mean(name: str) -> float:
        values = [m[name] for m in rows if name in m]
        return statistics.mean(values) if values else 0.0

    without, with_evaluations = accuracy(history), accuracy(history, evaluations=True)
    return Result(
        name=outcome.arm.name,
        meaning=outcome.arm.meaning,
        seed=outcome.seed,
        units=placement.cards or placement.cpus,
        updates=outcome.updates,
        updates_wanted=outcome.wanted,
        step_s=statistics.median(m["timing_s/step"] for m in rows),
        old_logprob_s=mean("timing_s/old_log_prob"),
        to_level_s=time_to(without, level),
        to_level_with_evaluations_s=time_to(with_evaluations, level),
        accuracy_after=without[-1][1] if without else 0.0,
        overlap=mean("async/overlap"),
        trainer_idle=mean("async/trainer_idle"),
        rollout_idle=mean("async/rollout_idle"),
        staleness=mean("async/staleness_mean"),
    )


def _speedup(base: Result | None, result: Result) -> float | None:
    if base is None or not base.to_level_s or not result.to_level_s:
        return None
    return base.to_level_s / result.to_level_s


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"
