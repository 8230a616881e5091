"""`mtpctl bench async`: one recipe with increasing asynchrony, from fully synchronous to partial rollouts with a log-prob server.

The time per update alone is misleading: stale samples may be less useful, and an unstable run may reach an accuracy early and lose it
again. So runs are evaluated every few updates. They are compared by the mean of their late evaluations, their worst fall, and the area
under their curve; and by the seconds and updates until they reach an accuracy (the level) and hold it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from mtpctl.bench.arms import Arm, Experiment, Outcome, format_updates
from mtpctl.bench.report import markdown_table
from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.summary import LATE_EVALUATIONS, Point, late_mean, mean_height, measure_curve, sustained_from

_WITHOUT_SERVER = "logprob.standalone=false"
SYNCHRONOUS, PARTIAL, PARTIAL_SERVER = "synchronous", "partial", "partial-server"
ARMS = (
    Arm(
        SYNCHRONOUS,
        "generate a batch, train on it, sync",
        ("async.staleness_threshold=0", "async.sync_every=1", "async.partial_rollout=false", _WITHOUT_SERVER),
    ),
    Arm(
        "streaming",
        "a sync every 4 updates, nothing generated ahead",
        ("async.staleness_threshold=0", "async.sync_every=4", "async.partial_rollout=false", _WITHOUT_SERVER),
    ),
    Arm(
        "stale",
        "samples generated ahead, up to the recipe's staleness threshold; a sync waits for responses in flight",
        ("async.partial_rollout=false", _WITHOUT_SERVER),
    ),
    Arm(PARTIAL, "the same; responses in flight continue under new weights", ("async.partial_rollout=true", _WITHOUT_SERVER)),
    Arm(PARTIAL_SERVER, "the same; old log-probs by the log-prob server", ("async.partial_rollout=true", "logprob.standalone=true")),
)
TIMED_WORK = (
    "RL from its first update, waiting and syncs included, evaluations excluded; the first update after an evaluation counts as the mean "
    "of the other updates before the next one. The wall time with evaluations is reported separately"
)
NUM_EVALUATIONS = 16
"""Number of evaluations during RL if the recipe sets none. There is at most one every two updates."""
LEVEL_MARGIN = 0.02
"""Distance of the default level below the synchronous arm's late mean. An arm within this margin counts as equally good."""
LEVEL_TOLERANCE = 0.03
"""How far evaluations may fall below a level after it was reached: about one standard error of 256 problems (2.5 points at 80%)."""


Format = Callable[[float], str]


def _format_points(value: float) -> str:
    return f"{100 * value:.1f}"


def _format_signed_points(value: float) -> str:
    """Format a difference in percentage points, without a minus sign if it rounds to zero."""
    return f"{round(100 * value, 1) + 0.0:+.1f}"


LEARNING_FIGURES: dict[str, tuple[str, Format]] = {
    "start": ("start", "{:.1%}".format),
    "late_mean": ("late mean", "{:.1%}".format),
    "gain": ("over the start", _format_signed_points),
    "best_accuracy": ("best", "{:.1%}".format),
    "worst_fall": ("worst fall", _format_points),
    "area": ("area", "{:.1%}".format),
    "held_updates": ("level held at update", "{:.0f}".format),
    "held_s": ("after s", "{:.1f}".format),
}
"""Figures about learning, with their headings and formats."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out accuracy after `update` updates, and the seconds of RL before it, excluding and including earlier evaluations."""

    update: int
    seconds: float
    seconds_with_evaluations: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Result:
    """One arm with one seed. Accuracies are fractions, times are in seconds, and `units` are GPUs, or CPU cores without GPUs.

    The fields from `start` to `area` are None if there is no evaluation after an update; `held_*` are None if the run never holds the level
    of its seed.
    `evaluations` excludes the first one, before RL. `gain` is the late mean minus the start. `area` is the mean accuracy over the updates
    that all runs of the seed completed.
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
    """Mean, minimum and maximum of a figure over seeds."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float | None]) -> Spread | None:
        """The spread over the seeds that have the figure; None if no seed has it."""
        values = [value for value in figures if value is not None]
        return cls(statistics.mean(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over its seeds. held: number of seeds that hold their level.

    spreads: the figures of `LEARNING_FIGURES`; `against`, the late mean minus that of the synchronous arm with the same seed; and
    `speedup`, the result of `compute_speedup` over the synchronous arm.
    """

    name: str
    meaning: str
    seeds: int
    held: int
    spreads: dict[str, Spread | None]


@dataclass(frozen=True, slots=True)
class ServerGain:
    """Speed-up by the log-prob server for one seed: ratios of the seconds per update, and of the seconds to the held level.

    without: the source of old log-probs in the arm without the server. With `recompute`, the server relieves the trainer of this work; with
    `behaviour`, that arm uses the engine's log-probs, and the server saves no time.
    """

    seed: int
    without: Literal["recompute", "behaviour"]
    update: float
    update_per_unit: float
    to_level: float | None


def with_evaluations(experiment: Experiment) -> Experiment:
    """Make training wait for evaluations, and add one every few updates if the recipe has none.

    Because training waits, an accuracy belongs to one weight version, and the time of evaluations can be excluded.
    """
    train = experiment.load("probe", 0).train
    sets = [*experiment.sets, "evaluation.wait=true"]
    if not train.eval_every:
        sets.append(f"train.eval_every={max(2, train.rl.steps // NUM_EVALUATIONS)}")
    return replace(experiment, sets=sets)


def extract_evaluations(history: History) -> list[Evaluation]:
    """The evaluations of RL in order of updates, without those whose accuracy is not finite.

    Rollouts continue during an evaluation, so the next update uses samples whose generation time was not counted. The time of that update
    is replaced by the mean time of the other updates before the next evaluation, if there are any.
    """
    evaluations = []
    update_seconds = evaluation_seconds = seconds = 0.0
    update_times: list[float] = []
    follows_evaluation = False
    for row in history.rows:
        if row.phase != "rl":
            continue
        if "timing_s/step" in row.metrics:
            update_times.append(row.metrics["timing_s/step"])
            update_seconds += update_times[-1]
        if "eval/accuracy" not in row.metrics:
            continue
        seconds += (
            sum(update_times[1:]) * len(update_times) / (len(update_times) - 1)
            if follows_evaluation and len(update_times) > 1
            else sum(update_times)
        )
        # The first evaluation is before RL, when nothing is generated, so the update after it needs no correction.
        follows_evaluation, update_times = row.step > 0, []
        if math.isfinite(row.metrics["eval/accuracy"]):
            evaluations.append(Evaluation(row.step, seconds, update_seconds + evaluation_seconds, row.metrics["eval/accuracy"]))
        if row.step > 0:
            evaluation_seconds += row.metrics.get("timing_s/evaluation", 0.0)
    return evaluations


def curve_by_updates(history: History) -> list[Point]:
    """The learning curve by updates: (updates, held-out accuracy)."""
    return [(float(evaluation.update), evaluation.accuracy) for evaluation in extract_evaluations(history)]


def curve_by_seconds(history: History) -> list[Point]:
    """The learning curve by time: (seconds since RL began, without evaluations; held-out accuracy)."""
    return [(evaluation.seconds, evaluation.accuracy) for evaluation in extract_evaluations(history)]


def summarize(
    outcomes: Sequence[Outcome], level: float | None = None, tolerance: float = LEVEL_TOLERANCE
) -> tuple[list[Result], dict[int, float]]:
    """One result for each run, and the level of each seed: `level` if given, else the `default_level`."""
    results: list[Result] = []
    level_by_seed: dict[int, float] = {}
    for seed in dict.fromkeys(o.seed for o in outcomes):
        runs = [o for o in outcomes if o.seed == seed]
        seed_level = default_level(runs) if level is None else level
        if seed_level is not None:
            level_by_seed[seed] = seed_level
        curves = [points for o in runs if len(points := curve_by_updates(o.history)) > 1]
        last_update = min((points[-1][0] for points in curves), default=0.0)
        results += [_make_result(outcome, seed_level, tolerance, last_update) for outcome in runs]
    return results, level_by_seed


def default_level(outcomes: Sequence[Outcome]) -> float | None:
    """The level of one seed: the late mean of the synchronous arm, or without that arm the lowest late mean, minus `LEVEL_MARGIN`.

    Ignores arms without an evaluation after an update. None if no arm has one.
    """
    means = {o.arm.name: late_mean(points) for o in outcomes if len(points := curve_by_updates(o.history)) > 1}
    reference = means.get(SYNCHRONOUS, min(means.values(), default=None))
    return None if reference is None else reference - LEVEL_MARGIN


def _make_result(outcome: Outcome, level: float | None, tolerance: float, last_update: float) -> Result:
    history, placement = outcome.history, outcome.placement
    rows = [row.metrics for row in history.rows if row.phase == "rl" and "timing_s/step" in row.metrics]
    evaluations, curve = extract_evaluations(history), curve_by_updates(history)
    measures = measure_curve(curve)
    worst_fall = measures.worst_fall if measures else None

    def mean(name: str) -> float:
        values = [m[name] for m in rows if name in m]
        return statistics.mean(values) if values else 0.0

    def time_to_hold(points: list[Point]) -> float | None:
        return None if level is None else sustained_from(points, level, tolerance)

    return Result(
        name=outcome.arm.name,
        meaning=outcome.arm.meaning,
        seed=outcome.seed,
        units=placement.gpu_count or placement.cpus,
        updates=outcome.updates,
        updates_wanted=outcome.requested_updates,
        evaluations=max(0, len(evaluations) - 1),
        start=measures.start if measures else None,
        late_mean=measures.late_mean if measures else None,
        gain=measures.late_mean - measures.start if measures else None,
        best_accuracy=measures.best[1] if measures else None,
        worst_fall=(worst_fall.size if worst_fall else 0.0) if measures else None,
        area=mean_height(curve, last_update) if measures else None,
        held_updates=time_to_hold(curve),
        held_s=time_to_hold(curve_by_seconds(history)),
        held_with_evaluations_s=time_to_hold([(evaluation.seconds_with_evaluations, evaluation.accuracy) for evaluation in evaluations]),
        accuracy_after=evaluations[-1].accuracy if evaluations else None,
        step_s=statistics.median(m["timing_s/step"] for m in rows),
        old_logprob_s=mean("timing_s/old_log_prob"),
        old_logprobs=outcome.old_logprobs,
        overlap=mean("async/overlap"),
        trainer_idle=mean("async/trainer_idle"),
        rollout_idle=mean("async/rollout_idle"),
        staleness=mean("async/staleness_mean"),
    )


def _synchronous_by_seed(results: Sequence[Result]) -> dict[int, Result]:
    return {r.seed: r for r in results if r.name == SYNCHRONOUS}


def summarize_arms(results: Sequence[Result]) -> list[ArmSummary]:
    """Summarize each arm over its seeds, in the order of the results."""
    synchronous = _synchronous_by_seed(results)

    def against_synchronous(result: Result) -> float | None:
        baseline = synchronous.get(result.seed)
        return None if baseline is None or baseline.late_mean is None or result.late_mean is None else result.late_mean - baseline.late_mean

    summaries = []
    for name in dict.fromkeys(r.name for r in results):
        runs = [r for r in results if r.name == name]
        spreads = {figure: Spread.of([getattr(r, figure) for r in runs]) for figure in LEARNING_FIGURES}
        spreads["against"] = Spread.of([against_synchronous(r) for r in runs])
        spreads["speedup"] = Spread.of([compute_speedup(synchronous.get(r.seed), r) for r in runs])
        summaries.append(ArmSummary(name, runs[0].meaning, len(runs), sum(r.held_s is not None for r in runs), spreads))
    return summaries


def compute_speedup(base: Result | None, result: Result) -> float | None:
    """The base's seconds to the held level, divided by the result's; 0 if the result never holds the level.

    None if there is no base, if the base never holds the level, or if the base or the result holds it from the start.
    """
    if base is None or not base.held_s:
        return None
    if result.held_s is None:
        return 0.0
    return base.held_s / result.held_s if result.held_s else None


def find_best_speedup(results: Sequence[Result]) -> float | None:
    """The highest mean speed-up of an arm over the synchronous one. None if no arm has a speed-up (see `compute_speedup`)."""
    speedups = [value.mean for arm in summarize_arms(results) if arm.name != SYNCHRONOUS and (value := arm.spreads["speedup"])]
    return max(speedups, default=None)


def compute_server_gains(results: Sequence[Result]) -> list[ServerGain]:
    """The gain for each seed with which both arms ran."""
    baselines = {result.seed: result for result in results if result.name == PARTIAL}
    gains = []
    for result in results:
        if result.name == PARTIAL_SERVER and (base := baselines.get(result.seed)):
            update = base.step_s / result.step_s
            gains.append(
                ServerGain(result.seed, base.old_logprobs, update, update * base.units / result.units, compute_speedup(base, result))
            )
    return gains


def to_document(
    outcomes: Sequence[Outcome],
    results: Sequence[Result],
    level_by_seed: dict[int, float],
    tolerance: float,
    environment: Mapping[str, str],
) -> dict[str, object]:
    return {
        "bench": "async",
        "environment": environment,
        "timer": TIMED_WORK,
        "late_evaluations": LATE_EVALUATIONS,
        "levels": level_by_seed,
        "tolerance": tolerance,
        "best_speedup": find_best_speedup(results),
        "server_gains": [asdict(gain) for gain in compute_server_gains(results)],
        "arms": [(fields := asdict(arm)) | fields.pop("spreads") for arm in summarize_arms(results)],
        "results": [asdict(r) for r in results],
        "curves": [{"name": o.arm.name, "seed": o.seed, "points": [asdict(e) for e in extract_evaluations(o.history)]} for o in outcomes],
    }


def _format_figure(figure: float | Spread | None, format_value: Format, placeholder: str = "–") -> str:
    """Format a figure as `79.4% (77.9% to 82.2%)`, or as its mean if minimum and maximum look the same."""
    if figure is None:
        return placeholder
    if not isinstance(figure, Spread):
        return format_value(figure)
    minimum, maximum = format_value(figure.least), format_value(figure.most)
    return format_value(figure.mean) + ("" if minimum == maximum else f" ({minimum} to {maximum})")


def format_table(results: Sequence[Result], level_by_seed: dict[int, float], tolerance: float, *, is_level_given: bool = False) -> str:
    """Three tables: arms over seeds, learning of each run, and time of each run. `is_level_given`: whether the user set the level."""
    synchronous = _synchronous_by_seed(results)
    ratio: Format = "{:.2f}x".format
    headings = [heading for heading, _ in LEARNING_FIGURES.values()]
    arm_rows = []
    for arm in summarize_arms(results):
        never = "–" if arm.spreads["late_mean"] is None else "never"
        cells = [
            _format_figure(arm.spreads[figure], formatter, never if figure.startswith("held") else "–")
            for figure, (_, formatter) in LEARNING_FIGURES.items()
        ]
        against_synchronous = "–" if arm.name == SYNCHRONOUS else _format_figure(arm.spreads["against"], _format_signed_points)
        arm_rows.append(
            [arm.name, arm.seeds, *cells, f"{arm.held} of {arm.seeds}", against_synchronous, _format_figure(arm.spreads["speedup"], ratio)]
        )
    run_rows, time_rows = [], []
    for r in results:
        never = "–" if r.late_mean is None else "never"
        cells = [
            _format_figure(getattr(r, figure), formatter, never if figure.startswith("held") else "–")
            for figure, (_, formatter) in LEARNING_FIGURES.items()
        ]
        with_evaluations = _format_figure(r.held_with_evaluations_s, "{:.1f}".format, never)
        speedup = compute_speedup(synchronous.get(r.seed), r)
        per_unit = None if speedup is None else speedup * synchronous[r.seed].units / r.units
        updates = format_updates(r.updates, r.updates_wanted)
        run_rows.append(
            [
                r.name,
                r.seed,
                updates,
                r.evaluations,
                *cells,
                with_evaluations,
                _format_figure(speedup, ratio),
                _format_figure(per_unit, ratio),
            ]
        )
        shares = [f"{share:.0%}" for share in (r.overlap, r.trainer_idle, r.rollout_idle)]
        time_rows.append([r.name, r.seed, f"{r.units:g}", f"{r.step_s:.2f}", f"{r.old_logprob_s:.2f}", *shares, f"{r.staleness:.2f}"])
    idle_headings = ("both busy", "trainer idle", "rollout idle", "staleness")
    sections = [
        _format_legend(results, level_by_seed, tolerance, is_level_given),
        markdown_table(("arm", "seeds", *headings, "held by", "against synchronous", "speed-up"), arm_rows),
        markdown_table(("arm", "seed", "updates", "evaluations", *headings, "with evaluations", "speed-up", "per unit"), run_rows),
        markdown_table(("arm", "seed", "GPUs or cores", "s an update", "old log-probs, s", *idle_headings), time_rows),
    ]
    sources = {
        "recompute": "the trainer's own recompute",
        "behaviour": "the engine's own log-probs, where the trainer recomputes nothing",
    }
    for gain in compute_server_gains(results):
        to_level = "" if gain.to_level is None else f", {gain.to_level:.2f}x to the held level"
        ratios = f"{gain.update:.2f}x an update, {gain.update_per_unit:.2f}x per unit{to_level}"
        sections.append(f"Log-prob server against {sources[gain.without]} (seed {gain.seed}): {ratios}")
    return "\n\n".join(sections)


def _format_legend(results: Sequence[Result], level_by_seed: dict[int, float], tolerance: float, is_level_given: bool) -> str:
    seeds_with_synchronous = {seed for seed, r in _synchronous_by_seed(results).items() if r.late_mean is not None}
    level_texts = []
    for seed, level in level_by_seed.items():
        source = "" if is_level_given else ", the synchronous arm's" if seed in seeds_with_synchronous else ", the lowest arm's"
        level_texts.append(f"{level:.1%} (seed {seed}{source})")
    origin = "as given" if is_level_given else f"late means minus {100 * LEVEL_MARGIN:g} points"
    return (
        f"Held-out accuracy. Late mean: of the last {LATE_EVALUATIONS} evaluations. Worst fall: of an evaluation under the best one before "
        "it, in points. Area: mean height of the curve over the updates that all arms of a seed completed. A run holds a level from the "
        f"first evaluation that reaches it, if there are later ones and none of them is more than {100 * tolerance:g} points below it.\n"
        f"Levels, {origin}: {', '.join(level_texts) or 'none, since no run was evaluated after an update'}."
    )
