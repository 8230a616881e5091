"""Run a command and record its updates, GPU memory and GPU utilization. The reward function logs the responses.

    python3 benchmarks/peers/measure.py OUT --minutes 9 -- COMMAND …

The command runs in OUT. Files there: output.log; updates.jsonl, one line for each output line that reports an update (`step:7` of verl and
run_trl.py, `rl 7/200` of mtpctl); parts.jsonl, the times of an update's parts as the system reports them (`timing_s/NAME:SECONDS` on a line
with `step:7`, or in metrics.jsonl of mtpctl's run directory); gpu.jsonl, one sample per second over the GPUs of CUDA_VISIBLE_DEVICES, or
over all if it is not set; run.json, times and exit code. After --minutes, the command and its children are stopped. Run it with
`setsid nohup … &` to keep it running after the shell exits.
Needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

UPDATE = re.compile(rb"(?:\bstep:|\brl )(\d+)\b")
PART = re.compile(rb"\btiming_s/([\w/]+):(?:np\.float64\()?([-+\d.e]+)")
SECONDS_TO_STOP = 20.0


def sample_gpus(file: Path, stop: threading.Event) -> None:
    """Write memory (MiB, summed) and utilization (percent, mean) of the visible GPUs once per second."""
    query = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", visible]
    with file.open("w", encoding="utf-8") as lines:
        while not stop.wait(1.0):
            rows = [line.split(",") for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()]
            memory, used = ([float(row[column]) for row in rows] for column in (0, 1))
            line = {"time": time.time(), "memory_mib": sum(memory), "utilization": sum(used) / len(used), "gpus": len(rows)}
            lines.write(json.dumps(line) + "\n")
            lines.flush()


def parts_of_updates(out: Path) -> list[dict[str, object]]:
    """Times of the parts of each update, from the output and from metrics.jsonl of a run directory in `out`."""
    records: list[dict[str, object]] = []
    for line in (out / "output.log").read_bytes().splitlines():
        parts = {name.decode(): float(seconds) for name, seconds in PART.findall(line)}
        if parts and (match := UPDATE.search(line)):
            records.append({"update": int(match[1]), "parts": parts})
    for file in sorted(out.glob("*/metrics.jsonl")):
        # A run that is killed may leave an incomplete last line.
        complete = file.read_text(encoding="utf-8").rpartition("\n")[0]
        for row in map(json.loads, complete.splitlines()):
            parts = {name.removeprefix("timing_s/"): seconds for name, seconds in row.items() if name.startswith("timing_s/")}
            if parts and row["phase"] == "rl":
                records.append({"update": row["step"], "parts": parts})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--no-gpu", action="store_true", help="do not sample nvidia-smi")
    parser.usage = "measure.py OUT [--minutes MINUTES] [--no-gpu] -- COMMAND …"
    if "--" not in sys.argv[:-1]:
        parser.error("the command follows --")
    end = sys.argv.index("--")
    options, command = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    options.out.mkdir(parents=True)
    stop = threading.Event()
    sampler = threading.Thread(target=sample_gpus, args=(options.out / "gpu.jsonl", stop))
    if not options.no_gpu:
        sampler.start()
    start = time.time()
    process = subprocess.Popen(
        command, cwd=options.out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    timer = threading.Timer(options.minutes * 60, os.killpg, (process.pid, signal.SIGTERM))
    killer = threading.Timer(options.minutes * 60 + SECONDS_TO_STOP, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    killer.start()
    assert process.stdout is not None
    with (options.out / "output.log").open("wb") as log, (options.out / "updates.jsonl").open("w", encoding="utf-8") as updates:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if match := UPDATE.search(line):
                updates.write(json.dumps({"time": time.time(), "update": int(match[1])}) + "\n")
                updates.flush()
    code = process.wait()
    timer.cancel()
    killer.cancel()
    stop.set()
    if not options.no_gpu:
        sampler.join()
    parts = "".join(json.dumps(line) + "\n" for line in parts_of_updates(options.out))
    (options.out / "parts.jsonl").write_text(parts, encoding="utf-8")
    (options.out / "run.json").write_text(
        json.dumps({"start": start, "end": time.time(), "code": code, "command": command}), encoding="utf-8"
    )
    sys.exit(code)


if __name__ == "__main__":
    main()
