"""Decides how a run starts: resume from the newest complete checkpoint, report a completed run, or start over.

Also compares the recipe with the one that the run had before.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mtpctl.checkpoint.copying import newest_copy
from mtpctl.checkpoint.finding import check_checkpoint, find_complete_checkpoint, prepare_resume
from mtpctl.checkpoint.listing import Damaged
from mtpctl.controller.copies import open_copy_store, start_copier
from mtpctl.controller.state import SavedState, check_stages, load_resume_state
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe import yaml12
from mtpctl.recipe.fields import KeyPath
from mtpctl.recipe.loading import dump_resolved, flatten
from mtpctl.recipe.model import absolute_path
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.run_directory import START_OVER_FILE, RunDirectory
from mtpctl.telemetry.session import print_completed_run

Report = Callable[[str], None]
REFERENCE = "reference"
"""Folder in a run directory with the reference policy (the initial policy of RL), if there is a KL penalty."""
_ANNOUNCED_BYTES = 4 << 30
"""Checkpoint size in bytes above which verification is announced, because it takes more than a few seconds."""


@dataclass(frozen=True)
class StartingPoint:
    """The starting point of a run.

    Attributes:
        checkpoint: to resume from; None for a new run.
        state: the state in the checkpoint, or that of a new run.
        lines: messages about damaged checkpoints.
    """

    checkpoint: Path | None
    state: SavedState
    lines: Sequence[str] = ()


def find_starting_point(recipe: Recipe, directory: RunDirectory, report: Report) -> StartingPoint:
    """Verify the newest checkpoint of a locked run directory. If it is damaged, it is renamed and the previous one is used.

    Raises UserError if every checkpoint is damaged, if the checkpoint is within a stage that the recipe leaves out, or if the initial
    policy of RL is needed and damaged.
    """
    candidate = find_complete_checkpoint(directory.checkpoints, verify_checksums=False).path
    if candidate is not None and (nbytes := sum(file.stat().st_size for file in candidate.iterdir())) > _ANNOUNCED_BYTES:
        report(f"verifying {candidate.name}, {nbytes / (1 << 30):,.1f} GiB")
    choice = prepare_resume(directory.checkpoints)
    state = load_resume_state(choice.path, recipe.train)
    check_stages(choice.path, state, recipe.train.stages)
    _check_reference(recipe, directory, state)
    renamed_lines = [f"{path.name} is kept under another name" for path, _ in choice.damaged]
    return StartingPoint(choice.path, state, ["; ".join([line, *renamed_lines[i : i + 1]]) for i, line in enumerate(choice.lines)])


def describe_start(recipe: Recipe) -> list[str]:
    """Verify the checkpoint that a start would resume from, and describe it; empty without one. Raises like `find_starting_point`."""
    directory = RunDirectory(recipe.run_path)
    choice = find_complete_checkpoint(directory.checkpoints, verify_checksums=True)
    if choice.path is None:
        return []
    state = load_resume_state(choice.path, recipe.train)
    check_stages(choice.path, state, recipe.train.stages)
    _check_reference(recipe, directory, state)
    return [f"{choice.path.name}, {state['stage']} after step {state['step']}; its checksums match", *choice.lines]


def _check_reference(recipe: Recipe, directory: RunDirectory, state: SavedState) -> None:
    """Raise UserError if the run resumes within RL with a KL penalty, and the initial policy of RL is missing or damaged."""
    if state["stage"] != "rl" or "rl" in state["ended"] or not recipe.train.rl.kl_coef:
        return
    path = directory.path / REFERENCE
    fix = "restore it, set train.rl.kl_coef to 0, or start in another run_dir"
    if not path.exists():
        raise UserError(f"train.rl.kl_coef: the initial policy of RL, {path}, is missing; {fix}")
    try:
        check_checkpoint(path, verify_checksums=True)
    except Damaged as damage:
        raise UserError(f"train.rl.kl_coef: {path}/{damage}; it is the initial policy of RL: {fix}") from damage


def report_completed_run(recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, state: SavedState, report: Report) -> bool:
    """If all stages have ended, print the summary of the run, update its copy in object storage, and return True."""
    if checkpoint is None or not set(recipe.train.stages) <= set(state["ended"]):
        return False
    changed_keys = find_changed_task_keys(recipe, directory)
    hint = _changed_task_hint(changed_keys) if changed_keys else _continue_hint(recipe, state["stage"])
    print_completed_run(directory, f"{directory.path}: the run is complete (checkpoint {checkpoint.name}); {hint}")
    if (copier := start_copier(recipe, directory, checkpoint, report)) is not None:
        asyncio.run(copier.finish())
    return True


def _continue_hint(recipe: Recipe, stage: str) -> str:
    if stage == "sft" and recipe.train.sft.until_loss:  # The stage may have ended before its last step.
        return "use another run_dir to train from the beginning, or begin a run from its weights with --from"
    return f"raise train.{stage}.steps to continue, or begin a run from its weights with --from"


def _changed_task_hint(keys: list[str]) -> str:
    key_list = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    values = "value" if len(keys) == 1 else "values"
    return f"it was trained with another {key_list}: set another `name` to train with this recipe's {values}"


def start_over(recipe: Recipe, shared_folders: Sequence[str] = ()) -> Path | None:
    """Rename the run directory, and create an empty one for the new start. Returns the renamed directory; None if there was no run.

    `shared_folders`: names of folders that the new run needs as well. Raises UserError if a run is writing the directory, or if the
    existing run's copy in object storage would be overwritten.
    """
    path = recipe.run_path.absolute()
    if not RunDirectory(path).recipe.exists():
        return None
    store = open_copy_store(recipe)
    try:
        if store is not None and (name := newest_copy(store)) is not None:
            raise UserError(
                f"--start-over: train.checkpoint_copy: {store.url} has {name} of this run, which would be overwritten; use another URL"
            )
    except PrerequisiteMissing as error:
        raise PrerequisiteMissing(f"--start-over: {error}") from error
    with RunDirectory.create(path, ""):
        previous_run = next(candidate for count in range(1, 1 << 16) if not (candidate := path.with_name(f"{path.name}.{count}")).exists())
        path.rename(previous_run)
    path.mkdir(mode=0o700)
    (path / START_OVER_FILE).write_text(previous_run.name)
    for name in shared_folders:
        if (previous_run / name).is_dir():
            # Weights do not change, so both runs can share the files.
            shutil.copytree(previous_run / name, path / name, copy_function=_link_or_copy)
    return previous_run


def _link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def check_model_folder_settings(recipe: Recipe, run: RunDirectory) -> None:
    """Raise UserError if the run created its model folder (random weights, a drafter, a longer context) from other settings."""
    folder = recipe.model.folder_in(run.path)
    if folder is None or not folder.is_dir() or (tree := run.read_recipe()) is None:
        return
    earlier_values = _init_values(tree)
    current_values = _init_values(recipe.model_dump(mode="json", by_alias=True))
    for key in [*current_values, *earlier_values]:
        if (earlier_value := earlier_values.get(key)) != (value := current_values.get(key)):
            raise UserError(
                f"{'.'.join(key)}: is {value!r}, but {folder} was created with {earlier_value!r}; restore it, or use another run_dir"
            )


def _init_values(tree: Mapping[str, object]) -> dict[KeyPath, object]:
    """The values of a resolved recipe that determine its random weights, by key."""
    values = flatten(tree)
    sections = ("model", "config"), ("model", "drafter")
    init_values = {key: value for key, value in values.items() if key == ("seed",) or key[:2] in sections}
    path = values.get(("model", "path"))
    return {**init_values, ("model", "path"): absolute_path(None if path is None else str(path))}


def describe_old_logprobs_change(recipe: Recipe, run: RunDirectory) -> str:
    """A message if the source of old log-probs for the policy ratio has changed since the last session; empty otherwise.

    A release with another default changes it, even if the user's recipe is unchanged.
    """
    if (tree := run.read_recipe()) is None:
        return ""
    earlier_source = flatten(tree).get(("train", "rl", "old_logprobs"))
    if earlier_source == "auto":
        try:
            earlier_source = Recipe.model_validate(tree).old_logprobs
        except ValidationError:  # written by a release with other keys
            return ""
    if earlier_source in (None, recipe.old_logprobs):
        return ""
    return (
        f"train.rl.old_logprobs is {recipe.old_logprobs} now, and was {earlier_source} before; set it to {earlier_source} to restore that"
    )


def find_changed_task_keys(recipe: Recipe, run: RunDirectory) -> list[str]:
    """The keys in which the recipe's task differs from the task of the run. Files are compared by name, because a run may be moved."""
    if (tree := run.read_recipe()) is None:
        return []
    earlier_values = flatten(tree)
    current_values = flatten(yaml12.parse(dump_resolved(recipe), "the recipe").value)
    environment_keys = {("rollout", name) for name in ("environment", "environment_args", "environment_eval_args")}
    keys = [key for key in current_values if key[0] in ("data", "reward") or key[:2] in environment_keys]
    return [".".join(key) for key in keys if _file_name(current_values[key]) != _file_name(earlier_values.get(key))]


def _file_name(value: object) -> object:
    return value.rpartition("/")[2] if isinstance(value, str) else value
