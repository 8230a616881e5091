"""Arms of one experiment: the same recipe trained several times from one warm start, each time with a few keys changed.

Every arm is a whole run in a process of its own, through the same command that a user types, and what it did is read
from its run directory. The supervised stage, where the recipe has one, runs once for each seed; its checkpoint is copied
into every arm's directory, which then resumes at RL.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpctl.plan import Placement, place
from mtpctl.recipe import Recipe, RuntimeFailure, UserError, dump_resolved, load_recipe, validate
from mtpctl.telemetry import History, load_history

Say = Callable[[str], None]
WARM = "warm-start"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of running the recipe: what is changed (`--set` texts), and what that means in a few words."""

    name: str
    meaning: str
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm's run with one seed."""

    arm: Arm
    seed: int
    history: History
    placement: Placement


@dataclass(frozen=True, slots=True)
class Experiment:
    """A recipe with the options that every arm shares, and the folder that all runs go to."""

    recipe: str
    overlays: Sequence[str]
    sets: Sequence[str]
    out: Path

    def load(self, run: str, seed: int, sets: Sequence[str] = ()) -> Recipe:
        """The recipe of one run. Raises UserError for what does not fit together."""
        own = [f"run_dir={self.out / run}", f"name={run}", f"seed={seed}", "telemetry.tensorboard=false"]
        recipe = load_recipe(self.recipe, overlays=list(self.overlays), sets=[*self.sets, *sets, *own]).recipe
        validate(recipe)
        return recipe

    def run(self, arms: Sequence[Arm], seeds: Sequence[int], *, together: bool = False, say: Say) -> list[Outcome]:
        """Train every arm with every seed, or take what is in `out` already, and read what came of it.

        `together` runs the arms of a seed at once: for what does not depend on time. Raises UserError before anything is
        started for an arm that the recipe does not allow, RuntimeFailure with the last line of a run that failed.
        """
        planned = [(arm, seed, self.load(f"{arm.name}-{seed}", seed, arm.sets)) for seed in seeds for arm in arms]
        if not all("rl" in recipe.train.stages for _, _, recipe in planned):
            raise UserError("train.stages: the arms differ in RL; give a recipe whose stages hold rl")
        self.out.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            self._warm_up(seed, say)
            mine = [(arm, recipe) for arm, of, recipe in planned if of == seed]
            for batch in [mine] if together else [[one] for one in mine]:
                say(f"seed {seed}: " + ", ".join(arm.name for arm, _ in batch))
                _train([recipe for _, recipe in batch])
        return [Outcome(arm, seed, load_history(recipe.run_path), place(recipe)) for arm, seed, recipe in planned]

    def _warm_up(self, seed: int, say: Say) -> None:
        """The supervised stage, once; every arm's directory begins with what it left."""
        recipe = self.load(f"{WARM}-{seed}", seed)
        if "sft" not in recipe.train.stages:
            return
        say(f"seed {seed}: supervised warm start")
        _train([recipe.model_copy(update={"train": recipe.train.model_copy(update={"stages": ["sft"]})})])


def _train(recipes: Sequence[Recipe]) -> None:
    """Run each to its end, all at once."""
    running = []
    for recipe in recipes:
        home = recipe.run_path
        _take_warm_start(home, recipe)
        file = home.with_suffix(".yaml")
        file.write_text(dump_resolved(recipe))
        with home.with_suffix(".log").open("ab") as log:
            command = [sys.executable, "-m", "mtpctl", "train", str(file), "--plain"]
            running.append((home, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)))
    try:
        failed = [home for home, process in running if process.wait() != 0]
    finally:
        for _, process in running:
            if process.poll() is None:
                process.terminate()
    if failed:
        lines = failed[0].with_suffix(".log").read_text().strip().splitlines() or ["it said nothing"]
        raise RuntimeFailure(f"{failed[0].name}: {lines[-1].removeprefix('error: ')} (all of it in {failed[0].with_suffix('.log')})")


def _take_warm_start(home: Path, recipe: Recipe) -> None:
    warm = home.parent / f"{WARM}-{recipe.seed}"
    if home == warm or home.exists() or not warm.exists():
        return
    aside = home.with_name(f".{home.name}.making")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for part in ("model", "tokenizer", "checkpoints"):
        if (warm / part).exists():
            shutil.copytree(warm / part, aside / part)
    aside.rename(home)
