"""`mtpctl train` and `mtpctl launch`: run a recipe, print what would run, or submit it to a scheduler of a cluster."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mtpctl.cli.options import Json, OptionalRecipe, Overlays, RecipeArgument, Sets, print_result
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
    restart: Annotated[
        bool, typer.Option("--start-over", help="Begin the run again at update 1; its directory is renamed, with all checkpoints.")
    ] = False,
    as_json: Json = False,
    profile: Annotated[bool, typer.Option("--profile", help="The same as --set telemetry.profile=true.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live panel.")] = False,
) -> None:
    """Train by a recipe. To resume a run, repeat the command, or pass the run directory as RECIPE."""
    from mtpctl.errors import UserError
    from mtpctl.jobs.targets import START_FOLDER, convert_start, training_target
    from mtpctl.recipe.checks import validate

    if as_json and not dry_run:
        raise UserError("--json: requires --dry-run; a run writes metrics.jsonl in its directory")
    if restart and (start is not None or dry_run):
        raise UserError(f"--start-over: cannot be combined with {'--from; name a new run_dir' if start is not None else '--dry-run'}")
    sets = [*(sets or []), *(["telemetry.profile=true"] if profile else [])]
    target, weights = training_target(recipe, start, overlay or [], sets)
    loaded = target.loaded
    validate(loaded.recipe)
    if target.run is not None and not restart:
        print_progress(target.summary)
    for note in loaded.notes:
        print_progress(note)
    if dry_run:
        from mtpctl.errors import with_notes
        from mtpctl.jobs import dry_run as planning

        plan = planning.dry_run(loaded.recipe)
        print_result(json.dumps(planning.as_json(plan), indent=2) if as_json else planning.render(plan))
        if plan.errors:
            raise with_notes(plan.errors)
        return
    if weights is not None:
        print_progress(f"{loaded.recipe.run_path} begins from the weights of {weights.name}")
        if weights.checkpoint is not None:
            folder, code = convert_start(weights, loaded.recipe.run_path.absolute())
            if code:
                raise typer.Exit(code)
            loaded = training_target(recipe, start, overlay or [], sets, folder)[0].loaded
    from mtpctl.controller.train import run

    if restart:
        from mtpctl.controller.resume import start_over

        if (previous := start_over(loaded.recipe, [START_FOLDER])) is not None:
            print_progress(f"{loaded.recipe.run_path} starts over; the previous run was renamed to {previous}")
    raise typer.Exit(run(loaded.recipe, plain=plain))


launch = typer.Typer(
    help="Run a recipe as a job of a cluster's scheduler.", add_completion=False, no_args_is_help=True, rich_markup_mode=None
)


@launch.command()
def slurm(
    recipe: RecipeArgument,
    sets: Sets = None,
    overlay: Overlays = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes; default: the fewest on which the recipe fits.")] = None,
    cpus: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPUs per node; default: all, with exclusive nodes.")] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", min=1, help="GPUs per node; default: all.")] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Partition; default: Slurm's.")] = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="Time limit as for sbatch; default: the partition's.")] = None,
    requeue: Annotated[bool, typer.Option("--requeue", help="Resume after the time limit, a preemption or the failure of a node.")] = False,
    seeds: Annotated[str | None, typer.Option(metavar="N,N,...", help="One run for each seed, as a job array; named NAME-seedN.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Another option of sbatch, such as --account=lab; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and print the script; submit nothing.")] = False,
) -> None:
    """Write a Slurm script for a recipe into its run directory, and submit it.

    First checks that the recipe fits on the nodes of the partition. You can also edit the script, and submit it with sbatch.
    """
    from mtpctl.cli.options import load
    from mtpctl.errors import UserError
    from mtpctl.jobs import launch as jobs
    from mtpctl.recipe.checks import validate

    loaded = load(recipe, overlay, sets)
    validate(loaded.recipe)
    try:
        numbers = tuple(int(seed) for seed in seeds.split(",")) if seeds else ()
    except ValueError:
        raise UserError(f"--seeds: {seeds} is not a list of numbers; write 0,1,2") from None
    request = jobs.SlurmRequest(nodes, cpus, gpus, partition, time, requeue, numbers, tuple(sbatch or ()))
    options = {"--overlay": overlay, "--set": sets}
    arguments = [recipe, *(word for option, values in options.items() for value in values or [] for word in (option, value))]
    allocation = jobs.slurm_allocation(loaded.recipe, request, jobs.node_groups())
    text = jobs.slurm_script(loaded.recipe, request, allocation, arguments)
    if dry_run:
        print_result(text, end="")
        return
    job, path = jobs.submit_slurm(loaded.recipe, request, text)
    print_result(f"job {job} is submitted: {allocation.nodes} node(s) with {allocation.cpus} CPUs and {allocation.gpus} GPUs each; {path}")


@launch.command()
def kuberay(
    recipe: RecipeArgument,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image with mtpctl and ray[default].")],
    claim: Annotated[str, typer.Option(metavar="NAME", help="PersistentVolumeClaim (ReadWriteMany) for the run directories.")],
    sets: Sets = None,
    overlay: Overlays = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of each pod, such as 512Gi; default: no limit.")] = None,
) -> None:
    """Print a KubeRay RayJob for a recipe. Example: mtpctl launch kuberay RECIPE --image IMAGE --claim NAME > job.yaml"""
    from mtpctl.cli.options import load
    from mtpctl.jobs.launch import kuberay_manifest
    from mtpctl.recipe.checks import validate

    loaded = load(recipe, overlay, sets).recipe
    validate(loaded)
    print_result(kuberay_manifest(loaded, image=image, claim=claim, memory=memory), end="")
