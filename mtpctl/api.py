"""The API for notebooks and scripts: load a recipe, run it, and read runs. Importing it imports no heavy packages.

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

from mtpctl.errors import ClusterResources, MtpctlError, PrerequisiteMissing, RuntimeFailure, ThresholdMissed, UserError
from mtpctl.signals import STOP_SIGNALS, exit_code

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe
    from mtpctl.telemetry.metrics_file import Event, History
    from mtpctl.telemetry.runs import State
    from mtpctl.telemetry.sample_log import SampleRow

_ERRORS = {error.exit_code: error for error in (UserError, PrerequisiteMissing, ClusterResources, RuntimeFailure, ThresholdMissed)}
_STOP_CODES = tuple(map(exit_code, STOP_SIGNALS))


class Change(TypedDict):
    """A metric before and after RL."""

    before: float
    after: float


class Run:
    """Read access to a run directory. Every call reads the files again, so a run can be followed while it is in progress."""

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if `path` is not a run directory."""
        from mtpctl.jobs.targets import find_run

        self.path = Path(path).expanduser().absolute()
        if find_run(self.path) != self.path:
            raise UserError(f"{path} is not a run directory (recipe.resolved.yaml)")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def recipe(self) -> Recipe:
        """The recipe of the latest start. Raises UserError if it was written by a release with other keys."""
        return load_recipe(self.path, check=False)

    @property
    def state(self) -> State:
        """`running`, `done`, `failed`, `stopped`, `broken off` (ended without logging it: killed), `empty` or `unreadable`."""
        from mtpctl.telemetry.runs import describe_run

        return describe_run(self.path).state

    @property
    def history(self) -> History:
        """The metrics of all steps (without steps that were repeated after a restart), and all events."""
        from mtpctl.telemetry.metrics_file import load_history

        return load_history(self.path)

    @property
    def events(self) -> list[Event]:
        """Events in chronological order: restarts, alarms, errors."""
        return self.history.events

    def metrics(self, phase: str | None = None) -> list[dict[str, object]]:
        """One row per step with `phase`, `step`, `time` and all metrics, for `pandas.DataFrame`. `phase`: `sft` or `rl`; None for both."""
        rows = [row for row in self.history.rows if phase in (None, row.phase)]
        return [{"phase": row.phase, "step": row.step, "time": row.time, **row.metrics} for row in rows]

    def series(self, name: str, phase: str = "rl") -> list[tuple[int, float]]:
        """(step, value) pairs of one metric in a phase."""
        return self.history.series(name, phase)

    def summary(self) -> dict[str, Change]:
        """The main metrics before and after RL, as printed at the end of the run. Metrics logged less than twice are left out."""
        from mtpctl.telemetry.summary import before_and_after

        changes: dict[str, Change] = {}
        for row in before_and_after(self.history):
            changes.setdefault(row.name, Change(before=row.before, after=row.after))
        return changes

    def samples(self, *, step: int | None = None, worst: bool = False) -> list[SampleRow]:
        """The logged responses in order of steps. `worst`: only those with a reward, lowest reward first."""
        from mtpctl.telemetry.sample_log import read_samples

        rows = [row for row in read_samples(self.path) if step in (None, row["step"])]
        if not worst:
            return rows
        return sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"] or 0.0)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run's report, by default `report.html` in its directory. Returns its path."""
        from mtpctl.telemetry.report import write_report

        return write_report(self.path, out)


def load_recipe(recipe: str | Path, *, overlays: Sequence[str | Path] = (), sets: Sequence[str] = (), check: bool = True) -> Recipe:
    """Load a recipe by file, by name or from a run, with overlays and `KEY=VALUE` overrides, as on the command line.

    Raises UserError if the recipe is invalid. check: also check combinations of keys, and the files that they name.
    """
    from mtpctl.jobs.targets import load_target
    from mtpctl.recipe.checks import validate

    loaded = load_target(recipe, list(map(str, overlays)), sets).recipe
    if check:
        validate(loaded)
    return loaded


def find_runs(folder: str | Path = "runs") -> list[Run]:
    """All runs below a folder, newest first."""
    from mtpctl.telemetry import runs

    return [Run(overview.path) for overview in runs.find_runs(Path(folder))]


def train(
    recipe: Recipe | Run | str | Path,
    *,
    overlays: Sequence[str | Path] = (),
    sets: Sequence[str] = (),
    start: str | Path | Run | None = None,
) -> Run:
    """Run `mtpctl train` in a separate process and print its output. Returns the ended run; raises the run's error if it failed.

    KeyboardInterrupt stops the run after the current step, with a checkpoint, and is raised again once the run has stopped.

    Args:
        recipe: a recipe, its file or name, or a run to continue.
        overlays: recipe files that are merged into the recipe.
        sets: `KEY=VALUE` overrides.
        start: the initial weights of a new run (`--from`).
    """
    with tempfile.TemporaryDirectory(prefix="mtpctl-") as folder:
        if not isinstance(recipe, Run | str | Path):
            from mtpctl.recipe.loading import dump_resolved

            file = Path(folder) / "recipe.yaml"
            file.write_text(dump_resolved(recipe), encoding="utf-8")
            recipe = file
        arguments = [str(recipe.path if isinstance(recipe, Run) else recipe), "--plain"]
        arguments += [part for overlay in overlays for part in ("--overlay", str(overlay))]
        arguments += [part for text in sets for part in ("--set", text)]
        if start is not None:
            arguments += ["--from", str(start.path if isinstance(start, Run) else start)]
        run_path = load_recipe(arguments[0], overlays=overlays, sets=sets, check=False).run_path
        _follow([sys.executable, "-m", "mtpctl", "train", *arguments])
    return Run(run_path)


def _follow(command: list[str]) -> None:
    """Run a command and print its output. It runs in its own session, so Ctrl-C reaches it only from here, not also from the terminal."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    assert child.stdout is not None
    message, interrupted = "", False
    while True:
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                message = line.removeprefix("error: ").strip() if line.startswith("error: ") else message
            code = child.wait()
            break
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            interrupted = True
    if interrupted and code in (0, *_STOP_CODES):
        raise KeyboardInterrupt
    if code in _STOP_CODES:
        raise RuntimeFailure("the run was stopped on request; train again to continue")
    if code:
        raise _ERRORS.get(code, MtpctlError)(message or f"mtpctl train ended with exit code {code}")
