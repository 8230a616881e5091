"""`mtpctl samples`: what the model of a run wrote, in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.answers import answer
from mtpctl.cli.options import Json

if TYPE_CHECKING:
    from mtpctl.telemetry.sample_log import SampleRow


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
        answer("\n\n".join(map(_rendered, chosen)))


def _chosen(rows: list[SampleRow], n: int, worst: bool) -> list[SampleRow]:
    if worst:
        # A sample without a reward is none of the worst.
        return sorted((row for row in rows if row["reward"] is not None), key=lambda row: (row["reward"], -row["step"]))[:n]
    return rows[::-1][:n]


def _rendered(row: SampleRow) -> str:
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
