"""`mtpctl runs`: list runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.options import Json, answer

if TYPE_CHECKING:
    from mtpctl.telemetry.runs import RunOverview
if TYPE_CHECKING:
    from mtpctl.telemetry.runs import RunOverview
if TYPE_CHECKING:
    from mtpctl.telemetry.sample_log import SampleRow


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look; default: runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs below a folder, the newest first: state, step, reward, held-out accuracy, and how long ago it wrote."""
    from mtpctl.errors import UserError
    from mtpctl.telemetry.runs import find_runs

    if not folder.is_dir():
        raise UserError(f"FOLDER: no folder {folder}; name one with runs in it")
    found = find_runs(folder)
    if as_json:
        answer(json.dumps([asdict(run) | {"path": str(run.path)} for run in found], indent=2))
    else:
        answer(_run_table(found, folder) if found else f"no runs below {folder}")


def _run_table(found: list[RunOverview], folder: Path) -> str:
    from mtpctl.telemetry.names import format_duration

    def number(value: float | None) -> str:
        return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"

    rows = [("run", "state", "step", "reward", "unfiltered", "held-out", "age")]
    for run in found:
        of = "" if run.steps is None else f"/{run.steps}"
        step = f"{run.stage} {run.step}{of}" if run.stage else "–"
        values = (number(run.reward), number(run.unfiltered_reward), number(run.accuracy))
        rows.append((str(run.path), run.state, step, *values, format_duration(run.age_s)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"unreadable: {run.fault}" for run in found if run.fault)])


# `mtpctl clean`: remove what killed runs left on this machine.


def clean(as_json: Json = False) -> None:
    """Remove weight versions and Ray sessions that killed runs left here. What a live process uses stays."""
    from mtpctl.cluster import leftovers

    gone, staying = leftovers.remove(), [left.path for left in leftovers.find()]
    unknown, elsewhere = leftovers.unknown(), leftovers.elsewhere()
    if as_json:
        rows = [{"path": str(left.path), "bytes": left.nbytes} for left in gone]
        others = {"not_removed": staying, "unknown": unknown, "elsewhere": elsewhere}
        answer(json.dumps({"removed": rows} | {what: [str(path) for path in paths] for what, paths in others.items()}, indent=2))
        return
    for left in gone:
        answer(f"removed {left.path} ({left.nbytes / 2**30:.3g} GiB)")
    for path in staying:
        answer(f"not removed: {path}; another process removes it just now, or it cannot be removed")
    if not gone and not staying:
        answer("killed runs left nothing here")
    for path in unknown:
        answer(f"left alone: {path} does not tell whose it is; remove it by hand once no run uses it")
    for path in elsewhere:
        answer(f"left alone: {path} was made elsewhere, in another container or before this boot; remove it by hand once no run uses it")


# `mtpctl report`: show a run as one HTML page.


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several to compare.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write; default: report.html in RUN; for several compare.html here."),
    ] = None,
) -> None:
    """Write one self-contained HTML page and print its path: a run's curves, or of several runs their curves over each other."""
    if len(runs) > 1:
        from mtpctl.telemetry.compare import write_comparison

        print(write_comparison(runs, out))
        return
    from mtpctl.telemetry.report import write_report

    print(write_report(runs[0], out))


# `mtpctl scale`: change the number of rollout replicas of a run that goes on.


def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    replicas: Annotated[
        int, typer.Option("--replicas", metavar="N", min=1, help="Rollout replicas to have, within rollout.replicas of the recipe.")
    ],
) -> None:
    """Have a run that goes on use another number of rollout replicas. Returns once the run has taken it; replicas join or leave after that.

    The number holds until the next mtpctl scale, also when the run is started again.
    """
    from mtpctl.errors import UserError
    from mtpctl.jobs.targets import load_target
    from mtpctl.recipe.rollout import check_scale
    from mtpctl.telemetry.run_directory import RunDirectory
    from mtpctl.telemetry.scale_requests import ask

    directory = RunDirectory(run)
    if not directory.recipe.is_file():
        raise UserError(f"RUN: {run} is no run directory; mtpctl runs lists those below a folder")
    recipe = load_target(str(run), [], []).loaded.recipe
    if "rl" not in recipe.train.stages:
        raise UserError(f"RUN: {run} has no rollout replicas; its train.stages are {', '.join(recipe.train.stages)}")
    check_scale(recipe.rollout, replicas)
    reply = ask(directory, replicas)
    if reply.refused:
        raise UserError(reply.told)
    answer(reply.told)


# `mtpctl status`: how one run is doing.


def status(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")], as_json: Json = False) -> None:
    """Tell the state of a run, its step, how long ago it wrote, and what became of trainers and replicas that were lost."""
    from mtpctl.errors import UserError
    from mtpctl.telemetry.run_directory import RunDirectory
    from mtpctl.telemetry.runs import describe_run

    if not RunDirectory(run).recipe.is_file():
        raise UserError(f"RUN: {run} is no run directory; mtpctl runs lists those below a folder")
    found = describe_run(run)
    answer(json.dumps(asdict(found) | {"path": str(run)}, indent=2) if as_json else _status_lines(found))


def _status_lines(found: RunOverview) -> str:
    from mtpctl.telemetry.names import format_duration

    of = "" if found.steps is None else f" of {found.steps}"
    step = f", {found.stage} step {found.step}{of}" if found.stage else ""
    reward = "" if found.reward is None else f", reward {found.reward:.3f}"
    reward += "" if found.unfiltered_reward is None else f", unfiltered {found.unfiltered_reward:.3f}"
    accuracy = "" if found.accuracy is None else f", held-out accuracy {found.accuracy:.3f}"
    replicas = "" if found.replicas is None else f", {found.replicas} rollout replica(s)"
    replicas += "" if found.asked_replicas is None else f", {found.asked_replicas} asked for by mtpctl scale"
    lines = [f"{found.path}: {found.state}{step}{reward}{accuracy}{replicas}; wrote {format_duration(found.age_s)} ago"]
    return "\n".join([*lines, *(f"restart: {line}" for line in found.restarts)])


# `mtpctl samples`: what the model of a run wrote, in the terminal.


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Those of update N; default: the newest.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    n: Annotated[int, typer.Option("--n", metavar="N", help="How many.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Print what the model wrote: prompt, response with the environment's answers behind a bar, reward, versions and drafts."""
    from mtpctl.errors import UserError
    from mtpctl.telemetry.sample_log import read_samples

    if not run.is_dir():
        raise UserError(f"RUN: no directory {run}; give a run directory")
    rows = read_samples(run)
    if not rows:
        raise UserError(f"RUN: {run} holds no samples yet; they come with its first evaluation or update (telemetry.samples above 0)")
    if step is not None:
        steps = sorted({row["step"] for row in rows})
        rows = [row for row in rows if row["step"] == step]
        if not rows:
            near = min(steps, key=lambda known: abs(known - step))
            raise UserError(f"--step: {run} holds no samples of {step}; the nearest step that has some is {near}")
    chosen = _chosen(rows, n, worst)
    if as_json:
        answer(json.dumps(chosen, indent=2, ensure_ascii=False))
    else:
        answer("\n\n".join(map(_sample_lines, chosen)))


def _chosen(rows: list[SampleRow], n: int, worst: bool) -> list[SampleRow]:
    if worst:
        # A sample without a reward is none of the worst.
        return sorted((row for row in rows if row["reward"] is not None), key=lambda row: (row["reward"], -row["step"]))[:n]
    return rows[::-1][:n]


def _sample_lines(row: SampleRow) -> str:
    from mtpctl.telemetry.sample_page import facts

    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3g}"
    lines = ["── " + " · ".join([reward, *facts(row)]), *(f"  {line}" for line in row["prompt"].splitlines()), "  →"]
    for part in row["parts"]:
        bar = "  " if part["by"] == "model" else "  │ "
        lines += [bar + line for line in part["text"].splitlines() or [""]]
    if row["answer"]:
        first, *others = row["answer"].splitlines() or [""]
        lines += [f"  wanted: {first}", *(f"          {line}" for line in others)]
    if row["note"]:
        lines.append(f"  {row['note']}")
    return "\n".join(map(_harmless, lines))


def _harmless(line: str) -> str:
    """A line without control characters, which a model may write and a terminal would obey."""
    return "".join(character if character.isprintable() or character == "\t" else f"\\x{ord(character):02x}" for character in line)
