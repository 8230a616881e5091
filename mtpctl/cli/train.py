"""`mtpctl train`: run a recipe, or print what would run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.options import Json, OptionalRecipe, Overlays, Sets, answer, load_whole
from mtpctl.jobs.progress import print_progress

if TYPE_CHECKING:
    from mtpctl.jobs.targets import StartWeights, Target


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
    from mtpctl.recipe.checks import validate

    if as_json and not dry_run:
        raise UserError("--json: goes with --dry-run; a run writes metrics.jsonl in its directory")
    if over and (start is not None or dry_run):
        raise UserError(f"--start-over: cannot be combined with {'--from; name a new run_dir' if start is not None else '--dry-run'}")
    sets = [*(sets or []), *(["telemetry.profile=true"] if profile else [])]
    found, beginning = _asked(recipe, start, overlay, sets)
    loaded = found.loaded
    validate(loaded.recipe)
    if found.run is not None and not over:
        print_progress(found.told)
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
    if beginning is not None:
        print_progress(f"{loaded.recipe.run_path} begins from the weights of {beginning.told}")
        if beginning.checkpoint is not None:
            folder = _converted(beginning, loaded.recipe.run_path.absolute())
            found, _ = _asked(recipe, start, overlay, sets, folder)
            loaded = found.loaded
    from mtpctl.controller.launch import run

    if over:
        from mtpctl.controller.resuming import start_over
        from mtpctl.jobs.targets import START

        if (kept := start_over(loaded.recipe, [START])) is not None:
            print_progress(f"{loaded.recipe.run_path} begins again; the run that was there is kept as {kept}")
    raise typer.Exit(run(loaded.recipe, plain=plain))


def _asked(
    recipe: str | None, start: str | None, overlay: list[str] | None, sets: list[str], converted: Path | None = None
) -> tuple[Target, StartWeights | None]:
    """The recipe that the command line asks for, and the weights of `--from`, if any. converted: the folder with those."""
    from mtpctl.errors import UserError
    from mtpctl.jobs.targets import Target, run_of, start_weights

    if start is None:
        if recipe is None:
            raise UserError("RECIPE: name a recipe or a run, or a run with --from")
        return load_whole(recipe, overlay, sets), None
    beginning = start_weights(start)
    if recipe is None and (run := run_of(start)) is None:
        raise UserError(f"--from: {start} has no recipe with it; name a recipe before it")
    named = recipe or str(run)
    found = load_whole(named, overlay, sets)
    place = found.recipe.run_path
    if run_of(place) is not None:
        by_name = "--set name=NAME or " if "{name}" in found.recipe.run_dir else ""
        raise UserError(f"--from: {place} holds a run that has begun already; name a new one with {by_name}--set run_dir=FOLDER")
    return Target(load_whole(named, overlay, [*sets, *beginning.sets(converted)]).loaded, found.run, changed=found.changed), beginning


def _converted(beginning: StartWeights, run: Path) -> Path:
    """Convert the checkpoint to a Hugging Face folder in the run directory, an adapter merged in.

    Another process converts it, since the conversion imports torch and hides the cards from its process.
    """
    from mtpctl.jobs.targets import START

    folder = run / START
    run.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mtpctl", "convert-hf", str(beginning.checkpoint), str(folder), "--force"]
    if beginning.adapter:
        command.append("--merge")
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return folder
