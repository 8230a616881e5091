"""The targets of commands: a recipe, a run, a checkpoint of a run, and for some commands a folder of weights."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.errors import UserError

if TYPE_CHECKING:
    from mtpctl.recipe.loading import LoadedRecipe
    from mtpctl.recipe.schema import Recipe

CHECKPOINT_FILE, WEIGHTS_FILE = "run.json", "config.json"
START_FOLDER = "start"
"""Folder in a run directory with the weights that the run began from, if they were converted from a checkpoint."""


@dataclass(frozen=True)
class Target:
    """A recipe with overlays and `--set` values applied.

    Attributes:
        run: the run that the recipe is from.
        weights: the checkpoint or folder of the weights; None for the newest checkpoint of the run directory.
        changed: differences of the recipe from that of `run`, as `key: before → after`.
    """

    loaded: LoadedRecipe
    run: Path | None = None
    weights: str | None = None
    changed: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def summary(self) -> str:
        """A message: the run that resumes and its changes, or the run whose recipe a new run uses."""
        assert self.run is not None
        if self.recipe.run_path.absolute() == self.run:
            return f"{self.run} resumes with " + (", ".join(self.changed) or "its recipe")
        return f"{self.recipe.run_path} begins with the recipe of {self.run}" + (f" and {', '.join(self.changed)}" if self.changed else "")


def find_run(target: str | Path) -> Path | None:
    """The directory of a run, or of the run of a checkpoint; None for anything else."""
    folder = Path(target).expanduser().absolute()
    run = folder.parent.parent if (folder / CHECKPOINT_FILE).is_file() else folder
    return run if _recipe_file(run).is_file() else None


def load_target(target: str | Path, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> Target:
    """The recipe that `target` names, with overlays and `--set` values applied.

    `run_dir` is set to the directory where the run is now, so that a run that was moved or copied resumes. Raises UserError as
    `load_recipe` does, and for a folder that is not a run.
    """
    from mtpctl.recipe.loading import flatten, load_recipe

    folder, run = Path(target).expanduser(), find_run(target)
    if run is None:
        if (folder / WEIGHTS_FILE).is_file():
            raise UserError(f"{target} is a folder of weights, not a recipe; name a recipe, and this folder by --set model.path={target}")
        if folder.is_dir():
            kinds = f"a run ({_recipe_file(folder).name}), nor a checkpoint ({CHECKPOINT_FILE}), nor a folder of weights ({WEIGHTS_FILE})"
            raise UserError(f"{target} is neither {kinds}; name a run, a checkpoint or a recipe file")
        return Target(load_recipe(target, overlays=overlays, sets=sets))
    source = _recipe_file(run)
    saved_recipe = load_recipe(source)
    moved_keys = _location_keys(saved_recipe.recipe, run)
    if (start_folder := _moved_start(saved_recipe.recipe, run)) is not None:
        moved_keys["model.path"] = start_folder
    moved_sets = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in moved_keys.items()]
    loaded = load_recipe(source, overlays=overlays, sets=[*moved_sets, *sets])
    before, after = (flatten(document.recipe.model_dump(mode="json", by_alias=True)) for document in (saved_recipe, loaded))
    # Moving the run is not a change by the user.
    before |= {tuple(key.split(".")): value for key, value in moved_keys.items()}
    keys = [key for key in after if after[key] != before.get(key)]
    changed = tuple(f"{'.'.join(key)}: {_value_text(before.get(key))} → {_value_text(after[key])}" for key in keys)
    return Target(loaded, run, str(folder.absolute()) if run != folder.absolute() else None, changed)


def load_recipe_or_run(target: str | Path, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> Target:
    """`load_target` for commands that work on whole runs. Also raises UserError for a checkpoint."""
    resolved = load_target(target, overlays, sets)
    if resolved.weights is not None:
        raise UserError(f"{target} is a checkpoint of {resolved.run}; name the run to use its newest checkpoint")
    return resolved


@contextlib.contextmanager
def target_with_weights(target: str, from_weights: str | None, overlays: Sequence[str], sets: Sequence[str]) -> Iterator[Target]:
    """`load_target`, also for a folder of weights, whose recipe consists of overlays and sets.

    `from_weights`: the value of `--from`, which takes precedence over the target's weights.
    """
    folder = Path(target).absolute()
    if (folder / WEIGHTS_FILE).is_file():
        from mtpctl.recipe import yaml12
        from mtpctl.recipe.loading import load_recipe

        with tempfile.TemporaryDirectory(prefix="mtpctl-") as scratch:
            file = Path(scratch) / "folder.yaml"
            file.write_text(yaml12.dump({"name": "folder", "model": {"path": str(folder)}}), encoding="utf-8")
            yield Target(load_recipe(file, overlays=overlays, sets=sets), weights=from_weights or str(folder))
        return
    resolved = load_target(target, overlays, sets)
    yield Target(resolved.loaded, resolved.run, from_weights or resolved.weights, resolved.changed)


@dataclass(frozen=True)
class StartWeights:
    """The weights that a new run begins from: the Hugging Face folder `base`, or a checkpoint of the model `base`.

    `name`: describes them in messages. `adapter`: the checkpoint is of an adapter for `base`.
    """

    name: str
    base: str
    checkpoint: Path | None = None
    adapter: bool = False

    def sets(self, folder: Path | None = None) -> list[str]:
        """The values of `--set` for a recipe with these weights, or with the `folder` that they were converted to."""
        from mtpctl.recipe.model import ModelConfig, has_drafter

        path = str(folder or self.base)
        drafter_sets = ["model.drafter=null"] if has_drafter(ModelConfig(path=path)) else []
        return [f"model.path={json.dumps(path, ensure_ascii=False)}", "model.config=null", "model.init=weights", *drafter_sets]


def start_weights(text: str) -> StartWeights:
    """The weights that `train --from` names. Raises UserError for anything but a run with a checkpoint, a checkpoint, or a folder."""
    folder = Path(text).expanduser().absolute()
    if (folder / WEIGHTS_FILE).is_file():
        return StartWeights(text, str(folder))
    from mtpctl.controller.state import resolve_checkpoint
    from mtpctl.jobs import print_progress
    from mtpctl.recipe.loading import load_recipe

    run, checkpoint, _ = resolve_checkpoint(str(folder), f"a folder of weights ({WEIGHTS_FILE})", report=print_progress)
    recipe = load_recipe(_recipe_file(run)).recipe
    model, adapter = recipe.model, recipe.train.lora is not None
    base = model.folder_in(run) or model.path
    return StartWeights(f"{text}, {checkpoint.name}" if checkpoint != folder else text, str(base), checkpoint, adapter)


def has_checkpoint(run: Path) -> bool:
    from mtpctl.checkpoint.finding import newest_checkpoint

    return newest_checkpoint(run / "checkpoints") is not None


def _location_keys(recipe: Recipe, run: Path) -> dict[str, str]:
    """The values of `run_dir` and `name` for a run that was moved or copied; empty if its recipe is still correct.

    A `run_dir` that ends with `{name}` keeps this form, and `name` is set to the folder's name. So `--set name=NAME` creates another run.
    """
    from mtpctl.recipe.schema import NAME_PATTERN

    if recipe.run_path.absolute() == run:
        return {}
    if Path(recipe.run_dir).name != "{name}" or not re.fullmatch(NAME_PATTERN, run.name):
        return {"run_dir": str(run)}
    keys = {} if run.name == recipe.name else {"name": run.name}
    if recipe.model_copy(update=keys).run_path.absolute() != run:
        keys["run_dir"] = f"{run.parent}/{{name}}"
    return keys


def _moved_start(recipe: Recipe, run: Path) -> str | None:
    """The path of the folder `START_FOLDER` if the run began from it and was moved; None if its recipe is still correct."""
    recorded, current = recipe.model.path, run / START_FOLDER
    if (
        recorded is None
        or Path(recorded).name != START_FOLDER
        or Path(recorded).absolute() == current
        or not (current / WEIGHTS_FILE).is_file()
    ):
        return None
    return str(current)


def _recipe_file(run: Path) -> Path:
    from mtpctl.telemetry.run_directory import RECIPE

    return run / RECIPE


def _value_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def training_target(
    recipe: str | None, start: str | None, overlays: Sequence[str], sets: Sequence[str], converted_folder: Path | None = None
) -> tuple[Target, StartWeights | None]:
    """The target of `train` and the weights of `--from`, if any. `converted_folder`: the folder to which they were converted."""
    if start is None:
        if recipe is None:
            raise UserError("RECIPE: name a recipe or a run, or a run with --from")
        return load_recipe_or_run(recipe, overlays, sets), None
    weights = start_weights(start)
    if recipe is None and (run := find_run(start)) is None:
        raise UserError(f"--from: {start} contains no recipe; name a recipe before it")
    name = recipe or str(run)
    target = load_recipe_or_run(name, overlays, sets)
    run_path = target.recipe.run_path
    if find_run(run_path) is not None:
        by_name = "--set name=NAME or " if "{name}" in target.recipe.run_dir else ""
        raise UserError(f"--from: {run_path} is an existing run; name a new one with {by_name}--set run_dir=FOLDER")
    loaded = load_recipe_or_run(name, overlays, [*sets, *weights.sets(converted_folder)]).loaded
    return Target(loaded, target.run, changed=target.changed), weights


def convert_start(weights: StartWeights, run: Path) -> tuple[Path, int]:
    """Convert a checkpoint to a Hugging Face folder in the run directory, in another process. Returns the folder and the exit code."""
    folder = run / START_FOLDER
    run.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mtpctl", "convert-hf", str(weights.checkpoint), str(folder), "--force"]
    if weights.adapter:
        command.append("--merge")
    return folder, subprocess.run(command, stdout=sys.stderr).returncode
