"""Runs a recipe: checks it, opens the run directory and the telemetry, connects to Ray, and runs the stages (`Run`)."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from functools import partial

from mtpctl.checkpoint.finding import find_complete_checkpoint
from mtpctl.cluster.hosts import Host
from mtpctl.cluster.local import check_capacity, cluster
from mtpctl.controller.copies import check_copies, check_sync_url, fetch_if_lost
from mtpctl.controller.prepare import prepare
from mtpctl.controller.resume import check_model_folder_settings, describe_old_logprobs_change, find_starting_point, report_completed_run
from mtpctl.controller.run import Run
from mtpctl.controller.state import check_stages, load_resume_state
from mtpctl.controller.status import bind_status_socket
from mtpctl.errors import MtpctlError
from mtpctl.plan.placement import place
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.installed import check_engine
from mtpctl.signals import exit_code, raise_on_stop
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.session import ResumePoint, Telemetry
from mtpctl.telemetry.trackers import check_packages


def run(recipe: Recipe, *, plain: bool = False) -> int:
    """Run the recipe. Returns the exit code: 0, or the exit code for the signal that stopped the run."""
    stage_steps: dict[str, int] = {stage: getattr(recipe.train, stage).steps for stage in recipe.train.stages}
    check_copies(recipe)
    check_sync_url(recipe)
    report = partial(print, flush=True)
    fetch_note = fetch_if_lost(recipe, report)
    earlier_run = RunDirectory(recipe.run_path)
    checkpoint = find_complete_checkpoint(earlier_run.checkpoints, verify_checksums=False).path
    state = load_resume_state(checkpoint, recipe.train)
    if report_completed_run(recipe, earlier_run, checkpoint, state, report):
        return 0
    if recipe.train.needs_rollout:
        check_engine(recipe)
    check_packages(recipe.telemetry)
    # The hosts of a cluster at an address are known only after connecting to it. This check assumes one host with unlimited capacity.
    place(recipe, None if recipe.cluster.address is None else [Host(float("inf"), float("inf"))])
    cpus = gpus = 0.0
    if recipe.cluster.address is None:
        # No host can join a local cluster, so it needs room for the maximum number of engines.
        max_placement = place(recipe, engines=recipe.rollout.replica_range.max)
        cpus, gpus = max_placement.cpus, max_placement.gpus
    check_capacity(recipe.cluster, cpus=cpus, gpus=gpus)
    is_new = not recipe.run_path.exists()
    check_stages(checkpoint, state, recipe.train.stages)
    check_model_folder_settings(recipe, earlier_run)
    old_logprobs_note = describe_old_logprobs_change(recipe, earlier_run)
    resolved_recipe = dump_resolved(recipe)
    # Actors get absolute paths: in a joined cluster they have another working directory.
    recipe = recipe.model_copy(update={"run_dir": str(recipe.run_path.absolute())})
    with RunDirectory.create(recipe.run_path, resolved_recipe) as directory, contextlib.ExitStack() as open_sockets:
        try:
            status_socket = bind_status_socket(recipe.telemetry)
            if status_socket is not None:
                open_sockets.enter_context(contextlib.closing(status_socket))
            prepared = prepare(recipe, directory.path)
            starting_point = find_starting_point(recipe, directory, report)
        except MtpctlError:
            if is_new:
                shutil.rmtree(directory.path)
            raise
        # The recipe is recorded after all checks, so that a rejected recipe does not replace the previous one.
        changed_keys = directory.record(resolved_recipe)
        resumed = ResumePoint(starting_point.state["stage"], starting_point.state["step"], starting_point.state["ended"])
        early_stopping_stages = ["sft"] if recipe.train.sft.until_loss else []
        with Telemetry(
            directory, recipe.telemetry, plain, stage_steps=stage_steps, early_stopping_stages=early_stopping_stages, resumed=resumed
        ) as telemetry:
            if changed_keys:
                telemetry.event("recipe", f"changed since the last start: {', '.join(changed_keys)}")
            if telemetry.damage_warning:
                telemetry.event("metrics", telemetry.damage_warning)
            if fetch_note:
                telemetry.event("copy", fetch_note)
            for line in starting_point.lines:
                telemetry.event("checkpoint", line)
            for warning in prepared.warnings:
                telemetry.event("data", warning)
            with cluster(recipe.cluster, cpus=cpus, gpus=gpus, logs=directory.logs) as daemons:
                stopped_by = asyncio.run(
                    Run(recipe, prepared, directory, telemetry, old_logprobs_note, status_socket, daemons, starting_point).run()
                )
                raise_on_stop()  # `asyncio.run` has removed the handlers of the stop signals.
                if stopped_by is None:
                    telemetry.print_summary()
    return 0 if stopped_by is None else exit_code(stopped_by)
