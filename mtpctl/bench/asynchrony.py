"""`mtpctl bench async`: the same samples and updates on the same cards, from synchronous to asynchronous with a log-prob server.

Arms are compared by how well they learn and how soon they hold an accuracy. The time of an update would not do: samples of older weights
may teach less, or let the accuracy swing, so that a run reaches a level early and loses it again. Each run is evaluated every few updates;
the measures are the mean of its late evaluations, its worst fall, the area under its curve, and the seconds and updates until it holds a
level.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from mtpctl.bench.arms import Arm, Experiment, Outcome
from mtpctl.telemetry.history import History
from mtpctl.telemetry.summary import LATE, Point, area, held_at, late_mean, measure

_ALONE = "logprob.standalone=false"
SYNCHRONOUS = "synchronous"
WITHOUT_SERVER = "partial"
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
    Arm(WITHOUT_SERVER, "the same; responses in flight go on under new weights", ("async.partial_rollout=true", _ALONE)),
    Arm(BY_SERVER, "the same; old log-probs by the log-prob server", ("async.partial_rollout=true", "logprob.standalone=true")),
)
TIMER = (
    "RL from its first update, all waiting and syncs included; evaluations excluded, an update after one counting as the mean of the "
    "others until the next, and beside it the wall time with them"
)
EVALUATIONS = 16
"""Evaluations during RL where the recipe asks for none, at most one every two updates. The late ones are then the last quarter."""
MARGIN = 0.02
"""How far the default level is below the synchronous arm's late mean; an arm within the margin has learned as much."""
TOLERANCE = 0.03
"""How far below a held level a later evaluation may lie: about one standard error of 256 problems (2.5 points at 80%)."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out accuracy after `update` updates; `seconds` of RL before it, without and with the time of earlier evaluations."""

    update: int
    seconds: float
    seconds_with_evaluations: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Result:
    """One arm with one seed. Accuracies are shares of 1, times in seconds; `units` are whole GPUs, or CPU cores without GPUs.

    `start` to `area` are None for a run without an evaluation after an update, `held_*` for one that never holds the seed's level.
    `evaluations` does not count the first. `gain` is the late mean less the start. `area` is the curve's mean height over the updates that
    all runs of the seed made.
    """

    name: str
    meaning: str
    seed: int
    units: float
    updates: int
    updates_wanted: int
    evaluations: int
    start: float | None
    late_mean: float | None
    gain: float | None
    best_accuracy: float | None
    worst_fall: float | None
    area: float | None
    held_updates: float | None
    held_s: float | None
    held_with_evaluations_s: float | None
    accuracy_after: float | None
    step_s: float
    old_logprob_s: float
    old_logprobs: Literal["recompute", "behaviour"]
    overlap: float
    trainer_idle: float
    rollout_idle: float
    staleness: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds: its mean, least and most."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over its seeds. `held` counts the seeds that held their level, and `held_*` are over these alone.

    `against` is the late mean less the synchronous arm's of the same seed. The speed-up of a seed is 0 where the synchronous arm holds
    the level and this one never does. A figure that no seed has is None.
    """

    name: str
    meaning: str
    seeds: int
    start: Spread | None
    late_mean: Spread | None
    gain: Spread | None
    against: Spread | None
    best_accuracy: Spread | None
    worst_fall: Spread | None
    area: Spread | None
    held: int
    held_updates: Spread | None
    held_s: Spread | None
    speedup: Spread | None


def evaluated(experiment: Experiment) -> Experiment:
    """The experiment with an evaluation every few updates, where the recipe has none.

    Training waits for each, so that an accuracy is of one version and the time of evaluations can be left out.
    """
    train = experiment.load("probe", 0).train
    sets = [*experiment.sets, "evaluation.wait=true"]
    if not train.eval_every:
        sets.append(f"train.eval_every={max(2, train.rl.steps // EVALUATIONS)}")
    return replace(experiment, sets=sets)


def evaluations_of(history: History) -> list[Evaluation]:
    """Every evaluation of RL in the order of updates, without those whose accuracy is not finite.

    Rollouts continue during an evaluation, so the update after it finds samples whose time was not counted. Its time is replaced by the
    mean of the other updates until the next evaluation, where there are others.
    """
    found = []
    clock = evaluating = seconds = 0.0
    times: list[float] = []
    beside = False
    for row in history.rows:
        if row.phase != "rl":
            continue
        if "timing_s/step" in row.metrics:
            times.append(row.metrics["timing_s/step"])
            clock += times[-1]
        if "eval/accuracy" not in row.metrics:
            continue
        seconds += sum(times[1:]) * len(times) / (len(times) - 1) if beside and len(times) > 1 else sum(times)
        # Nothing is generated during the first evaluation, before RL, so the update after it waits as any other.
        beside, times = row.step > 0, []
        if math.isfinite(row.metrics["eval/accuracy"]):
            found.append(Evaluation(row.step, seconds, clock + evaluating, row.metrics["eval/accuracy"]))
        if row.step > 0:
            evaluating += row.metrics.get("timing_s/evaluation", 0.0)
    return found


def by_updates(history: History) -> list[Point]:
    """(updates, held-out accuracy)."""
    return [(float(e.update), e.accuracy) for e in evaluations_of(history)]


def by_seconds(history: History) -> list[Point]:
    """(seconds since RL's first update began, held-out accuracy), evaluations excluded."""
    return [(e.seconds, e.accuracy) for e in evaluations_of(history)]


def summarise(
    outcomes: Sequence[Outcome], level: float | None = None, tolerance: float = TOLERANCE
) -> tuple[list[Result], dict[int, float]]:
    """One result for each run, and the accuracy to hold for each seed: `level`, or else the `default_level`."""
    results: list[Result] = []
    levels: dict[int, float] = {}
    for seed in dict.fromkeys(o.seed for o in outcomes):
        runs = [o for o in outcomes if o.seed == seed]
        counts = default_level(runs) if level is None else level
        if counts is not None:
            levels[seed] = counts
        learned = [points for o in runs if len(points := by_updates(o.history)) > 1]
        end = min((points[-1][0] for points in learned), default=0.0)
        results += [_result(outcome, counts, tolerance, end) for outcome in runs]
    return results, levels


def default_level(outcomes: Sequence[Outcome]) -> float | None:
    """The level of one seed: the synchronous arm's late mean less `MARGIN`; without that arm, the lowest late mean less `MARGIN`.

    Arms without an evaluation after an update do not count; None where no arm has one.
    """
    means = {o.arm.name: late_mean(points) for o in outcomes if len(points := by_updates(o.history)) > 1}
    found = means.get(SYNCHRONOUS, min(means.values(), default=None))
    return None if found is None else found - MARGIN


def by_arm(results: Sequence[Result]) -> list[ArmSummary]:
    base = {r.seed: r for r in results if r.name == SYNCHRONOUS}

    def against(result: Result) -> float | None:
        other = base.get(result.seed)
        return None if other is None or other.late_mean is None or result.late_mean is None else result.late_mean - other.late_mean

    def of(runs: list[Result]) -> ArmSummary:
        def over(figure: Callable[[Result], float | None]) -> Spread | None:
            values = [value for r in runs if (value := figure(r)) is not None]
            return Spread(statistics.mean(values), min(values), max(values)) if values else None

        return ArmSummary(
            name=runs[0].name,
            meaning=runs[0].meaning,
            seeds=len(runs),
            start=over(lambda r: r.start),
            late_mean=over(lambda r: r.late_mean),
            gain=over(lambda r: r.gain),
            against=over(against),
            best_accuracy=over(lambda r: r.best_accuracy),
            worst_fall=over(lambda r: r.worst_fall),
            area=over(lambda r: r.area),
            held=sum(r.held_s is not None for r in runs),
            held_updates=over(lambda r: r.held_updates),
            held_s=over(lambda r: r.held_s),
            speedup=over(lambda r: speedup(base.get(r.seed), r)),
        )

    return [of([r for r in results if r.name == name]) for name in dict.fromkeys(r.name for r in results)]


def speedup(base: Result | None, result: Result) -> float | None:
    """Seconds to the held level, the synchronous arm's over this one's; 0 where this one never holds it.

    None, since not defined, where the synchronous arm never holds it or starts above it.
    """
    if base is None or not base.held_s:
        return None
    if result.held_s is None:
        return 0.0
    return base.held_s / result.held_s if result.held_s else None


def best_speedup(results: Sequence[Result]) -> float | None:
    """The best arm's mean speed-up over seeds against the synchronous one. None where no synchronous arm held its level."""
    found = [arm.speedup.mean for arm in by_arm(results) if arm.name != SYNCHRONOUS and arm.speedup is not None]
    return max(found, default=None)


@dataclass(frozen=True, slots=True)
class ServerGain:
    """The arm with the log-prob server against the same without it, for one seed: ratios of seconds an update and to the held level.

    `without`: old log-probs of the arm without the server. With `recompute` its trainer does the work that the server saves; with
    `behaviour` it takes the engine's own, and the server saves nothing.
    """

    seed: int
    without: Literal["recompute", "behaviour"]
    update: float
    update_per_unit: float
    to_level: float | None


def server_gains(results: Sequence[Result]) -> list[ServerGain]:
    """One for each seed in which both arms ran."""
    without = {r.seed: r for r in results if r.name == WITHOUT_SERVER}
    gains = []
    for r in results:
        if r.name == BY_SERVER and (base := without.get(r.seed)):
            update = base.step_s / r.step_s
            gains.append(ServerGain(r.seed, base.old_logprobs, update, update * base.units / r.units, speedup(base, r)))
    return gains


def as_json(
    outcomes: Sequence[Outcome], results: Sequence[Result], levels: dict[int, float], tolerance: float, environment: Mapping[str, str]
) -> dict[str, object]:
    return {
        "bench": "async",
        "environment": environment,
        "timer": TIMER,
        "late_evaluations": LATE,
        "levels": levels,
        "tolerance": tolerance,
        "best_speedup": best_speedup(results),
        "server_gains": [asdict(gain) for gain in server_gains(results)],
        "arms": [asdict(arm) for arm in by_arm(results)],
        "results": [asdict(r) for r in results],
        "curves": [{"name": o.arm.name, "seed": o.seed, "points": [asdict(e) for e in evaluations_of(o.history)]} for o in outcomes],
    }


def _result(outcome: Outcome, level: float | None, tolerance: float, end: float) -> Result:
    history, placement = outcome.history, outcome.placement
    rows = [row.metrics for row in history.rows if row.phase == "rl" and "timing_s/step" in row.metrics]

    def mean(name: str) -> float:
        values = [m[name] for m in rows if name in m]
        return statistics.mean(values) if values else 0.0

    found = evaluations_of(history)
    updates = by_updates(history)
    measures = measure(updates)
    fall = measures.worst_fall if measures else None

    def held(points: list[Point]) -> float | None:
        return None if level is None else held_at(points, level, tolerance)

    return Result(
        name=outcome.arm.name,
        meaning=outcome.arm.meaning,
        seed=outcome.seed,
        units=placement.cards or placement.cpus,
        updates=outcome.updates,
        updates_wanted=outcome.wanted,
        evaluations=max(0, len(found) - 1),
        start=measures.start if measures else None,
        late_mean=measures.late_mean if measures else None,
        gain=measures.late_mean - measures.start if measures else None,
        best_accuracy=measures.best[1] if measures else None,
        worst_fall=(fall.size if fall else 0.0) if measures else None,
        area=area(updates, end) if measures else None,
        held_updates=held(updates),
        held_s=held([(e.seconds, e.accuracy) for e in found]),
        held_with_evaluations_s=held([(e.seconds_with_evaluations, e.accuracy) for e in found]),
        accuracy_after=found[-1].accuracy if found else None,
        step_s=statistics.median(m["timing_s/step"] for m in rows),
        old_logprob_s=mean("timing_s/old_log_prob"),
        old_logprobs=outcome.old_logprobs,
        overlap=mean("async/overlap"),
        trainer_idle=mean("async/trainer_idle"),
        rollout_idle=mean("async/rollout_idle"),
        staleness=mean("async/staleness_mean"),
    )
