"""`mtpctl train`: run a recipe, or print what would run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mtpctl.cli.options import Json, OptionalRecipe, Overlays, Sets, answer
from mtpctl.jobs import print_progress


def train(
    recipe: OptionalRecipe = None,
    sets: Sets = None,
    overlay: Overlays = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN|CKPT|FOLDER", help="Begin a new run from these weights; RECIPE defaults to that of the run."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print placement, sizes, memory and buckets; start nothing.")
    ] = False,
    over: Annotated[
        bool,
        typer.Option("--start-over", help="Begin the run again at update 1; its directory is renamed, with all checkpoints."),
    ] = False,
    as_json: Json = False,
    profile: Annotated[bool, typer.Option("--profile", help="The same as --set telemetry.profile=true.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live panel.")] = False,
) -> None:
    """Train by a recipe. The same command on the same run directory resumes, and so does the directory itself as RECIPE."""
    from mtpctl.errors import UserError
    from mtpctl.jobs.targets import START, convert_start, training_target
    from mtpctl.recipe.checks import validate

    if as_json and not dry_run:
        raise UserError("--json: goes with --dry-run; a run writes metrics.jsonl in its directory")
    if over and (start is not None or dry_run):
        raise UserError(f"--start-over: cannot be combined with {'--from; name a new run_dir' if start is not None else '--dry-run'}")
    sets = [*(sets or []), *(["telemetry.profile=true"] if profile else [])]
    target, weights = training_target(recipe, start, overlay or [], sets)
    loaded = target.loaded
    validate(loaded.recipe)
    if target.run is not None and not over:
        print_progress(target.summary)
    for note in loaded.notes:
        print_progress(note)
    if dry_run:
        from mtpctl.errors import first_of
        from mtpctl.jobs import dry_run as planning

        plan = planning.dry_run(loaded.recipe)
        answer(json.dumps(planning.as_json(plan), indent=2) if as_json else planning.render(plan))
        if plan.errors:
            raise first_of(plan.errors)
        return
    if weights is not None:
        print_progress(f"{loaded.recipe.run_path} begins from the weights of {weights.name}")
        if weights.checkpoint is not None:
            folder, code = convert_start(weights, loaded.recipe.run_path.absolute())
            if code:
                raise typer.Exit(code)
            loaded = training_target(recipe, start, overlay or [], sets, folder)[0].loaded
    from mtpctl.controller.launch import run

    if over:
        from mtpctl.controller.resuming import start_over

        if (previous := start_over(loaded.recipe, [START])) is not None:
            print_progress(f"{loaded.recipe.run_path} begins again; the run that was there is kept as {previous}")
    raise typer.Exit(run(loaded.recipe, plain=plain))
