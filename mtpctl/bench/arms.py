"""Arms of an experiment: one recipe trained several times from the same warm start, each time with a few keys changed.

Every arm is a complete run of `mtpctl train` in a separate process, and is evaluated from its run directory. If the recipe has a supervised
stage, that stage runs once for each seed. Its result is converted to a Hugging Face folder, drafter included, and every arm starts from
this folder.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from mtpctl.controller.state import read_ended_stages
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.jobs.targets import StartWeights
from mtpctl.plan.placement import Placement, place
from mtpctl.recipe.checks import validate
from mtpctl.recipe.loading import dump_resolved, flatten, load_recipe
from mtpctl.recipe.model import absolute_path
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.metrics_file import History, load_history
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.versions import Versions

Report = Callable[[str], None]
WARM_START = "warm-start"
KEYS_IRRELEVANT_TO_SFT = {
    ("train", "rl"),
    ("train", "eval_every"),
    ("train", "keep_checkpoints"),
    ("rollout",),
    ("async",),
    ("sync",),
    ("logprob",),
    ("cluster",),
    ("telemetry",),
}
"""Sections and keys of a recipe that do not affect the weights after a supervised stage."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A variant of the recipe. meaning: a short description. sets: the changed keys, as for `--set`."""

    name: str
    meaning: str
    sets: tuple[str, ...] = ()


def select_arms(arms: Sequence[Arm], texts: Sequence[str] | None, *, custom: bool = False) -> list[Arm]:
    """Select the arms that `texts` name, in the order of `arms`; all arms if `texts` is empty.

    custom: a text may also define an arm as `NAME: KEY=VALUE …`, quoted as in a shell; `NAME:` changes no key. Custom arms come last.
    Raises UserError if a name is unknown or a definition is invalid.
    """
    custom_arms: list[Arm] = []
    names: list[str] = []
    for text in texts or ():
        name, colon, definition = text.partition(":")
        if not (custom and colon):
            names.append(text)
            continue
        if not re.fullmatch(r"[\w.-]*\w", name) or name in {arm.name for arm in (*arms, *custom_arms)} | {WARM_START}:
            raise UserError(f"--arm {text!r}: {name!r} cannot name a custom arm; use an unused name of letters, digits, ., - and _")
        try:
            sets = tuple(shlex.split(definition))
        except ValueError as error:
            raise UserError(f"--arm {text!r}: {str(error).lower()}; write NAME: KEY=VALUE …, quoted as in a shell") from error
        custom_arms.append(Arm(name, " ".join(sets) or "the recipe as it is", sets))
    if unknown := set(names) - {arm.name for arm in arms}:
        hint = "; define a custom one as NAME: KEY=VALUE …" if custom else ""
        raise UserError(f"--arm: there is no {sorted(unknown)[0]}; the arms are {', '.join(arm.name for arm in arms)}{hint}")
    return [arm for arm in arms if arm.name in names or not texts] + custom_arms


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm's run with one seed. requested_updates: RL updates in its recipe; an unfinished run has completed fewer.

    old_logprobs: `train.rl.old_logprobs` with `auto` resolved.
    """

    arm: Arm
    seed: int
    history: History
    placement: Placement
    requested_updates: int
    versions: Versions | None = None
    old_logprobs: Literal["recompute", "behaviour"] = "recompute"
    draft_method: Literal["greedy", "probabilistic"] = "greedy"

    @property
    def updates(self) -> int:
        """Number of completed RL updates."""
        return sum(row.phase == "rl" and "timing_s/step" in row.metrics for row in self.history.rows)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A recipe with the options that all arms share, and the folder for their runs."""

    recipe: str
    overlays: Sequence[str]
    sets: Sequence[str]
    out: Path

    def load(self, run: str, seed: int, sets: Sequence[str] = ()) -> Recipe:
        """The recipe of one run. Raises UserError for inconsistent settings."""
        run_sets = [f"run_dir={self.out / run}", f"name={run}", f"seed={seed}", "telemetry.tensorboard=false"]
        recipe = load_recipe(self.recipe, overlays=list(self.overlays), sets=[*self.sets, *sets, *run_sets]).recipe
        validate(recipe)
        return recipe

    def run(self, arms: Sequence[Arm], seeds: Sequence[int], *, concurrent: bool = False, report: Report) -> list[Outcome]:
        """Train every arm with every seed. Runs in `out` that have ended are not repeated. Returns the outcomes.

        concurrent: run the arms of a seed concurrently. Set it only if no measurement depends on time.

        Raises:
            UserError: if the recipe does not support an arm, or if `out` has a finished run of another recipe.
            RuntimeFailure: if a run failed, with its last line of output.
        """
        for arm in arms:
            if "rl" not in self.load(arm.name, 0, arm.sets).train.stages:
                raise UserError("train.stages: the arms differ in RL; choose a recipe whose stages include rl")
        self.out.mkdir(parents=True, exist_ok=True)
        outcomes = []
        for seed in seeds:
            warm_start_sets = self._warm_start(seed, report)
            recipes = [self.load(f"{arm.name}-{seed}", seed, [*arm.sets, *warm_start_sets]) for arm in arms]
            for recipe in recipes:
                # An unfinished run resumes, also to a larger number of updates.
                _check_recipe(recipe, ignored_keys=() if _has_ended(recipe) else {("train", "rl", "steps")})
            for batch in [range(len(arms))] if concurrent else [[index] for index in range(len(arms))]:
                report(f"seed {seed}: " + ", ".join(arms[index].name for index in batch))
                _train_all([recipes[index] for index in batch])
            for arm, recipe in zip(arms, recipes, strict=True):
                outcomes.append(_load_outcome(arm, seed, recipe, recipe.run_path))
        return outcomes

    def load_outcomes(self, arms: Sequence[Arm], seeds: Sequence[int] | None, *, report: Report) -> list[Outcome]:
        """The outcomes of the existing runs of these arms in `out`, finished or not. seeds: None for all seeds in `out`.

        Runs without an update are reported and skipped. Raises UserError if no run remains.
        """
        outcomes = []
        for seed in sorted(self._find_seeds(arms)) if seeds is None else seeds:
            for arm in arms:
                run = RunDirectory(self.out / f"{arm.name}-{seed}")
                if not run.versions.exists():  # The run has not passed its checks.
                    continue
                outcome = _load_outcome(arm, seed, load_recipe(str(run.recipe)).recipe, run.path)
                report(
                    f"{run.path.name}: {format_updates(outcome.updates, outcome.requested_updates)} updates"
                    + ("" if outcome.updates else ", skipped")
                )
                outcomes += [outcome] if outcome.updates else []
        if not outcomes:
            names = ", ".join(arm.name for arm in arms)
            raise UserError(f"--out {self.out}: contains no run with an update of the arms {names}; remove --measured-only to start them")
        return outcomes

    def _find_seeds(self, arms: Sequence[Arm]) -> set[int]:
        endings = [path.name.removeprefix(f"{arm.name}-") for arm in arms for path in self.out.glob(f"{arm.name}-*/")]
        return {int(ending) for ending in endings if ending.isdecimal()}

    def _warm_start(self, seed: int, report: Report) -> list[str]:
        """Run the stages before RL, unless `out` has their result. Returns the `--set` texts with which a run starts from that result."""
        run = f"{WARM_START}-{seed}"
        recipe = self.load(run, seed)
        stages = recipe.train.stages[: recipe.train.stages.index("rl")]
        if not stages:
            return []
        folder = self.out / f"{run}.hf"
        train = recipe.train.model_copy(update={"stages": stages, "keep_checkpoints": max(1, recipe.train.keep_checkpoints)})
        start_recipe = recipe.model_copy(update={"train": train})
        _check_recipe(start_recipe, folder, ignored_keys=KEYS_IRRELEVANT_TO_SFT)
        if not folder.exists():
            report(f"seed {seed}: warm start ({', '.join(stages)})")
            _train_all([start_recipe])
            command = ["convert-hf", str(recipe.run_path), str(folder), *(["--merge"] if recipe.train.lora else [])]
            with _log_of(recipe.run_path).open("ab") as log:
                _wait_for([(recipe.run_path, _start_command(command, log))])
        return [*StartWeights(run, str(folder)).sets(), "train.stages=[rl]"]


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def format_updates(updates: int, requested: int) -> str:
    """Format the number of updates: `11 of 30`, or `30` if the run completed all of them."""
    return str(updates) if updates >= requested else f"{updates} of {requested}"


def _load_outcome(arm: Arm, seed: int, recipe: Recipe, path: Path) -> Outcome:
    versions = json.loads(RunDirectory(path).versions.read_text())
    return Outcome(
        arm,
        seed,
        load_history(path),
        place(recipe),
        recipe.train.rl.steps,
        versions,
        recipe.old_logprobs,
        recipe.rollout.speculation.draft_method,
    )


def _train_all(recipes: Sequence[Recipe]) -> None:
    """Run the recipes concurrently until all have ended. Skips recipes whose runs have already ended."""
    running = []
    for recipe in recipes:
        path = recipe.run_path
        if _has_ended(recipe):
            continue
        file = path.with_name(f"{path.name}.yaml")
        file.write_text(dump_resolved(recipe))
        with _log_of(path).open("ab") as log:
            running.append((path, _start_command(["train", str(file), "--plain"], log)))
    _wait_for(running)


def _has_ended(recipe: Recipe) -> bool:
    """Whether the run has ended, according to its checkpoint or, if it writes none, to its number of RL updates."""
    train, path = recipe.train, recipe.run_path
    if train.keep_checkpoints or train.stages != ["rl"] or not RunDirectory(path).recipe.exists():
        return set(train.stages) <= set(read_ended_stages(path / "checkpoints"))
    return load_history(path).last_step("rl") >= train.rl.steps


def _check_recipe(recipe: Recipe, *derived: Path, ignored_keys: Collection[tuple[str, ...]] = ()) -> None:
    """Raise UserError if the existing run has another recipe: its figures would be reported for this one.

    derived: folders created from the run, which the message names. ignored_keys: sections and keys in which the recipes may differ.
    """
    file = RunDirectory(recipe.run_path).recipe
    if not file.exists():
        return
    existing_settings, requested_settings = (_flatten_settings(config) for config in (load_recipe(str(file)).recipe, recipe))
    # A key may be in one of them only: an optional section is either one key with the value None, or the keys of its fields.
    for key in dict.fromkeys([*requested_settings, *existing_settings]):
        existing, value = (settings.get(key, _ABSENT) for settings in (existing_settings, requested_settings))
        if existing != value and not any(key[:depth] in ignored_keys for depth in (1, 2, 3)):
            raise UserError(
                f"--out: {recipe.run_path} has {'.'.join(key)} {existing!r}, but {value!r} is requested; "
                f"name another --out, or remove {' and '.join(['that run', *map(str, derived)])}"
            )


def _flatten_settings(recipe: Recipe) -> dict[tuple[str, ...], object]:
    """All values of a recipe by path, except the run directory."""
    values = flatten(recipe.model_dump(mode="json", by_alias=True))
    return {key: value for key, value in values.items() if key != ("run_dir",)} | {("model", "path"): absolute_path(recipe.model.path)}


def _log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def _start_command(arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mtpctl", *arguments]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _wait_for(running: Sequence[tuple[Path, subprocess.Popen[bytes]]]) -> None:
    """Wait for all processes. Raises RuntimeFailure if one failed, with its last line of output."""
    try:
        failed_runs = [path for path, process in running if process.wait() != 0]
    finally:
        remaining = [process for _, process in running if process.poll() is None]
        for process in remaining:
            process.terminate()
        for process in remaining:
            process.wait()
    if failed_runs:
        log = _log_of(failed_runs[0])
        lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise RuntimeFailure(f"{failed_runs[0].name}: {lines[-1].removeprefix('error: ')} (full output in {log})")
