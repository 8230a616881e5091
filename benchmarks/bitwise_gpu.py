"""`numerics: bitwise` on one GPU: operations, log-probs of engine and trainer, and speed against the default numerics.

    python benchmarks/bitwise_gpu.py                            # at most 8 minutes on an H100
    python benchmarks/bitwise_gpu.py --parts operations,small,mismatch     # about 4 minutes
    python benchmarks/bitwise_gpu.py --parts large,trainer --deadline 590
    python benchmarks/bitwise_gpu.py --parts large --drafts 0,3 --deadline 590
    python benchmarks/bitwise_gpu.py --family qwen3 --parts small,mismatch,large
    python benchmarks/bitwise_gpu.py --device cpu               # toy sizes: fp32, and kernels in Triton's interpreter

Each part runs in separate processes, and a failure does not stop the next part. Output is printed line by line. The logs of the processes
are in `--logs`. If a process fails, the last lines of its log are printed.

1. `operations`: for each operation, whether a row's result is independent of the other rows, whether engine and trainer agree, and the
   time (`benchmarks/bitwise_operations.py`).
2. `run_small_model`: a random model of four layers in engines with CUDA graphs and 0, 1 and 3 drafts (greedy or sampled), in one with
graphs for
   steps without prefill only, and in an eager one; chunked prompts, prefix cache hits, and many requests in flight. Prints the largest
   difference of log-probs from the trainer's: it must be 0.
3. `mismatch`: the first module of this model whose outputs differ between engine and trainer (`mtpctl doctor --mismatch`).
4. `large`: random weights with the widths of a published model: MiMo-7B, Qwen3-8B, Qwen3-30B-A3B (12 layers). For each number in
   `--drafts`: differences, and tokens per second with `bitwise` and with the default numerics. Skipped if `run_small_model` finds a
   difference.
5. `trainer`: the large model's forward and backward pass in both modes.

Models of families other than MiMo have an EAGLE-3 drafter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bitwise_model import FAMILIES

PARTS = ("operations", "small", "mismatch", "large", "trainer")
LOG_TAIL_LINES = 25
"""Lines of a failed process's log that are printed."""


def report(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------- processes


StartedProcess = tuple[str, "subprocess.Popen[bytes]", IO[bytes]]
"""Name, process and log."""


@dataclass
class Runner:
    """Starts processes, which end at the deadline. failed: the names of those that failed."""

    device: str
    family: str
    logs: Path
    deadline: float
    failed: list[str] = field(default_factory=list)

    def child(self, part: str, **options: object) -> list[object]:
        """The command of `bitwise_model.py` for this part."""
        values = [str(value) for name, option in options.items() for value in (f"--{name}", option)]
        return [Path(__file__).with_name("bitwise_model.py"), part, "--device", self.device, "--family", self.family, *values]

    def start(self, name: str, command: Many[object], **environment: str) -> StartedProcess:
        log = (self.logs / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-u", *map(str, command)], env=os.environ | environment, stderr=log, start_new_session=True
        )
        return name, process, log

    def wait(self, started: StartedProcess, seconds: float) -> bool:
        """Wait for a process, and kill it and its children after `seconds` or at the deadline. Returns whether it succeeded."""
        name, process, log = started
        began = time.monotonic()
        try:
            code: int | str = process.wait(max(1.0, min(seconds, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            code = f"still running after {time.monotonic() - began:.0f} s"
            self.stop(started)
        log.close()
        if code == 0:
            return True
        self.failed.append(name)
        lines = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        report(f"  FAILED: {name}: {code}\n" + "\n".join(f"    {line[:300]}" for line in lines))
        return False

    def stop(self, started: StartedProcess) -> None:
        """End the process and its children."""
        _, process, _ = started
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, name: str, command: Many[object], seconds: float, **environment: str) -> bool:
        return self.wait(self.start(name, command, **environment), seconds)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--family", choices=tuple(FAMILIES), default="mimo")
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("--drafts", default="1", help="draft tokens per step of the large model's engines, separated by commas")
    arguments.add_argument("--deadline", type=float, default=470.0, help="seconds after which everything ends")
    arguments.add_argument("--logs", type=Path, default=None, help="folder of the processes' logs")
    options = arguments.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="bitwise-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    runner, parts = Runner(options.device, options.family, logs, time.monotonic() + options.deadline), options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        arguments.error(f"--parts: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    report(f"logs in {logs}")
    with tempfile.TemporaryDirectory(prefix="bitwise-") as scratch:
        run_parts(runner, parts, [int(number) for number in options.drafts.split(",")], Path(scratch))
    report(f"\nfailed: {', '.join(runner.failed) or 'nothing'}; {options.deadline - (runner.deadline - time.monotonic()):.0f} s")


def run_parts(runner: Runner, parts: list[str], drafts: list[int], scratch: Path) -> None:
    device, began, agree = runner.device, time.monotonic(), True

    def title(text: str) -> None:
        report(f"\n## {text} ({time.monotonic() - began:.0f} s)")

    if "operations" in parts:
        title("operations: rows of a call, engine against trainer, times")
        script, interpreted = Path(__file__).with_name("bitwise_operations.py"), {} if device == "cuda" else {"TRITON_INTERPRET": "1"}
        runner.run("operations", [script, "--device", device], 120, **interpreted)
        if device == "cuda":
            runner.run("library", [script, "--library"], 40)
    with ExitStack() as stack:
        large = None
        if {"large", "trainer"} & set(parts):
            large = Large(runner, scratch, stack.enter_context(create_memory_folder(scratch)))
            large.create_folder()
            if "large" in parts:
                large.start_engines(drafts[0])
        if {"small", "mismatch"} & set(parts):
            title("small model: engines and trainer; first module that differs, with one draft in an eager engine")
            runner.run("folder", runner.child("folder", folder=scratch / "small"), 60)
            command = runner.child("mismatch", folder=scratch / "small", out=scratch)
            mismatch = runner.start("mismatch", command) if "mismatch" in parts else None
            if "small" in parts:
                agree = run_small_model(runner, scratch)
            if mismatch is not None:
                runner.wait(mismatch, 150)
        if large is not None and not agree:
            report("  large model skipped: the small model's log-probs differ, or were not compared")
            large.stop()
        elif large is not None and large.is_ready():
            if "large" in parts:
                for index, number in enumerate(drafts):
                    title(f"large model, {number} drafts")
                    if index:
                        large.start_engines(number)
                    large.run_engines(number)
            if "trainer" in parts:
                title("large model, trainer")
                large.run_trainers()


def run_small_model(runner: Runner, scratch: Path) -> bool:
    """Run the small model's engines concurrently. Returns whether all log-probs agree."""
    device, cases = runner.device, ["graphs-0", "graphs-1", "graphs-3", "sampled-3", "eager-1", "decode-1"]
    if device == "cpu":
        cases = ["eager-1", "eager-3"]
    started, files = [], []
    for case in cases:
        variant, drafts = case.split("-")
        file = scratch / f"{case}.json"
        files.append(file)
        graphs, method = "decode" if variant == "decode" else "all", "probabilistic" if variant == "sampled" else "greedy"
        choices = {"eager": int(variant == "eager"), "graphs": graphs, "method": method}
        command = runner.child("engine", folder=scratch / "small", drafts=drafts, out=file, **choices)
        started.append(runner.start(f"engine-{file.stem}", command))
    succeeded = [runner.wait(process, 170) for process in started]
    files_present = [file for file, ok in zip(files, succeeded, strict=True) if ok]
    if not files_present:
        return False
    command = runner.child("score", folder=scratch / "small", samples=",".join(map(str, files_present)), out=scratch / "differences.json")
    if not runner.run("score", command, 90):
        return False
    differences: dict[str, float] = json.loads((scratch / "differences.json").read_text())
    compared = {Path(file).stem: difference for file, difference in differences.items()}
    return all(compared.get(case) == 0.0 for case in cases)


class Large:
    """The large model. Both engines of a number of drafts start together, because they take minutes, and generate one after the other.

    Each gets less than half of the GPU's memory.
    """

    def __init__(self, runner: Runner, scratch: Path, folder: Path) -> None:
        self.runner, self.scratch, self.folder = runner, scratch, folder
        self.on_gpu = runner.device == "cuda"
        self.started: dict[str, StartedProcess] = {}

    def create_folder(self) -> None:
        self.started["folder"] = self.runner.start("folder-large", self.runner.child("folder", folder=self.folder, size="large"))

    def is_ready(self) -> bool:
        """Wait for the folder. If it cannot be created, stop the engines."""
        if self.runner.wait(self.started.pop("folder"), 120):
            return True
        self.stop()
        return False

    def stop(self) -> None:
        for process in self.started.values():
            self.runner.stop(process)

    def start_engines(self, drafts: int) -> None:
        shared = {"folder": self.folder, "size": "large", "flight": 64, "drafts": drafts}
        shared |= {"responses": 512, "tokens": 512} if self.on_gpu else {"responses": 8, "tokens": 8}
        for numerics in ("bitwise", "default"):
            name = f"{numerics}-{drafts}"
            command = self.runner.child("engine", numerics=numerics, out=self._file(name), go=self._go(name), **shared)
            self.started[name] = self.runner.start(f"engine-large-{name}", command)

    def run_engines(self, drafts: int) -> None:
        files: list[Path] = []
        for numerics in ("bitwise", "default"):
            name = f"{numerics}-{drafts}"
            self._go(name).touch()
            if self.runner.wait(self.started.pop(name), 250) and numerics == "bitwise":
                self._score(name)
            files.insert(0, self._file(name))
        self._ratio("engine", files, "tokens_per_s", 0.75)

    def run_trainers(self) -> None:
        files = [self.scratch / f"trainer-{numerics}.json" for numerics in ("bitwise", "default")]
        for file in files:  # one after the other: each takes most of the GPU's memory
            numerics = file.stem.removeprefix("trainer-")
            command = self.runner.child("trainer", folder=self.folder, size="large", numerics=numerics, out=file)
            self.runner.run(file.stem, command, 100)
        self._ratio("trainer", files, "milliseconds", 0.85)

    def _file(self, name: str) -> Path:
        return self.scratch / f"large-{name}.json"

    def _go(self, name: str) -> Path:
        """A file whose existence lets an engine generate."""
        return self.scratch / f"go-{name}"

    def _score(self, name: str) -> None:
        command = self.runner.child("score", folder=self.folder, size="large", samples=self._file(name), out=self.scratch / f"score-{name}")
        self.runner.run(f"score-{name}", command, 90)

    def _ratio(self, name: str, files: list[Path], key: str, bound: float) -> None:
        if all(file.is_file() for file in files):
            default_value, bitwise_value = (json.loads(file.read_text())[key] for file in files)
            report(f"  {name}: {bitwise_value / default_value:.2f} of the default's speed (bound {bound})")


@contextmanager
def create_memory_folder(scratch: Path) -> Iterator[Path]:
    """A folder for 16 GB of weights, in memory if there is room."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 20 << 30
    folder = (memory if has_room else scratch) / f"bitwise-{os.getpid()}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
