"""`mtpctl scale`: change the number of rollout replicas of a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtpctl.cli.answers import answer


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
