"""`mtpctl launch`: run a recipe as a job of a cluster's scheduler."""

from __future__ import annotations

from typing import Annotated

import typer

from mtpctl.cli.options import Overlays, RecipeArgument, Sets, answer

app = typer.Typer(help="Run a recipe as a job of a cluster's scheduler.", add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.command()
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
    from mtpctl.jobs import slurm as jobs
    from mtpctl.recipe.checks import validate

    loaded = load(recipe, overlay, sets)
    validate(loaded.recipe)
    try:
        numbers = tuple(int(seed) for seed in seeds.split(",")) if seeds else ()
    except ValueError:
        raise UserError(f"--seeds: {seeds} is not a list of numbers; write 0,1,2") from None
    request = jobs.Request(nodes, cpus, gpus, partition, time, requeue, numbers, tuple(sbatch or ()))
    options = {"--overlay": overlay, "--set": sets}
    arguments = [recipe, *(word for option, values in options.items() for value in values or [] for word in (option, value))]
    allocation = jobs.allocation(loaded.recipe, request, jobs.node_groups())
    text = jobs.script(loaded.recipe, request, allocation, arguments)
    if dry_run:
        answer(text, end="")
        return
    job, path = jobs.submit(loaded.recipe, request, text)
    answer(f"job {job} is submitted: {allocation.nodes} node(s) with {allocation.cpus} CPUs and {allocation.gpus} GPUs; {path}")


@app.command()
def kuberay(
    recipe: RecipeArgument,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image with mtpctl and ray[default].")],
    claim: Annotated[str, typer.Option(metavar="NAME", help="PersistentVolumeClaim (ReadWriteMany) for the run directories.")],
    sets: Sets = None,
    overlay: Overlays = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of each pod, such as 512Gi; default: no limit.")] = None,
) -> None:
    """Print a KubeRay RayJob for a recipe.

    Example: mtpctl launch kuberay RECIPE --image IMAGE --claim NAME > job.yaml
    """
    from mtpctl.cli.options import load
    from mtpctl.jobs.kuberay import manifest
    from mtpctl.recipe.checks import validate

    loaded = load(recipe, overlay, sets).recipe
    validate(loaded)
    answer(manifest(loaded, image=image, claim=claim, memory=memory), end="")
