"""`report.html`: the curves, tables and recipe of a run as one self-contained HTML page without scripts.

`compare.html` shows several runs on one page, with overlaid curves and the differences of their recipes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any, Literal

import yaml

from mtpctl.errors import UserError
from mtpctl.recipe.loading import flatten
from mtpctl.telemetry.charts import NUM_COLORS, Chart, Phase, Points, Series, page, render_chart, sparkline_svg, write_page
from mtpctl.telemetry.metrics_file import History, load_history
from mtpctl.telemetry.names import describe, format_duration, format_value
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.sample_log import read_samples, samples_section
from mtpctl.telemetry.summary import before_and_after, best_so_far, evaluation_summary, evaluations, late_mean, late_points, worst_fall


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """The metrics of a chart, and their presentation. A name that ends with `*` matches all metrics with this prefix."""

    title: str
    note: str
    names: tuple[str, ...]
    scale: Literal["linear", "log"] = "linear"
    from_zero: bool = False
    stack: bool = False
    phases: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


Document = Mapping[str, Any]
"""A parsed YAML or JSON file of the run."""

CHARTS = (
    ChartSpec(
        "Reward",
        "mean over the batch, and over all groups including those dropped by dynamic sampling",
        ("reward/mean", "reward/unfiltered_mean"),
        phases=("rl",),
        labels={"reward/mean": "batch", "reward/unfiltered_mean": "unfiltered"},
    ),
    ChartSpec(
        "Draft acceptance",
        "accepted MTP drafts in generation, and greedy agreement in training",
        ("rollout/spec_accept_rate", "mtp/accept_*"),
        labels={"rollout/spec_accept_rate": "generating", "mtp/accept_1": "training"},
    ),
    ChartSpec("Supervised loss", "nats per token, logarithmic", ("sft/loss",), scale="log"),
    ChartSpec("MTP loss", "nats per token, by depth, logarithmic", ("mtp/loss_*",), scale="log"),
    ChartSpec("Entropy", "of the policy at response tokens, nats", ("actor/entropy",), from_zero=True),
    ChartSpec(
        "Mismatch",
        "trainer against rollout on the same tokens, nats, logarithmic",
        ("rollout_corr/abs_diff", "rollout_corr/k3", "rollout_corr/abs_diff_same_version", "rollout_corr/abs_diff_stale_kv"),
        scale="log",
    ),
    ChartSpec(
        "Staleness", "weight versions between sampling and training", ("async/staleness_max", "async/staleness_mean"), from_zero=True
    ),
    ChartSpec(
        "Throughput",
        "tokens per second of trainer and rollout",
        ("perf/tokens_per_s", "rollout/tokens_per_s"),
        from_zero=True,
        phases=("rl",),
    ),
    ChartSpec("Time of an update", "seconds, stacked", ("timing_s/*",), stack=True, phases=("rl",)),
    ChartSpec(
        "Busy and idle",
        "share of the time; overlap: trainer and rollout are both busy, the higher the better",
        ("async/overlap", "async/trainer_idle", "async/rollout_idle"),
        from_zero=True,
    ),
    ChartSpec("Response length", "tokens, mean over the batch", ("response/length_mean",), labels={"response/length_mean": "length"}),
    ChartSpec("Gradient norms", "before clipping", ("actor/grad_norm", "mtp/grad_norm"), from_zero=True),
    ChartSpec(
        "Weight sync", "total seconds, and seconds in which generation stalls", ("sync/seconds", "sync/stall_seconds"), from_zero=True
    ),
    ChartSpec("Groups with signal", "share of groups whose rewards differ", ("reward/signal_fraction",), from_zero=True),
)

_UNSTACKED_TIMINGS = {"timing_s/step", "timing_s/evaluation", "timing_s/reward", "timing_s/logprob_server"}
"""Timings that the stacked chart leaves out: the total of an update, the evaluation between updates, and concurrent work."""
_TIME_WEIGHTED = {"async/overlap", "rollout/tokens_per_s"}
"""Shares and rates over a step's time. Their means are weighted by that time."""
_MAX_STACKED = 6
"""Maximum number of series in a stacked chart."""


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run, by default as `report.html` in its directory. Returns its path.

    Raises UserError if there is no such directory, it has no metrics yet or damaged files, or the page cannot be written.
    """
    run = RunDirectory(run_dir)
    history = read_history(run, "start the run first")
    target = run.report if out is None else Path(out)
    write_page(target, render_report(run, history))
    return target


def read_history(run: RunDirectory, fix: str) -> History:
    """The metrics of a run. Raises UserError if there is no such directory, or it has no metrics yet (`fix` is the hint for that)."""
    if not run.path.is_dir():
        raise UserError(f"RUN: no directory {run.path}; name a run directory")
    history = load_history(run.path)
    if not history.rows:
        raise UserError(f"RUN: {run.path} has no metrics yet; {fix}")
    return history


def render_report(run: RunDirectory, history: History) -> str:
    """The HTML text of the page."""
    recipe_text, recipe = read_document(run.recipe, yaml.safe_load)
    _, versions = read_document(run.versions, json.loads)
    name = str(recipe.get("name", run.path.name))
    charts = [_held_out(history), *(_chart(spec, history) for spec in CHARTS)]
    body = "".join(
        (
            f'<section class="tiles">{_tiles(history)}</section>',
            f'<section class="charts">{"".join(render_chart(chart) for chart in charts if chart)}</section>',
            _before_after(history),
            _resumes(history),
            samples_section(read_samples(run.path)),
            _all_metrics(history),
            _events(history),
            _recipe(recipe_text),
            _versions(versions),
        )
    )
    return page(name, " · ".join(_subtitle(recipe, history)), body, run.path.name)


def read_document(path: Path, parse: Callable[[str], object]) -> tuple[str, Document]:
    """Text and content of a file of the run; both empty if there is no file. Raises UserError if it cannot be read or has no mapping."""
    if not path.exists():
        return "", {}
    try:
        text = path.read_text(encoding="utf-8")
        content = parse(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]}); fix or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a mapping of keys to values; fix or remove it")
    return text, content


def _subtitle(recipe: Document, history: History) -> list[str]:
    parts = history.phase_lengths
    rollout = recipe.get("rollout") or {}
    if "engine" in rollout:
        drafts = (rollout.get("speculation") or {}).get("num_tokens")
        parts.append(rollout["engine"] + (f", {drafts} draft token{'s' * (drafts != 1)} a step" if drafts else ""))
    if "seed" in recipe:
        parts.append(f"seed {recipe['seed']}")
    parts.append(format_duration(history.active_s))
    parts.append(datetime.fromtimestamp(history.rows[-1].time, UTC).strftime("%Y-%m-%d %H:%M UTC"))
    return parts


def _held_out(history: History) -> Chart | None:
    """The chart of all evaluations, with the best so far and the late mean as reference lines; None for fewer than two evaluations."""
    points = evaluations(history)
    if len(points) < 2:
        return None
    best: Points = [points[0]]
    for (x, y), (_, previous_best) in zip(best_so_far(points)[1:], best_so_far(points), strict=False):
        best += [(x, previous_best), (x, y)]
    late = late_points(points)
    mean: Points = [(late[0][0], late_mean(points)), (late[-1][0], late_mean(points))]
    series = [
        Series("best so far", best, "share", color=6, style="guide"),
        Series(f"last {len(late)}, mean", mean, "share", color=1, style="guide"),
        Series("evaluations", points, "share", dots=True, color=0),
    ]
    if unseen := [(float(step), value) for step, value in history.series("eval/unseen_accuracy", "rl") if math.isfinite(value)]:
        series.append(Series("unseen prompts", unseen, "share", dots=True, color=2))
    note = "share of held-out problems solved, by update"
    return Chart("Held-out accuracy", note, series, [Phase("rl", 0, points[-1][0], 0)])


def _tiles(history: History) -> str:
    tiles = []
    # Held-out accuracy has two rows. The second one, the mean of the late evaluations, replaces the first.
    changes = {row.name: row for row in before_and_after(history)}
    reward = ("reward/unfiltered_mean", "Reward, unfiltered")
    if reward[0] not in changes:
        reward = ("reward/mean", "Reward")
    for color, (name, label) in enumerate(
        (("eval/accuracy", "Held-out accuracy"), ("rollout/spec_accept_rate", "Draft acceptance"), reward)
    ):
        if (row := changes.get(name)) is not None:
            points: Points = [(float(x), y) for x, y in history.series(name, "rl")]
            detail = f"from {format_value(row.before, row.metric.unit)} <b>{escape(row.change)}</b>"
            if name == "eval/accuracy" and len(points) > 2:
                fall = worst_fall(evaluations(history))
                label += f", mean of last {len(late_points(points))}"
                detail += f"<br>worst fall <b>{100 * fall.size if fall else 0:.1f} points</b>"
            if name == "eval/accuracy" and (unseen := changes.get("eval/unseen_accuracy")) is not None:
                detail += f"<br>unseen prompts, last <b>{format_value(unseen.after, unseen.metric.unit)}</b>"
            tiles.append(_tile(label, format_value(row.after, row.metric.unit), detail, sparkline_svg(points, color)))
    same_version_mismatch = "rollout_corr/abs_diff_same_version"
    for name, label, detail in (
        (same_version_mismatch, "Mismatch", "mean |Δ log-prob|, same weights")
        if history.series(same_version_mismatch)
        else ("rollout_corr/abs_diff", "Mismatch", "mean |Δ log-prob|"),
        ("async/overlap", "Both busy", "mean share of the time"),
        ("async/staleness_mean", "Staleness", "weight versions, mean"),
        ("rollout/tokens_per_s", "Rollout", "mean over the run"),
        ("perf/tokens_per_s", "Trainer", "mean over updates"),
        ("perf/mfu", "MFU", "mean over updates"),
    ):
        if (mean := _mean(history, name)) is not None:
            unit = "number" if name == "async/staleness_mean" else describe(name).unit
            tiles.append(_tile(label, format_value(mean, unit), detail, ""))
    return "".join(tiles)


def _mean(history: History, name: str) -> float | None:
    """Mean of a metric over the updates of RL, weighted by their time for metrics in `_TIME_WEIGHTED`."""
    rows = [row.metrics for row in history.rows if row.phase == "rl" and name in row.metrics]
    weights = [row.get("timing_s/step", 0.0) if name in _TIME_WEIGHTED else 1.0 for row in rows]
    if not all(weight > 0 for weight in weights):
        weights = [1.0] * len(rows)
    return sum(weight * row[name] for weight, row in zip(weights, rows, strict=True)) / sum(weights) if rows else None


def _tile(label: str, value: str, detail: str, spark: str) -> str:
    number, _, unit = value.partition(" ")
    unit = f"<small>{escape(unit)}</small>" if unit else ""
    return f'<div class="card tile"><h2>{label}</h2><p class="value">{escape(number)}{unit}</p><p class="detail">{detail}</p>{spark}</div>'


def _chart(spec: ChartSpec, history: History) -> Chart | None:
    phases = [phase for phase in history.phases if not spec.phases or phase in spec.phases]
    names = [name for pattern in spec.names for name in history.metric_names() if fnmatchcase(name, pattern)]
    if spec.stack and len(names) > 1:
        names = [name for name in names if name not in _UNSTACKED_TIMINGS]
    phases = [phase for phase in phases if any(history.series(name, phase) for name in names)]
    if not phases:
        return None
    spans: list[Phase] = []
    offset = 0.0
    for phase in phases:
        last = history.last_step(phase)
        spans.append(Phase(phase, offset, offset + last, offset))
        offset += last
    series = []
    for name in names:
        points = [(step + span.offset, value) for span in spans for step, value in history.series(name, span.name)]
        metric = describe(name)
        series.append(Series(spec.labels.get(name, metric.label), points, metric.unit))
    if spec.stack:
        series = _largest(series)
    return Chart(spec.title, spec.note, series, spans, spec.scale, spec.from_zero, spec.stack)


def _largest(series: list[Series]) -> list[Series]:
    """The series by size, largest first. If there are more than `_MAX_STACKED`, the smallest ones are summed as `other`."""
    ordered = sorted(series, key=lambda s: -sum(y for _, y in s.points))
    smallest = ordered[_MAX_STACKED - 1 :]
    if len(smallest) < 2:
        return ordered
    total: dict[float, float] = {}
    for small in smallest:
        for x, y in small.points:
            total[x] = total.get(x, 0.0) + y
    return [*ordered[: _MAX_STACKED - 1], Series("other", sorted(total.items()), "seconds")]


def _before_after(history: History) -> str:
    rows = "".join(
        f"<tr><td>{escape(row.metric.meaning)}<code>{row.name}</code></td><td>{format_value(row.before, row.metric.unit)}</td>"
        f"<td><b>{format_value(row.after, row.metric.unit)}</b></td><td>{escape(row.change)}</td></tr>"
        for row in before_and_after(history)
    )
    if not rows:
        return ""
    note = f'<p class="note">{escape(sentence)}</p>' if (sentence := evaluation_summary(history)) else ""
    return f'<section class="card"><h2>Before and after RL</h2>{_table(rows, _head("", "before", "after", "change"))}{note}</section>'


def _table(rows: str, head: str = "") -> str:
    """A table that scrolls horizontally. `rows`, `head`: HTML. A table without a head is left-aligned."""
    begin = f"<table><thead><tr>{head}</tr></thead>" if head else '<table class="left">'
    return f'<div class="scroll">{begin}<tbody>{rows}</tbody></table></div>'


def _head(*headings: str) -> str:
    return "".join(f"<th>{heading}</th>" for heading in headings)


def _all_metrics(history: History) -> str:
    rows = []
    for name in sorted(history.metric_names()):
        for phase in history.phases:
            values = [value for _, value in history.series(name, phase)]
            if values:
                unit = describe(name).unit
                finite = [value for value in values if math.isfinite(value)] or [math.nan]
                cells = "".join(f"<td>{format_value(v, unit)}</td>" for v in (values[0], values[-1], min(finite), max(finite)))
                title = f'<code class="name">{escape(name)}</code>{escape(describe(name).meaning)}'
                rows.append(f"<tr><td>{title}</td><td>{phase.upper()}</td>{cells}</tr>")
    table = _table("".join(rows), _head("", "phase", "first", "last", "min", "max"))
    return f'<details class="card"><summary>Every metric</summary>{table}</details>'


def _resumes(history: History) -> str:
    """The times of resumes, and the changed keys of the recipe; empty for a run with one session."""
    if not any(event.kind == "resume" for event in history.events):
        return ""
    rows = "".join(
        f"<tr><td>{datetime.fromtimestamp(event.time, UTC):%Y-%m-%d %H:%M UTC}</td><td>{escape(event.message)}</td></tr>"
        for event in history.events
        if event.kind in ("resume", "recipe")
    )
    return f'<section class="card"><h2>Resumed</h2>{_table(rows)}</section>'


def _events(history: History) -> str:
    if not history.events:
        return ""
    begin = history.rows[0].time
    rows = "".join(
        f"<tr><td>{format_duration(max(0.0, event.time - begin))}</td><td>{escape(event.kind)}</td><td>{escape(event.message)}</td></tr>"
        for event in history.events
    )
    return f'<details class="card"><summary>Events</summary>{_table(rows)}</details>'


def _recipe(text: str) -> str:
    if not text:
        return ""
    highlighted = re.sub(r"(?m)^(\s*(?:- )?)([\w.-]+)(:)", r"\1<span>\2</span>\3", escape(text, quote=False))
    return f'<details class="card" open><summary>Recipe</summary><pre>{highlighted}</pre></details>'


def _versions(versions: Document) -> str:
    flat = {"python": versions.get("python"), **(versions.get("packages") or {}), **(versions.get("machine") or {})}
    cells = "".join(
        f"<div><dt>{escape(str(k)).replace('_', ' ')}</dt><dd>{escape(str(v))}</dd></div>" for k, v in flat.items() if v is not None
    )
    return f'<section class="card"><h2>Versions and machine</h2><dl>{cells}</dl></section>' if cells else ""


COMPARED_METRICS = {
    "eval/accuracy": "Held-out accuracy",
    "eval/unseen_accuracy": "Held-out accuracy, unseen prompts",
    "reward/unfiltered_mean": "Reward, unfiltered",
    "reward/mean": "Reward",
    "rollout/spec_accept_rate": "Draft acceptance",
    "actor/entropy": "Entropy",
    "response/length_mean": "Response length",
    "actor/grad_norm": "Gradient norm",
    "mtp/loss_1": "MTP loss",
    "sft/loss": "Supervised loss",
    "rollout_corr/abs_diff": "Mismatch",
    "async/staleness_mean": "Staleness",
    "timing_s/step": "Seconds per update",
    "rollout/tokens_per_s": "Rollout tokens per second",
    "perf/tokens_per_s": "Trainer tokens per second",
}
"""The compared metrics, with the titles of their charts."""
_LOG_SCALE = {"mtp/loss_1", "sft/loss", "rollout_corr/abs_diff"}


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: its name, its history, and its recipe by dotted keys."""

    name: str
    history: History
    recipe: Mapping[str, object]


def write_comparison(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page, by default as `compare.html` in the working directory. Returns its path.

    Raises UserError if a directory is not a run or has no metrics, if there are more runs than colors, or if the page cannot be written.
    """
    if len(run_dirs) > NUM_COLORS:
        raise UserError(f"RUN: {len(run_dirs)} runs are more than the {NUM_COLORS} colors of a chart; name fewer")
    names = _unique_names(run_dirs)
    target = Path("compare.html") if out is None else out
    write_page(target, render_comparison([_read_run(path, name) for path, name in zip(run_dirs, names, strict=True)]))
    return target


def render_comparison(runs: Sequence[ComparedRun]) -> str:
    """The HTML text of the page."""
    charts = "".join(render_chart(chart) for name in COMPARED_METRICS if (chart := _comparison_chart(name, runs)))
    body = f"{_differences_table(runs)}{_final_metrics_table(runs)}<section class='charts'>{charts}</section>"
    lengths = " · ".join(f"{run.name}: {', '.join(run.history.phase_lengths)}" for run in runs)
    return page(" · ".join(run.name for run in runs), lengths, body, "comparison")


def differing_keys(runs: Sequence[ComparedRun]) -> dict[str, list[object]]:
    """The keys with different values, except `name` and `run_dir`, with the value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    values = {key: [run.recipe.get(key, "(absent)") for run in runs] for key in keys if key not in ("run_dir", "name")}
    return {key: column for key, column in values.items() if any(value != column[0] for value in column)}


def _read_run(path: Path, name: str) -> ComparedRun:
    run = RunDirectory(path)
    history = read_history(run, "leave it out until it does")
    _, recipe = read_document(run.recipe, yaml.safe_load)
    return ComparedRun(name, history, {".".join(map(str, keys)): value for keys, value in flatten(recipe).items()})


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """The shortest unique names of the folders: each with as many parent folders as needed."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path_parts[-depth:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("RUN: the same run is named twice; name each one once")


def _comparison_chart(name: str, runs: Sequence[ComparedRun]) -> Chart | None:
    """The chart of one metric: its curves in RL, or in another stage if no run logged it in RL; None without curves."""
    if name == "reward/mean" and any(run.history.series("reward/unfiltered_mean") for run in runs):
        return None
    phase = next((phase for phase in ("rl", "sft", "draft") if any(run.history.series(name, phase) for run in runs)), None)
    if phase is None:
        return None
    metric = describe(name)
    series = [
        Series(run.name, [(float(step), value) for step, value in points], metric.unit, color=index, dots=name.startswith("eval/"))
        for index, run in enumerate(runs)
        if (points := run.history.series(name, phase))
    ]
    last = max(x for curve in series for x, _ in curve.points)
    return Chart(COMPARED_METRICS[name], metric.meaning, series, [Phase(phase, 0, last, 0)], "log" if name in _LOG_SCALE else "linear")


def _differences_table(runs: Sequence[ComparedRun]) -> str:
    differences = differing_keys(runs)
    if not differences:
        return '<section class="card"><h2>Recipes</h2><p class="note">No key differs.</p></section>'
    rows = "".join(
        f'<tr><td><code class="name">{escape(key)}</code></td>{"".join(f"<td>{escape(_value_text(value))}</td>" for value in values)}</tr>'
        for key, values in differences.items()
    )
    return _runs_table("Keys that differ", runs, rows)


def _final_metrics_table(runs: Sequence[ComparedRun]) -> str:
    """The headline metrics of each run after RL. Held-out accuracy has two rows: the last one and the mean of the late ones."""
    summaries = [{(row.metric.meaning, row.name): row for row in before_and_after(run.history)} for run in runs]
    keys = list(dict.fromkeys(key for summary in summaries for key in summary))
    rows = "".join(
        f"<tr><td>{escape(meaning)}<code>{escape(name)}</code></td>"
        + "".join(
            f"<td>{format_value(row.after, row.metric.unit) if (row := summary.get((meaning, name))) else '–'}</td>"
            for summary in summaries
        )
        + "</tr>"
        for meaning, name in keys
    )
    return _runs_table("After RL", runs, rows) if rows else ""


def _runs_table(title: str, runs: Sequence[ComparedRun], rows: str) -> str:
    head = "".join(f'<th class="k{index}"><span class="run">{escape(run.name)}</span></th>' for index, run in enumerate(runs))
    return f'<section class="card"><h2>{title}</h2>{_table(rows, f"<th></th>{head}")}</section>'


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
