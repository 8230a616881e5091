"""`compare.html`: several runs on one page, with overlaid curves and the differences of their recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import yaml

from mtpctl.errors import UserError
from mtpctl.recipe.loading import flatten
from mtpctl.telemetry.charts import COLOURS, Chart, Phase, Series, page, render_chart, write_page
from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.names import describe, format_value
from mtpctl.telemetry.report import history_of, read_document
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.summary import before_and_after

METRICS = {
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
_LOG = {"mtp/loss_1", "sft/loss", "rollout_corr/abs_diff"}
DEFAULT_OUT = Path("compare.html")


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
    if len(run_dirs) > COLOURS:
        raise UserError(f"RUN: {len(run_dirs)} runs are more than the {COLOURS} colors of a chart; name fewer")
    names = _names(run_dirs)
    target = DEFAULT_OUT if out is None else out
    write_page(target, render_comparison([_read(path, name) for path, name in zip(run_dirs, names, strict=True)]))
    return target


def render_comparison(runs: Sequence[ComparedRun]) -> str:
    """The HTML text of the page."""
    charts = "".join(render_chart(chart) for name in METRICS if (chart := _chart(name, runs)))
    body = f"{_differences(runs)}{_after(runs)}<section class='charts'>{charts}</section>"
    lengths = " · ".join(f"{run.name}: {', '.join(run.history.lengths)}" for run in runs)
    return page(" · ".join(run.name for run in runs), lengths, body, "comparison")


def differing(runs: Sequence[ComparedRun]) -> dict[str, list[object]]:
    """The keys with different values, except `name` and `run_dir`, with the value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    values = {key: [run.recipe.get(key, _ABSENT) for run in runs] for key in keys if key not in ("run_dir", "name")}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


_ABSENT = "(absent)"


def _read(path: Path, name: str) -> ComparedRun:
    run = RunDirectory(path)
    history = history_of(run, "leave it out until it does")
    _, recipe = read_document(run.recipe, yaml.safe_load)
    return ComparedRun(name, history, {".".join(map(str, keys)): value for keys, value in flatten(recipe).items()})


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest unique names of the folders: each with as many parent folders as needed."""
    parts = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("RUN: the same run is named twice; name each one once")


def _chart(name: str, runs: Sequence[ComparedRun]) -> Chart | None:
    """The chart of one metric: its curves in RL, or in another stage if no run logged it in RL."""
    if name == "reward/mean" and any(run.history.series("reward/unfiltered_mean") for run in runs):
        return None
    phase = next((phase for phase in ("rl", "sft", "draft") if any(run.history.series(name, phase) for run in runs)), None)
    if phase is None:
        return None
    metric = describe(name)
    series = [
        Series(run.name, [(float(step), value) for step, value in points], metric.unit, colour=index, dots=name.startswith("eval/"))
        for index, run in enumerate(runs)
        if (points := run.history.series(name, phase))
    ]
    last = max(x for one in series for x, _ in one.points)
    return Chart(METRICS[name], metric.meaning, series, [Phase(phase, 0, last, 0)], "log" if name in _LOG else "linear")


def _differences(runs: Sequence[ComparedRun]) -> str:
    differences = differing(runs)
    if not differences:
        return '<section class="card"><h2>Recipes</h2><p class="note">No key differs.</p></section>'
    rows = "".join(
        f'<tr><td><code class="name">{escape(key)}</code></td>{"".join(f"<td>{escape(_shown(value))}</td>" for value in values)}</tr>'
        for key, values in differences.items()
    )
    return _table("Keys that differ", runs, rows)


def _after(runs: Sequence[ComparedRun]) -> str:
    """The headline metrics of each run after RL. Held-out accuracy has two rows: the last one and the mean of the late ones."""
    after = [{(row.metric.meaning, row.name): row for row in before_and_after(run.history)} for run in runs]
    keys = list(dict.fromkeys(key for rows in after for key in rows))
    rows = "".join(
        f"<tr><td>{escape(meaning)}<code>{escape(name)}</code></td>"
        + "".join(f"<td>{format_value(row.after, row.metric.unit) if (row := each.get((meaning, name))) else '–'}</td>" for each in after)
        + "</tr>"
        for meaning, name in keys
    )
    return _table("After RL", runs, rows) if rows else ""


def _table(title: str, runs: Sequence[ComparedRun], rows: str) -> str:
    head = "".join(f'<th class="k{index}"><span class="run">{escape(run.name)}</span></th>' for index, run in enumerate(runs))
    return (
        f'<section class="card"><h2>{title}</h2><div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
