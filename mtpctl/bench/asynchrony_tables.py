"""The tables and charts of `mtpctl bench async`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtpctl.bench.arms import Outcome, share_of
from mtpctl.bench.asynchrony import (
    MARGIN,
    SYNCHRONOUS,
    Result,
    Spread,
    by_arm,
    by_seconds,
    by_updates,
    server_gains,
    speedup,
)
from mtpctl.telemetry.charts import Chart, Phase, Series, render_chart
from mtpctl.telemetry.summary import LATE, mean_curve

_WITHOUT_SERVER = {
    "recompute": "the trainer's own recompute",
    "behaviour": "the engine's own log-probs, where the trainer recomputes nothing",
}


def table(results: Sequence[Result], levels: dict[int, float], tolerance: float, *, asked: bool = False) -> str:
    """Tables of what the arms learned over their seeds, of each run, and of where its time went. `asked`: the user set the level."""
    parts = [_told(results, levels, tolerance, asked), _arms(results), _runs(results), _times(results)]
    for gain in server_gains(results):
        to_level = "" if gain.to_level is None else f", {gain.to_level:.2f}x to the held level"
        ratios = f"{gain.update:.2f}x an update, {gain.update_per_unit:.2f}x per unit{to_level}"
        parts.append(f"Log-prob server against {_WITHOUT_SERVER[gain.without]} (seed {gain.seed}): {ratios}")
    return "\n\n".join(parts)


def figures(outcomes: Sequence[Outcome]) -> str:
    """Held-out accuracy over time and over updates as HTML: each arm the mean of its seeds, and every seed a faint curve behind it."""
    arms = list(dict.fromkeys(o.arm for o in outcomes))
    charts = []
    for title, note, counts, curve_of in (
        ("Held-out accuracy over time", "of RL, evaluations excluded", "seconds", by_seconds),
        ("Held-out accuracy over updates", "of the same runs", "step", by_updates),
    ):
        series: list[Series] = []
        for colour, arm in enumerate(arms):
            curves = {o.seed: curve_of(o.history) for o in outcomes if o.arm == arm}
            if len(curves) > 1:
                series += [Series(f"{arm.name} {seed}", points, "share", colour=colour, style="faint") for seed, points in curves.items()]
            series.append(Series(arm.name, mean_curve(list(curves.values())), "share", True, colour))
        end = max((x for s in series for x, _ in s.points), default=1)
        seeds = len(dict.fromkeys(o.seed for o in outcomes))
        note += f"; the mean of {seeds} seeds, each of them faint" if seeds > 1 else ""
        charts.append(render_chart(Chart(title, note, series, [Phase("rl", 0, end, 0)], counts=counts)))
    return f'<section class="charts">{"".join(charts)}</section>'


def _told(results: Sequence[Result], levels: dict[int, float], tolerance: float, asked: bool) -> str:
    with_base = {r.seed for r in results if r.name == SYNCHRONOUS and r.late_mean is not None}
    said = []
    for seed, level in levels.items():
        whose = "" if asked else ", the synchronous arm's" if seed in with_base else ", the lowest arm's"
        said.append(f"{level:.1%} (seed {seed}{whose})")
    where = "as asked for" if asked else f"late means less {100 * MARGIN:g} points"
    return (
        f"Held-out accuracy. Late mean: of the last {LATE} evaluations. Worst fall: of an evaluation under the best one before it, in "
        "points. Area: mean height of the curve over the updates that all arms of a seed made. A level is held from where a run reaches "
        f"it if no later evaluation, of one at least, is more than {100 * tolerance:g} points below it.\n"
        f"Levels, {where}: {', '.join(said) or 'none, since no run was evaluated after an update'}."
    )


def _arms(results: Sequence[Result]) -> str:
    lines = [
        "| arm | seeds | start | late mean | over the start | against synchronous | best | worst fall | area | level held at update "
        "| after s | speed-up |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in by_arm(results):
        of = f"{arm.held} of {arm.seeds}: " if 0 < arm.held < arm.seeds else ""
        never = "never" if arm.late_mean is not None else "–"
        cells = [
            arm.name,
            str(arm.seeds),
            _spread(arm.start, _share),
            _spread(arm.late_mean, _share),
            _spread(arm.gain, _signed),
            "–" if arm.name == SYNCHRONOUS else _spread(arm.against, _signed),
            _spread(arm.best_accuracy, _share),
            _spread(arm.worst_fall, _points),
            _spread(arm.area, _share),
            of + _spread(arm.held_updates, _whole) if arm.held else never,
            of + _spread(arm.held_s, _seconds) if arm.held else never,
            _spread(arm.speedup, _times_x),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _runs(results: Sequence[Result]) -> str:
    lines = [
        "| arm | seed | updates | evaluations | start | late mean | over the start | best | worst fall | area | level held at update "
        "| after s | with evaluations | speed-up | per unit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = {r.seed: r for r in results if r.name == SYNCHRONOUS}
    for r in results:
        found = speedup(base.get(r.seed), r)
        per_unit = None if found is None else found * base[r.seed].units / r.units
        never = "never" if r.late_mean is not None else "–"
        cells = [
            r.name,
            str(r.seed),
            share_of(r.updates, r.updates_wanted),
            str(r.evaluations),
            _or_dash(r.start, _share),
            _or_dash(r.late_mean, _share),
            _or_dash(r.gain, _signed),
            _or_dash(r.best_accuracy, _share),
            _or_dash(r.worst_fall, _points),
            _or_dash(r.area, _share),
            _or_dash(r.held_updates, _whole, never),
            _or_dash(r.held_s, _seconds, never),
            _or_dash(r.held_with_evaluations_s, _seconds, never),
            _or_dash(found, _times_x),
            _or_dash(per_unit, _times_x),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(results: Sequence[Result]) -> str:
    lines = [
        "| arm | seed | GPUs or cores | s an update | old log-probs, s | both busy | trainer idle | rollout idle | staleness |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.seed} | {r.units:g} | {r.step_s:.2f} | {r.old_logprob_s:.2f} | {r.overlap:.0%} | {r.trainer_idle:.0%} "
        f"| {r.rollout_idle:.0%} | {r.staleness:.2f} |"
        for r in results
    ]
    return "\n".join(lines)


def _spread(spread: Spread | None, shown: Callable[[float], str]) -> str:
    """`79.4% (77.9% to 82.2%)`, or the figure alone where all seeds show the same."""
    if spread is None:
        return "–"
    least, most = shown(spread.least), shown(spread.most)
    return shown(spread.mean) + ("" if least == most else f" ({least} to {most})")


def _or_dash(value: float | None, shown: Callable[[float], str], without: str = "–") -> str:
    return without if value is None else shown(value)


def _share(value: float) -> str:
    return f"{value:.1%}"


def _points(value: float) -> str:
    return f"{100 * value:.1f}"


def _signed(value: float) -> str:
    """In points; what rounds to nothing is no loss."""
    return f"{round(100 * value, 1) + 0.0:+.1f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{value:.1f}"


def _times_x(value: float) -> str:
    return f"{value:.2f}x"
