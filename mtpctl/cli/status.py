"""`mtpctl status`: how one run is doing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.answers import answer
from mtpctl.cli.options import Json

if TYPE_CHECKING:
    from mtpctl.telemetry.runs import RunOverview


def status(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")], as_json: Json = False) -> None:
    """Tell the state of a run, its step, how long ago it wrote, and what became of trainers and replicas that were lost."""
    from mtpctl.errors import UserError
    from mtpctl.telemetry.run_directory import RunDirectory
    from mtpctl.telemetry.runs import describe_run

    if not RunDirectory(run).recipe.is_file():
        raise UserError(f"RUN: {run} is no run directory; mtpctl runs lists those below a folder")
    found = describe_run(run)
    answer(json.dumps(asdict(found) | {"path": str(run)}, indent=2) if as_json else _rendered(found))


def _rendered(found: RunOverview) -> str:
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
