"""Handles the existing checkpoints when a run starts: resume from the newest whole one, report a completed run, or start over."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpctl.checkpoint.copying import newest_copy
from mtpctl.checkpoint.finding import check, choose, settle
from mtpctl.checkpoint.listing import Damaged
from mtpctl.controller.copies import copies_of, store_of
from mtpctl.controller.prepare import changed_task
from mtpctl.controller.state import SavedState, check_stages, resumed_from
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.run_directory import BEGUN, RunDirectory
from mtpctl.telemetry.session import show_ended

Tell = Callable[[str], None]
REFERENCE = "reference"
"""Folder with the initial policy of RL in a run directory, if there is a KL penalty."""
_LONG = 4 << 30
"""Size from which verification takes more than a few seconds and is announced, in bytes."""


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run resumes from (None for a new run), its state, and lines about damaged checkpoints."""

    checkpoint: Path | None
    state: SavedState
    lines: Sequence[str] = ()


def find_start(recipe: Recipe, directory: RunDirectory, tell: Tell) -> Start:
    """Verify the newest checkpoint of a locked run directory. If it is damaged, it is set aside, and the one before is taken.

    Raises UserError if every checkpoint is damaged, if the checkpoint is within a stage that the recipe leaves out, or if the initial
    policy of RL is needed and damaged.
    """
    candidate = choose(directory.checkpoints, contents=False).path
    if candidate is not None and (nbytes := sum(file.stat().st_size for file in candidate.iterdir())) > _LONG:
        tell(f"verifying {candidate.name}, {nbytes / (1 << 30):,.1f} GiB")
    choice = settle(directory.checkpoints)
    state = resumed_from(choice.path, recipe.train)
    check_stages(choice.path, state, recipe.train.stages)
    _check_reference(recipe, directory, state)
    kept = [f"{path.name} is kept as it is, under another name" for path, _ in choice.damaged]
    return Start(choice.path, state, ["; ".join([line, *kept[i : i + 1]]) for i, line in enumerate(choice.lines)])


def describe_start(recipe: Recipe) -> list[str]:
    """Lines about the checkpoint that a start would resume from, after verifying it; empty without a checkpoint. Changes nothing.

    Raises UserError as `find_start` does.
    """
    directory = RunDirectory(recipe.run_path)
    choice = choose(directory.checkpoints, contents=True)
    if choice.path is None:
        return []
    state = resumed_from(choice.path, recipe.train)
    check_stages(choice.path, state, recipe.train.stages)
    _check_reference(recipe, directory, state)
    verified = "whole by its checksums" if choice.verified else "whole by its sizes"
    return [f"{choice.path.name}, {state['stage']} after step {state['step']}; {verified}", *choice.lines]


def _check_reference(recipe: Recipe, directory: RunDirectory, state: SavedState) -> None:
    """Call `check_reference` if the run resumes within RL with a KL penalty."""
    if state["stage"] == "rl" and "rl" not in state["ended"] and recipe.train.rl.kl_coef:
        check_reference(directory.path / REFERENCE)


def check_reference(path: Path) -> None:
    """Raise UserError if the policy that RL began with is missing or damaged."""
    ways = "restore it, set train.rl.kl_coef to 0, or start in another run_dir"
    if not path.exists():
        raise UserError(f"train.rl.kl_coef: the initial policy of RL, {path}, is missing; {ways}")
    try:
        check(path, contents=True)
    except Damaged as damage:
        raise UserError(f"train.rl.kl_coef: {path}/{damage}; it is the initial policy of RL: {ways}") from damage


def report_ended(recipe: Recipe, directory: RunDirectory, checkpoint: Path | None, state: SavedState, tell: Tell) -> bool:
    """If all stages have ended, show the summary of the run and bring its copy up to date. Returns whether they have."""
    if checkpoint is None or not set(recipe.train.stages) <= set(state["ended"]):
        return False
    another = changed_task(recipe, directory)
    hint = _for_another_task(another) if another else _to_go_on(recipe, state["stage"])
    show_ended(directory, f"{directory.path} has ended, {checkpoint.name}; {hint}")
    if (copies := copies_of(recipe, directory, checkpoint, tell)) is not None:
        asyncio.run(copies.finish())
    return True


def _to_go_on(recipe: Recipe, stage: str) -> str:
    """Hint how to train further after a run that has ended with the stage `stage`."""
    if stage == "sft" and recipe.train.sft.until_loss:  # It may have ended below its steps.
        return "name another run_dir to train from the beginning, or begin a run from its weights with --from"
    return f"raise train.{stage}.steps to go on, or begin a run from its weights with --from"


def _for_another_task(keys: list[str]) -> str:
    """Hint for a run that has ended with another task than the recipe's, which differs in these keys."""
    shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"its {shown} {'was' if len(keys) == 1 else 'were'} not this recipe's: give this one a `name` of its own to train by it"


def start_over(recipe: Recipe, kept: Sequence[str] = ()) -> Path | None:
    """Rename the run directory, so that the run begins again in a new one. Returns its new path, None if there was none.

    kept: names of folders that the new run needs as well, such as the weights that it begins from. Raises UserError if a run is writing the
    directory, or if its copy in object storage would be overwritten.
    """
    path = recipe.run_path.absolute()
    if not RunDirectory(path).recipe.exists():
        return None
    store = store_of(recipe)
    try:
        if store is not None and (name := newest_copy(store)) is not None:
            raise UserError(
                f"--start-over: train.checkpoint_copy: {store.url} has {name} of this run, which would be overwritten; name another URL"
            )
    except EnvironmentMissing as error:
        raise EnvironmentMissing(f"--start-over: {error}") from error
    with RunDirectory.create(path, ""):
        aside = next(place for count in range(1, 1 << 16) if not (place := path.with_name(f"{path.name}.{count}")).exists())
        path.rename(aside)
    path.mkdir(mode=0o700)
    (path / BEGUN).write_text(aside.name)
    for name in kept:
        if (aside / name).is_dir():
            # Weights do not change, so both runs can share the files.
            shutil.copytree(aside / name, path / name, copy_function=_linked)
    return aside


def _linked(source: str, target: str) -> None:
    """Link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
