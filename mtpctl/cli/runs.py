"""Commands on existing runs: `runs`, `status`, `scale`, `samples`, `report` and `clean`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.options import Json, print_result

if TYPE_CHECKING:
    from mtpctl.telemetry.runs import RunOverview
    from mtpctl.telemetry.sample_log import SampleRow


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look; default: runs.")] = Path("runs"),
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update the list until Ctrl-C, with curves of the reward, throughput and errors.")
    ] = False,
) -> None:
    """List the runs below a folder, the newest first: state, step, reward, held-out accuracy, and how long ago it wrote."""
    from mtpctl.errors import UserError
    from mtpctl.telemetry.runs import find_runs

    if not folder.is_dir():
        raise UserError(f"FOLDER: no folder {folder}; name one with runs in it")
    if watch:
        from rich.console import Console

        from mtpctl.telemetry.runs import watch_runs

        if as_json or not (console := Console()).is_terminal:
            raise UserError("--watch: needs a terminal, without --json; run it without a pipe")
        watch_runs(folder, console)  # Returns only by Ctrl-C.
    overviews = find_runs(folder)
    if as_json:
        print_result(json.dumps([asdict(run) | {"path": str(run.path)} for run in overviews], indent=2))
    else:
        print_result(_run_table(overviews) if overviews else f"no runs below {folder}")


def _run_table(runs: list[RunOverview]) -> str:
    from mtpctl.telemetry.names import align_columns, format_duration

    def number(value: float | None) -> str:
        return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"

    rows = [("run", "state", "step", "reward", "unfiltered", "held-out", "age")]
    for run in runs:
        total = "" if run.steps is None else f"/{run.steps}"
        step = f"{run.stage} {run.step}{total}" if run.stage else "–"
        accuracy = number(run.accuracy) + ("" if run.unseen_accuracy is None else f" (unseen {number(run.unseen_accuracy)})")
        values = (number(run.reward), number(run.unfiltered_reward), accuracy)
        rows.append((str(run.path), run.state, step, *values, format_duration(run.age_s)))
    return "\n".join([*align_columns(rows), *(f"unreadable: {run.fault}" for run in runs if run.fault)])


def clean(as_json: Json = False) -> None:
    """Remove weight versions and Ray sessions that killed runs left on this machine, unless a live process uses them."""
    from mtpctl.cluster import leftovers

    removed, remaining = leftovers.remove(), [leftover.path for leftover in leftovers.find()]
    unmarked, foreign = leftovers.find_unmarked(), leftovers.find_foreign()
    if as_json:
        rows = [{"path": str(leftover.path), "bytes": leftover.nbytes} for leftover in removed]
        others = {"not_removed": remaining, "unknown": unmarked, "elsewhere": foreign}
        print_result(json.dumps({"removed": rows} | {key: [str(path) for path in paths] for key, paths in others.items()}, indent=2))
        return
    for leftover in removed:
        print_result(f"removed {leftover.path} ({leftover.nbytes / 2**30:.3g} GiB)")
    for path in remaining:
        print_result(f"not removed: {path}; another process is removing it, or it cannot be removed")
    if not removed and not remaining:
        print_result("found no leftovers of killed runs")
    for path in unmarked:
        print_result(f"skipped: {path} does not name its owner; remove it manually once no run uses it")
    for path in foreign:
        print_result(f"skipped: {path} was created in another container or before this boot; remove it manually once no run uses it")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several to compare.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="File to write; default: report.html in RUN, or compare.html in this folder for several runs."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page, and print its path: the curves of a run, or those of several runs in common charts."""
    if len(runs) > 1:
        from mtpctl.telemetry.report import write_comparison

        print(write_comparison(runs, out))
        return
    from mtpctl.telemetry.report import write_report

    print(write_report(runs[0], out))


def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    replicas: Annotated[
        int, typer.Option("--replicas", metavar="N", min=1, help="New number of rollout replicas, within rollout.replicas of the recipe.")
    ],
) -> None:
    """Change the number of rollout replicas of a running run. Returns once the run has accepted it; replicas join or leave after that.

    The number holds until the next mtpctl scale, also when the run is started again.
    """
    from mtpctl.errors import UserError
    from mtpctl.jobs.targets import load_target
    from mtpctl.recipe.rollout import check_scale
    from mtpctl.telemetry.run_directory import RunDirectory, request_replicas

    directory = RunDirectory(run)
    if not directory.recipe.is_file():
        raise UserError(f"RUN: {run} is no run directory; mtpctl runs lists those below a folder")
    recipe = load_target(str(run), [], []).loaded.recipe
    if "rl" not in recipe.train.stages:
        raise UserError(f"RUN: {run} has no rollout replicas; its train.stages are {', '.join(recipe.train.stages)}")
    check_scale(recipe.rollout, replicas)
    reply = request_replicas(directory, replicas)
    if reply.refused:
        raise UserError(reply.message)
    print_result(reply.message)


def status(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")], as_json: Json = False) -> None:
    """Show the state of a run, its step, the time since its last metrics, its Slurm job, and restarts of trainers and replicas."""
    from mtpctl.errors import UserError
    from mtpctl.jobs.launch import job_line
    from mtpctl.telemetry.run_directory import RunDirectory
    from mtpctl.telemetry.runs import describe_run

    job, started = job_line(run), RunDirectory(run).recipe.is_file()
    if not started and job is None:
        raise UserError(f"RUN: {run} is no run directory; mtpctl runs lists those below a folder")
    overview = describe_run(run) if started else None
    if as_json:
        print_result(json.dumps((asdict(overview) if overview else {}) | {"path": str(run), "slurm": job}, indent=2))
        return
    if overview:
        print_result(_status_lines(overview))
    if job:
        print_result(f"{run}: {job}")


def _status_lines(overview: RunOverview) -> str:
    from mtpctl.telemetry.names import format_duration

    total = "" if overview.steps is None else f" of {overview.steps}"
    step = f", {overview.stage} step {overview.step}{total}" if overview.stage else ""
    reward = "" if overview.reward is None else f", reward {overview.reward:.3f}"
    reward += "" if overview.unfiltered_reward is None else f", unfiltered {overview.unfiltered_reward:.3f}"
    accuracy = "" if overview.accuracy is None else f", held-out accuracy {overview.accuracy:.3f}"
    accuracy += "" if overview.unseen_accuracy is None else f" (unseen prompts {overview.unseen_accuracy:.3f})"
    replicas = "" if overview.replicas is None else f", {overview.replicas} rollout replica(s)"
    replicas += "" if overview.requested_replicas is None else f", {overview.requested_replicas} requested by mtpctl scale"
    lines = [f"{overview.path}: {overview.state}{step}{reward}{accuracy}{replicas}; wrote {format_duration(overview.age_s)} ago"]
    return "\n".join([*lines, *(f"restart: {line}" for line in overview.restarts)])


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Only responses of update N; default: the newest ones.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    n: Annotated[int, typer.Option("--n", metavar="N", help="How many.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Print responses of the model: prompt, response, reward, versions and drafts. A bar marks the environment's replies."""
    from mtpctl.errors import UserError
    from mtpctl.telemetry.sample_log import read_samples

    if not run.is_dir():
        raise UserError(f"RUN: no directory {run}; give a run directory")
    rows = read_samples(run)
    if not rows:
        raise UserError(f"RUN: {run} has no samples yet; its first evaluation or update writes them (telemetry.samples above 0)")
    if step is not None:
        steps = sorted({row["step"] for row in rows})
        rows = [row for row in rows if row["step"] == step]
        if not rows:
            nearest = min(steps, key=lambda other: abs(other - step))
            raise UserError(f"--step: {run} has no samples of {step}; the nearest step with samples is {nearest}")
    rows = rows[::-1]
    if worst:
        rewarded = [row for row in rows[::-1] if row["reward"] is not None]
        rows = sorted(rewarded, key=lambda row: (row["reward"], -row["step"]))
    if as_json:
        print_result(json.dumps(rows[:n], indent=2, ensure_ascii=False))
    else:
        print_result("\n\n".join(map(_sample_lines, rows[:n])))


def _sample_lines(row: SampleRow) -> str:
    from mtpctl.telemetry.sample_log import sample_facts

    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3g}"
    lines = ["── " + " · ".join([reward, *sample_facts(row)]), *(f"  {line}" for line in row["prompt"].splitlines()), "  →"]
    for part in row["parts"]:
        bar = "  " if part["by"] == "model" else "  │ "
        lines += [bar + line for line in part["text"].splitlines() or [""]]
    if row["answer"]:
        first, *others = row["answer"].splitlines() or [""]
        lines += [f"  answer: {first}", *(f"          {line}" for line in others)]
    if row["note"]:
        lines.append(f"  {row['note']}")
    return "\n".join(map(_escaped, lines))


def _escaped(line: str) -> str:
    """The line with control characters escaped, which a terminal would otherwise interpret."""
    return "".join(character if character.isprintable() or character == "\t" else f"\\x{ord(character):02x}" for character in line)
