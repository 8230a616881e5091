"""What a notebook or a script needs: load a recipe, run it, and read runs. It is imported from `mtpctl`, and imports nothing heavy.

from mtpctl import Run, find_runs, load_recipe, train

recipe = load_recipe("tiny_mtp", sets=["train.rl.steps=20"])
run = train(recipe)
print(run.summary()["eval/accuracy"], run.samples(worst=True)[0]["reward"])
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from mtpctl.errors import (
    ClusterResources,
    EnvironmentMissing,
    MtpctlError,
    RuntimeFailure,
    ThresholdMissed,
    UserError,
)
from mtpctl.signals import STOP_SIGNALS, exit_code

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe
    from mtpctl.telemetry.history import Event, History
    from mtpctl.telemetry.runs import State
    from mtpctl.telemetry.sample_log import SampleRow

_ERRORS = {error.exit_code: error for error in (UserError, EnvironmentMissing, ClusterResources, RuntimeFailure, ThresholdMissed)}
_STOPPED = tuple(map(exit_code, STOP_SIGNALS))


class Change(TypedDict):
    """A metric before and after RL."""

    before: float
    after: float


class Run:
    """A run directory, for reading. What it says is read anew at each call, so that a run that goes on can be followed."""

    def __init__(self, path: str | Path) -> None:
        """Raises UserError where `path` is no run directory."""
        from mtpctl.jobs.targets import run_of

        self.path = Path(path).expanduser().absolute()
        if run_of(self.path) != self.path:
            raise UserError(f"{path} is no run directory (recipe.resolved.yaml)")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run went on with last. Raises UserError where it is of a release with other keys."""
        return load_recipe(self.path, check=False)

    @property
    def state(self) -> State:
        """`running`, `done`, `failed`, `stopped`, `broken off` (killed) or `empty`."""
        from mtpctl.telemetry.runs import describe_run

        return describe_run(self.path).state

    @property
    def history(self) -> History:
        """All rows, repeated steps once, and all events."""
        from mtpctl.telemetry.history import load_history

        return load_history(self.path)

    @property
    def events(self) -> list[Event]:
        """What happened beside the steps, in the order of time: restarts, alarms, errors."""
        return self.history.events

    def metrics(self, phase: str | None = None) -> list[dict[str, object]]:
        """A row a step, with `phase`, `step`, `time` and every metric: what `pandas.DataFrame` takes. `phase`: `sft` or `rl` alone."""
        rows = [row for row in self.history.rows if phase in (None, row.phase)]
        return [{"phase": row.phase, "step": row.step, "time": row.time, **row.metrics} for row in rows]

    def series(self, name: str, phase: str = "rl") -> list[tuple[int, float]]:
        """(step, value) of one metric in a phase; empty where it has none."""
        return self.history.series(name, phase)

    def summary(self) -> dict[str, Change]:
        """The headline metrics before and after RL, as the run prints them at its end; empty for fewer than two steps."""
        from mtpctl.telemetry.summary import before_and_after

        found: dict[str, Change] = {}
        for row in before_and_after(self.history):
            found.setdefault(row.name, Change(before=row.before, after=row.after))
        return found

    def samples(self, *, step: int | None = None, worst: bool = False) -> list[SampleRow]:
        """What the model wrote, in the order of the steps; `worst`: by reward, the lowest first, without those that have none."""
        from mtpctl.telemetry.sample_log import read_samples

        rows = [row for row in read_samples(self.path) if step in (None, row["step"])]
        return sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"] or 0.0) if worst else rows

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run's page, by default `report.html` in its directory. Returns its path."""
        from mtpctl.telemetry.report import write_report

        return write_report(self.path, out)


def load_recipe(recipe: str | Path, *, overlays: Sequence[str | Path] = (), sets: Sequence[str] = (), check: bool = True) -> Recipe:
    """A recipe by its file or name, or that of a run, with overlays and `KEY=VALUE` on top, as the commands take them.

    Raises UserError for what is wrong; `check=False` leaves out whether its keys fit together and whether what they name is there.
    """
    from mtpctl.jobs.targets import load_target
    from mtpctl.recipe.checks import validate

    loaded = load_target(recipe, list(map(str, overlays)), sets).recipe
    if check:
        validate(loaded)
    return loaded


def find_runs(folder: str | Path = "runs") -> list[Run]:
    """The runs below a folder, the newest first."""
    from mtpctl.telemetry.runs import find_runs as found

    return [Run(each.path) for each in found(Path(folder))]


def train(
    recipe: Recipe | Run | str | Path,
    *,
    overlays: Sequence[str | Path] = (),
    sets: Sequence[str] = (),
    start: str | Path | Run | None = None,
) -> Run:
    """What `mtpctl train` does, in a process of its own; its lines are printed as they come. Returns the run once it has ended.

    `start` is `--from`: the weights that a new run begins from. An interrupt stops the run after its step, with a checkpoint, and is raised
    again. Raises the error that the command ends with: UserError for a mistake, EnvironmentMissing, ClusterResources, RuntimeFailure.
    """
    with tempfile.TemporaryDirectory(prefix="mtpctl-") as made:
        if not isinstance(recipe, Run | str | Path):
            from mtpctl.recipe.loading import dump_resolved

            file = Path(made) / "recipe.yaml"
            file.write_text(dump_resolved(recipe), encoding="utf-8")
            recipe = file
        arguments = [str(recipe.path if isinstance(recipe, Run) else recipe), "--plain"]
        arguments += [part for overlay in overlays for part in ("--overlay", str(overlay))]
        arguments += [part for each in sets for part in ("--set", each)]
        if start is not None:
            arguments += ["--from", str(start.path if isinstance(start, Run) else start)]
        place = load_recipe(arguments[0], overlays=overlays, sets=sets, check=False).run_path
        _follow([sys.executable, "-m", "mtpctl", "train", *arguments])
    return Run(place)


def _follow(command: list[str]) -> None:
    """Run the command in a session of its own, so that an interrupt of the notebook reaches it once, and print its lines."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    assert child.stdout is not None
    said, interrupted = "", False
    while True:
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                said = line.removeprefix("error: ").strip() if line.startswith("error: ") else said
            code = child.wait()
            break
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            interrupted = True
    if interrupted and code in (0, *_STOPPED):
        raise KeyboardInterrupt
    if code in _STOPPED:
        raise RuntimeFailure("the run was stopped on request; train again to continue")
    if code:
        raise _ERRORS.get(code, MtpctlError)(said or f"mtpctl train ended with exit code {code}")
