"""`mtpctl runs`: list runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.answers import answer
from mtpctl.cli.options import Json

if TYPE_CHECKING:
    from mtpctl.telemetry.runs import RunOverview


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
        answer(_rendered(found, folder) if found else f"no runs below {folder}")


def _rendered(found: list[RunOverview], folder: Path) -> str:
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
