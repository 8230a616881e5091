"""`numerics: bitwise` on one GPU: operations, log-probs of engine and trainer, and speed against the default numerics.

    python benchmarks/bitwise_gpu.py                            # at most 8 minutes on an H100
    python benchmarks/bitwise_gpu.py --parts operations,small,mismatch     # about 4 minutes
    python benchmarks/bitwise_gpu.py --parts large --deadline 590          # with other numbers of drafts, if time is left
    python benchmarks/bitwise_gpu.py --device cpu               # toy sizes: fp32, and kernels in Triton's interpreter

Each part runs in separate processes, and a failure does not stop the next part. Output is printed line by line. The logs of the processes
are in `--logs`. If a process fails, the last lines of its log are printed.

1. `operations`: is a row's result independent of the other rows, are engine's and trainer's equal, what does each cost
   (`benchmarks/bitwise_operations.py`).
2. `small`: a random MiMo of four layers in engines with CUDA graphs and 0, 1 and 3 drafts (greedy or sampled), and in an eager engine;
   chunked prompts, prefix cache hits, and many requests in flight. Prints the largest difference of log-probs from the trainer's: it must
   be 0.
3. `mismatch`: the first module of this model whose outputs differ between engine and trainer (`mtpctl doctor --mismatch`).
4. `large`: MiMo-7B's shape with random weights. Differences and tokens per second with `bitwise`, the trainer's forward and backward pass
   in both modes, then tokens per second with the default numerics. Skipped if `small` finds a difference.
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

PARTS = ("operations", "small", "mismatch", "large")
TAIL = 25
"""Lines of a failed process's log that are printed."""
TRAINERS_S = 100.0
"""Seconds reserved for the two measurements of the trainer."""
ANOTHER_ENGINE_S = 90.0
"""Seconds that another engine of the large model takes at least."""


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------- processes


@dataclass
class Runner:
    """Starts processes, which end at the deadline. failed: the names of those that failed."""

    device: str
    logs: Path
    deadline: float
    failed: list[str] = field(default_factory=list)

    def start(self, name: str, command: Many[object], **environment: str) -> tuple[str, subprocess.Popen[bytes], IO[bytes]]:
        log = (self.logs / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-u", *map(str, command)], env=os.environ | environment, stderr=log, start_new_session=True
        )
        return name, process, log

    def wait(self, started: tuple[str, subprocess.Popen[bytes], IO[bytes]], seconds: float) -> bool:
        """Whether the process succeeded. Ends it and its children after `seconds`, or at the deadline."""
        name, process, log = started
        began = time.monotonic()
        try:
            code: int | str = process.wait(max(1.0, min(seconds, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            code = f"still running after {time.monotonic() - began:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()
        if code == 0:
            return True
        self.failed.append(name)
        lines = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-TAIL:]
        say(f"  FAILED: {name}: {code}\n" + "\n".join(f"    {line[:300]}" for line in lines))
        return False

    def run(self, name: str, command: Many[object], seconds: float, **environment: str) -> bool:
        return self.wait(self.start(name, command, **environment), seconds)


def child(part: str, device: str, **options: object) -> list[object]:
    """The command of `bitwise_model.py` for this part."""
    values = [str(value) for name, option in options.items() for value in (f"--{name}", option)]
    return [Path(__file__).with_name("bitwise_model.py"), part, "--device", device, *values]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("--deadline", type=float, default=470.0, help="seconds after which everything ends")
    arguments.add_argument("--logs", type=Path, default=None, help="folder of the processes' logs")
    options = arguments.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="bitwise-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    runner, parts = Runner(options.device, logs, time.monotonic() + options.deadline), options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        arguments.error(f"--parts: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    say(f"logs in {logs}")
    with tempfile.TemporaryDirectory(prefix="bitwise-") as scratch:
        run_parts(runner, parts, Path(scratch))
    say(f"\nfailed: {', '.join(runner.failed) or 'nothing'}; {options.deadline - (runner.deadline - time.monotonic()):.0f} s")


def run_parts(runner: Runner, parts: list[str], scratch: Path) -> None:
    device, began, agree = runner.device, time.monotonic(), True

    def title(text: str) -> None:
        say(f"\n## {text} ({time.monotonic() - began:.0f} s)")

    if "operations" in parts:
        title("operations: rows of a call, engine against trainer, times")
        script, interpreted = Path(__file__).with_name("bitwise_operations.py"), {} if device == "cuda" else {"TRITON_INTERPRET": "1"}
        runner.run("operations", [script, "--device", device], 120, **interpreted)
        if device == "cuda":
            runner.run("library", [script, "--library"], 40)
    with ExitStack() as stack:
        weights = None
        if "large" in parts and device == "cuda":
            folder = stack.enter_context(memory_folder(scratch))
            weights = folder, runner.start("folder-large", child("folder", device, folder=folder, size="large"))
        if {"small", "mismatch"} & set(parts):
            title("small model: engines and trainer; first module that differs, with one draft in an eager engine")
            runner.run("folder", child("folder", device, folder=scratch / "small"), 60)
            command = child("mismatch", device, folder=scratch / "small", out=scratch)
            mismatch = runner.start("mismatch", command) if "mismatch" in parts else None
            if "small" in parts:
                agree = small(runner, scratch)
            if mismatch is not None:
                runner.wait(mismatch, 150)
        if "large" in parts:
            title("MiMo-7B's shape")
        if weights is not None and runner.wait(weights[1], 120):
            if agree:
                large(runner, scratch, weights[0])
            else:
                say("  skipped: the small model's log-probs differ, or were not compared. To run it nevertheless: --parts large")
        elif "large" in parts:
            say("  skipped: needs a GPU, and room for 16 GB in /dev/shm or the folder of temporary files")


def small(runner: Runner, scratch: Path) -> bool:
    """Whether all log-probs of the small model agree. The engines run at the same time."""
    device, cases = runner.device, ["graphs-0", "graphs-1", "graphs-3", "sampled-3", "eager-1", "pieces-1"]
    if device == "cpu":
        cases = ["eager-1", "eager-3"]
    started, files = [], []
    for case in cases:
        kind, drafts = case.split("-")
        file = scratch / f"{case}.json"
        files.append(file)
        graphs = "pieces" if kind == "pieces" else "decode"
        choices = {"eager": int(kind == "eager"), "graphs": graphs, "method": "probabilistic" if kind == "sampled" else "greedy"}
        command = child("engine", device, folder=scratch / "small", drafts=drafts, out=file, **choices)
        started.append(runner.start(f"engine-{file.stem}", command))
    ran = [runner.wait(each, 170) for each in started]
    present = [file for file, ok in zip(files, ran, strict=True) if ok]
    if not present:
        return False
    command = child("score", device, folder=scratch / "small", samples=",".join(map(str, present)), out=scratch / "differences.json")
    if not runner.run("score", command, 90):
        return False
    differences: dict[str, float] = json.loads((scratch / "differences.json").read_text())
    # `pieces` is an alternative of the default graphs.
    compared = {Path(file).stem: difference for file, difference in differences.items()}
    return all(compared.get(case) == 0.0 for case in cases if not case.startswith("pieces"))


def large(runner: Runner, scratch: Path, folder: Path) -> None:
    """The default engine, whose start takes longest, starts while the trainer scores. Each gets less than half of the GPU's memory."""
    device, ours, usual = runner.device, scratch / "large-bitwise.json", scratch / "large-default.json"
    shared = {"folder": folder, "size": "large", "flight": 64, "tokens": 512, "drafts": 1}
    ran = runner.run("engine-large", child("engine", device, responses=512, out=ours, **shared), 180)
    default = runner.start("engine-large-default", child("engine", device, responses=256, out=usual, numerics="default", **shared))
    if ran:
        runner.run("score-large", child("score", device, folder=folder, size="large", samples=ours, out=scratch / "large"), 90)
    runner.wait(default, max(60.0, runner.deadline - time.monotonic() - TRAINERS_S))
    files = {numerics: scratch / f"trainer-{numerics}.json" for numerics in ("bitwise", "default")}
    for numerics, file in files.items():  # one after the other: each takes most of the GPU's memory
        runner.run(
            f"trainer-{numerics}", child("trainer", device, folder=folder, size="large", numerics=numerics, out=file), TRAINERS_S / 2
        )
    if all(file.is_file() for file in files.values()):
        bitwise, times = (json.loads(files[name].read_text()) for name in ("bitwise", "default"))
        say(f"  trainer: {times / bitwise:.2f} of the default's speed (bound 0.85)")
    if ours.is_file() and usual.is_file():
        rates = [json.loads(file.read_text())["tokens_per_s"] for file in (ours, usual)]
        say(f"  engine: {rates[0] / rates[1]:.2f} of the default's speed (bound 0.75)")
    # If time is left: graphs for steps with prefill, and other numbers of drafts.
    for graphs, drafts in (("pieces", 1), ("decode", 0), ("decode", 3)):
        name, file = f"large-{graphs}-{drafts}", scratch / f"large-{graphs}-{drafts}.json"
        command = child("engine", device, responses=256, out=file, graphs=graphs, **(shared | {"drafts": drafts}))
        if runner.deadline - time.monotonic() > ANOTHER_ENGINE_S and runner.run(f"engine-{name}", command, 150):
            command = child("score", device, folder=folder, size="large", samples=file, out=scratch / name)
            runner.run(f"score-{name}", command, 60)


@contextmanager
def memory_folder(scratch: Path) -> Iterator[Path]:
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
