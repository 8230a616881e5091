"""A run of the whole main job at toy size that a signal asks to stop, in every phase, sent to the command, to its group, and to process 1.

The cases share a run directory, so that each also resumes what the one before has left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mtpctl.checkpoint.finding import newest_checkpoint
from mtpctl.cluster.leftovers import SHARED_MEMORY
from mtpctl.controller.state import load_resume_state
from mtpctl.recipe.loading import load_recipe
from mtpctl.signals import exit_code
from mtpctl.telemetry.metrics_file import read_rows
from tests.environment import with_tree
from tests.fakes.processes import runs

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_mtp.yaml"
SETTINGS = (
    "train.sft.until_loss=0",
    "train.sft.batch_size=16",
    "train.rl.steps=1000",
    "train.rl.prompts_per_step=4",
    "train.rl.group_size=4",
    "train.rl.dynamic_sampling=false",
    "train.eval_every=1",
    "evaluation.wait=true",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=2",
    "rollout.max_tokens=40",
    "data.task={name: addition, max_digits: 2, train_size: 5000, eval_size: 64}",
)
END_S = 60.0
"""Twice the bound for an idle machine."""
MARK = "MTPCTL_TEST_RUN"
NAME = f"signals-{uuid.uuid4().hex}"
"""The name of the run directory, and part of the names of its folders in shared memory."""


def unshares() -> bool:
    """Whether this user may create a process namespace."""
    return not subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode


def shared() -> list[Path]:
    """The folders of the run in shared memory."""
    return list(SHARED_MEMORY.glob(f"*{NAME}*"))


@dataclass
class Command:
    """`mtpctl train` on a run directory. mark: a value in the environment of every process of it. first: whether it is process 1."""

    run_dir: Path
    mark: str
    process: subprocess.Popen[bytes]
    log: Path
    first: bool
    began: float

    @classmethod
    def start(cls, run_dir: Path, sft_steps: int, *, first: bool) -> Command:
        mark, log = uuid.uuid4().hex, run_dir.parent / "log"
        sets = [part for text in (*SETTINGS, f"train.sft.steps={sft_steps}", f"run_dir={run_dir}") for part in ("--set", text)]
        command = [sys.executable, "-m", "mtpctl", "train", str(RECIPE), "--plain", *sets]
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command] if first else command
        environment = with_tree(**{MARK: mark, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"})
        began = time.time()
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, cwd=run_dir.parent, env=environment, start_new_session=True)
        return cls(run_dir, mark, process, log, first, began)

    def rows(self) -> list[dict[str, object]]:
        file = self.run_dir / "metrics.jsonl"
        return [row for row in read_rows(file) if float(str(row["time"])) > self.began] if file.exists() else []

    def in_phase(self, phase: str) -> bool:
        """Whether the run is in this phase now."""
        match phase:
            case "Ray":
                return any(Path(name).name == "raylet" for name in self._programs())
            case "start":
                return any(str(row.get("message")).startswith("trainer: ") for row in self.rows())
            case "sft":
                return any(row.get("phase") == "sft" for row in self.rows())
            case "rl":
                return any(row.get("phase") == "rl" and "timing_s/step" in row for row in self.rows())
            case "evaluation":
                rows = [row for row in self.rows() if row.get("phase") == "rl"]
                return bool(rows) and "eval/accuracy" not in rows[-1] and not self._saving()
            case "sync":
                return any(not (folder / "manifest.json").exists() for root in shared() for folder in root.glob("v*"))
            case "save":
                return self._saving()
        raise AssertionError(phase)

    def _saving(self) -> bool:
        partial = {path.stat().st_ctime for path in (self.run_dir / "checkpoints").glob("*.partial") if path.exists()}
        return max(partial, default=0.0) > self.began  # an earlier command may have left one

    def _programs(self) -> Iterator[str]:
        for process in self.processes():
            with suppress(psutil.Error, IndexError):
                yield process.cmdline()[0]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.005)

    def end(self) -> int:
        """The exit code. The command has to end within `END_S`."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {END_S} s: {self.processes()}\n{self.log.read_text()}")

    def signal(self, number: int, target: str) -> None:
        with suppress(ProcessLookupError):  # it ended between two signals
            if target == "group":
                os.killpg(self.process.pid, number)
            else:
                # `unshare` waits for process 1, its only child.
                os.kill(psutil.Process(self.process.pid).children()[0].pid if self.first else self.process.pid, number)

    def processes(self) -> list[psutil.Process]:
        """What still runs of the command and of all that it has started."""
        marked = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and runs(process):
                    marked.append(process)
        return marked


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals") / NAME


PHASES = ("Ray", "start", "sft", "rl", "evaluation", "sync", "save")
WAYS = [
    (signal.SIGTERM, "group", 1),
    (signal.SIGINT, "command", 1),
    (signal.SIGHUP, "first", 1),
    (signal.SIGTERM, "first", 2),
    (signal.SIGHUP, "group", 2),
    (signal.SIGINT, "group", 2),
    (signal.SIGTERM, "command", 1),
]
"""A signal, whom it is sent to, and how often. In each phase three of them, so that each of them comes in three phases."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("phase", "number", "target", "times"),
    [(phase, *WAYS[(at + turn) % len(WAYS)]) for at, phase in enumerate(PHASES) for turn in (0, 2, 4)],
)
def test_signals_end_a_run_with_a_checkpoint_and_nothing_left(
    run_dir: Path, phase: str, number: signal.Signals, target: str, times: int
) -> None:
    if target == "first" and not unshares():
        pytest.skip("no process namespace may be created here")
    command = Command.start(run_dir, 1000 if phase in PHASES[:3] else 5, first=target == "first")
    try:
        command.wait_for(lambda: command.in_phase(phase))
        started = psutil.Process(command.process.pid).children(recursive=True)
        sent = time.monotonic()
        command.signal(number, target)
        if times > 1:
            time.sleep(0.3)
            command.signal(number, target)
        code = command.end()
        print(f"ended after {time.monotonic() - sent:.1f} s")
        text = command.log.read_text()
        # A shell reports both alike. A second signal may come when the command is about to exit.
        assert code == exit_code(number) or (times > 1 and code == -number), text
        assert "Traceback" not in text, text
        left = [process for process in {*started, *command.processes()} if runs(process)]
        assert not left, [process.cmdline() for process in left]
        assert not shared()
        path = newest_checkpoint(run_dir / "checkpoints")
        state = load_resume_state(path, load_recipe(run_dir / "recipe.resolved.yaml").recipe.train)
        if times == 1 and phase not in ("Ray", "start"):
            assert path is not None
            steps = [row["step"] for row in read_rows(run_dir / "metrics.jsonl") if row.get("phase") == state["stage"]]
            assert state["step"] == max(steps, default=0)
    finally:
        for process in command.processes():
            process.kill()
        command.process.wait()


@pytest.mark.timeout(400)
def test_sigkill_of_the_command_leaves_nothing(run_dir: Path) -> None:
    command = Command.start(run_dir, 5, first=False)
    command.wait_for(lambda: command.in_phase("rl"))
    started = psutil.Process(command.process.pid).children(recursive=True)
    assert shared()
    command.process.kill()
    command.process.wait()
    _, alive = psutil.wait_procs(started, timeout=END_S)
    assert not [process for process in {*alive, *command.processes()} if runs(process)]
    assert not shared()


@pytest.mark.timeout(400)
def test_run_that_loses_the_gcs_server_saves_its_update_and_ends_by_itself(run_dir: Path) -> None:
    command = Command.start(run_dir, 5, first=False)
    command.wait_for(lambda: command.in_phase("rl"))
    started = psutil.Process(command.process.pid).children(recursive=True)
    next(process for process in started if process.name() == "gcs_server").kill()
    assert command.end() == 5, command.log.read_text()
    errors = [line for line in command.log.read_text().splitlines() if line.startswith("error: ")]
    assert errors == ["error: Ray on this machine: gcs_server has ended with signal 9; start the same command again to continue"]
    assert not [process for process in {*started, *command.processes()} if runs(process)]
    assert not shared()
    path = newest_checkpoint(run_dir / "checkpoints")
    last = max(row["step"] for row in read_rows(run_dir / "metrics.jsonl") if row.get("phase") == "rl")
    assert path is not None and path.name == f"rl-{last:06d}"
