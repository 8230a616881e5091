"""The targets of commands: a recipe, a run, a checkpoint of a run, and for some commands a folder of weights."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.errors import UserError

if TYPE_CHECKING:
    from mtpctl.recipe.loading import Loaded
    from mtpctl.recipe.schema import Recipe

CHECKPOINT, WEIGHTS = "run.json", "config.json"
START = "start"
"""Folder of a run directory with the weights that the run began from, where those were converted from a checkpoint."""


@dataclass(frozen=True)
class Target:
    """A recipe with overlays and sets applied.

    run: the run that the recipe is from. changed: keys in which it differs from that run's. start: the weights, where they are not the
    newest of the recipe's run directory.
    """

    loaded: Loaded
    run: Path | None = None
    start: str | None = None
    changed: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def told(self) -> str:
        """A line that says which run resumes with which changes, or whose recipe a new run takes."""
        assert self.run is not None
        with_what = "with " + ", ".join(self.changed) if self.changed else "with the recipe that it had"
        if self.recipe.run_path.absolute() == self.run:
            return f"{self.run} goes on {with_what}"
        return f"{self.recipe.run_path} begins with the recipe of {self.run}" + (f" and {', '.join(self.changed)}" if self.changed else "")


def run_of(target: str | Path) -> Path | None:
    """The run directory that a run or a checkpoint stands for; None for anything else."""
    folder = Path(target).expanduser().absolute()
    run = folder.parent.parent if (folder / CHECKPOINT).is_file() else folder
    return run if _recipe_of(run).is_file() else None


def load_target(target: str | Path, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> Target:
    """The recipe that `target` stands for, with overlays and sets on top.

    A run's directory is the one that it lies in now, so that a run that was moved or copied resumes. Raises UserError as `load_recipe`
    does, and for a folder that is no run.
    """
    from mtpctl.recipe.loading import flatten, load_recipe

    folder, run = Path(target).expanduser(), run_of(target)
    if run is None:
        if (folder / WEIGHTS).is_file():
            raise UserError(f"{target} is a folder of weights, not a recipe; name a recipe, and this folder by --set model.path={target}")
        if folder.is_dir():
            kinds = f"a run ({_recipe_of(folder).name}), nor a checkpoint ({CHECKPOINT}), nor a folder of weights ({WEIGHTS})"
            raise UserError(f"{target} is neither {kinds}; name one of these, or a recipe file")
        return Target(load_recipe(target, overlays=overlays, sets=sets))
    source = _recipe_of(run)
    had = load_recipe(source)
    here = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in _placed(had.recipe, run).items()]
    if (began := _began_from(had.recipe, run)) is not None:
        here.append(f"model.path={json.dumps(began, ensure_ascii=False)}")
    loaded = load_recipe(source, overlays=overlays, sets=[*here, *sets])
    before, now = (flatten(each.recipe.model_dump(mode="json", by_alias=True)) for each in (had, loaded))
    # A new place of the run is no change that the user asked for.
    before |= {tuple(key.split(".")): json.loads(value) for key, _, value in (each.partition("=") for each in here)}
    asked = [key for key in now if now[key] != before.get(key)]
    changed = tuple(f"{'.'.join(key)}: {_shown(before.get(key))} → {_shown(now[key])}" for key in asked)
    return Target(loaded, run, str(folder.absolute()) if run != folder.absolute() else None, changed)


@contextlib.contextmanager
def target_with_weights(target: str, start: str | None, overlays: Sequence[str], sets: Sequence[str]) -> Iterator[Target]:
    """`load_target`, also for a folder of weights, which has no recipe but overlays and sets.

    `start` is what `--from` names; it takes precedence over the weights that the target stands for.
    """
    folder = Path(target).absolute()
    if (folder / WEIGHTS).is_file():
        from mtpctl.recipe import yaml12
        from mtpctl.recipe.loading import load_recipe

        with tempfile.TemporaryDirectory(prefix="mtpctl-") as made:
            file = Path(made) / "folder.yaml"
            file.write_text(yaml12.dump({"name": "folder", "model": {"path": str(folder)}}), encoding="utf-8")
            yield Target(load_recipe(file, overlays=overlays, sets=sets), start=start or str(folder))
        return
    found = load_target(target, overlays, sets)
    yield Target(found.loaded, found.run, start or found.start, found.changed)


@dataclass(frozen=True)
class StartWeights:
    """The weights that a new run begins from: a Hugging Face folder, or a checkpoint (of an adapter) over the model `over`."""

    told: str
    over: str
    checkpoint: Path | None = None
    adapter: bool = False

    def sets(self, folder: Path | None = None) -> list[str]:
        """The `--set` texts with which a recipe takes these weights, or those of the `folder` that they were converted to."""
        path = json.dumps(str(folder or self.over), ensure_ascii=False)
        return [f"model.path={path}", "model.config=null", "model.init=weights"]


def start_weights(text: str) -> StartWeights:
    """The weights that `train --from` names. Raises UserError for anything but a run with a checkpoint, a checkpoint, or a folder."""
    folder = Path(text).expanduser().absolute()
    if (folder / WEIGHTS).is_file():
        return StartWeights(text, str(folder))
    from mtpctl.controller.state import version_named
    from mtpctl.jobs.progress import print_progress
    from mtpctl.recipe.loading import load_recipe

    run, checkpoint, _ = version_named(str(folder), f"a folder of weights ({WEIGHTS})", tell=print_progress)
    recipe = load_recipe(_recipe_of(run)).recipe
    model, adapter = recipe.model, recipe.train.lora is not None
    over = run / "model" if model.drawn else model.path
    return StartWeights(f"{text}, {checkpoint.name}" if checkpoint != folder else text, str(over), checkpoint, adapter)


def has_checkpoint(run: Path) -> bool:
    """Whether the run has a checkpoint to take weights from."""
    from mtpctl.checkpoint.finding import newest

    return newest(run / "checkpoints") is not None


def _placed(recipe: Recipe, run: Path) -> dict[str, str]:
    """The keys that name the place of a run that was moved or copied; none where its recipe still does.

    Where `{name}` was the last part of the directory it stays so, under the folder's name: then `--set name=NAME` makes another run.
    """
    from mtpctl.recipe.schema import NAMES

    if recipe.run_path.absolute() == run:
        return {}
    if Path(recipe.run_dir).name != "{name}" or not re.fullmatch(NAMES, run.name):
        return {"run_dir": str(run)}
    keys = {} if run.name == recipe.name else {"name": run.name}
    if recipe.model_copy(update=keys).run_path.absolute() != run:
        keys["run_dir"] = f"{run.parent}/{{name}}"
    return keys


def _began_from(recipe: Recipe, run: Path) -> str | None:
    """The weights in a run directory that the run began from, where the run was moved; None where they lie as its recipe says."""
    there, here = recipe.model.path, run / START
    if there is None or Path(there).name != START or Path(there).absolute() == here or not (here / WEIGHTS).is_file():
        return None
    return str(here)


def _recipe_of(run: Path) -> Path:
    from mtpctl.telemetry.run_directory import RECIPE

    return run / RECIPE


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
