"""`mtpctl train`: run a recipe, or print what would run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mtpctl.cli.answers import answer
from mtpctl.cli.options import Json, Overlays, RecipeArgument, Sets, load_whole, say


def train(
    recipe: RecipeArgument,
    sets: Sets = None,
    overlay: Overlays = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print placement, sizes, memory and buckets; start nothing.")
    ] = False,
    as_json: Json = False,
    profile: Annotated[bool, typer.Option("--profile", help="The same as --set telemetry.profile=true.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live panel.")] = False,
) -> None:
    """Train by a recipe. The same command on the same run directory resumes, and so does the directory itself as RECIPE."""
    from mtpctl.errors import UserError
    from mtpctl.recipe.checks import validate

    if as_json and not dry_run:
        raise UserError("--json: goes with --dry-run; a run writes metrics.jsonl in its directory")
    found = load_whole(recipe, overlay, [*(sets or []), *(["telemetry.profile=true"] if profile else [])])
    loaded = found.loaded
    validate(loaded.recipe)
    if found.run is not None:
        say(found.told)
    if dry_run:
        from mtpctl.cli.dry_run import dry_run as plan_run
        from mtpctl.cli.dry_run import render
        from mtpctl.errors import first_of

        plan, errors = plan_run(loaded.recipe)
        answer(json.dumps(plan, indent=2) if as_json else render(plan))
        if errors:
            raise first_of(errors)
        return
    from mtpctl.controller.launch import run

    raise typer.Exit(run(loaded.recipe, plain=plain))
