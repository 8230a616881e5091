"""Compare a run on two hosts with the same run on one host that has the GPUs of both, and measure recovery from lost hosts.

The hosts are two raylets of this machine, each with one of its GPUs, or more with `--gpus`. The run, `mtpctl train RECIPE` with every
tensor verified at every sync, is started on one host (a local Ray cluster) and on two. Reported are the medians of the seconds of an update
and of a sync, without the first two updates. With `--kills`, the raylet of one of the two hosts is killed that many times, at a random time
within an update, and started again after five seconds; the command must recover and complete all updates. Reported is the time until the
next completed update. Exit code 6: with two hosts an update or a sync takes more than 1.1 times as long, or the run with kills did not
complete.

    python benchmarks/two_hosts.py mimo7b_mtp --overlay h200x2 --set model.path=FOLDER --updates 6
    python benchmarks/two_hosts.py mimo7b_mtp --gpus 2 --set train.parallel.dp=3 --set rollout.replicas=1 --set model.path=FOLDER
    python benchmarks/two_hosts.py mimo_small_mtp --set train.parallel.dp=2 --updates 12 --kills 3
    python benchmarks/two_hosts.py tiny_mtp --cpus 2 --set train.parallel.dp=2 --updates 12 --kills 2        # on a CPU
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import finish, parser, print_environment, print_spread
from mtpctl.telemetry.metrics_file import read_rows

BOUND = 1.1
WARMUP_UPDATES = 2
TIMEOUT_S = 420.0
REJOIN_S = 5.0


class Hosts:
    """A Ray cluster of two hosts, and a head without resources."""

    def __init__(self, cpus: int, gpus: int) -> None:
        """`cpus`, `gpus`: of each host."""
        from ray.cluster_utils import Cluster

        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False})
        self._options = [
            {"num_cpus": cpus, "num_gpus": gpus, "env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))} if gpus else {}}
            for indices in (range(gpus), range(gpus, 2 * gpus))
        ]
        self._nodes = [self.cluster.add_node(wait=False, **options) for options in self._options]
        self.cluster.wait_for_nodes()

    def lose(self, index: int) -> None:
        self._nodes[index].kill_raylet()

    def rejoin(self, index: int) -> None:
        self._nodes[index] = self.cluster.add_node(wait=False, **self._options[index])


class TrainingRun:
    """`mtpctl train` as a process, and the rows of its metrics."""

    def __init__(self, folder: Path, recipe: str, arguments: list[str]) -> None:
        folder.mkdir()
        self.folder = folder
        command = [sys.executable, "-m", "mtpctl", "train", recipe, "--plain", "--set", f"run_dir={folder / 'run'}", *arguments]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of RL updates so far."""
        file = self.folder / "run" / "metrics.jsonl"
        rows = read_rows(file) if file.exists() else []
        return [row for row in rows if row.get("phase") == "rl" and "timing_s/step" in row]

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Raises RuntimeError with the end of the log if the process ends before the condition is met, or after `seconds`."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the run ended or made no progress:\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.2)

    def complete(self) -> list[dict[str, Any]]:
        """Wait for the end. Raises RuntimeError if the run failed or takes too long."""
        if self.process.wait(TIMEOUT_S) != 0:
            raise RuntimeError(f"the run failed:\n{(self.folder / 'log').read_text()[-3000:]}")
        return self.rows()


def measure_times(name: str, run: TrainingRun) -> dict[str, float]:
    rows = run.complete()[WARMUP_UPDATES:]
    return {
        part: print_spread(f"{name}: {part}", [row[key] for row in rows if key in row], "s", ".3f")
        for part, key in (("update", "timing_s/step"), ("sync", "sync/seconds"))
    }


def lose_hosts(hosts: Hosts, run: TrainingRun, kills: int, draw: random.Random) -> None:
    """Kill a raylet `kills` times, each after two more updates, and print the time until the next completed update."""
    for kill in range(kills):
        target = len(run.rows()) + 2
        run.wait_for(lambda: len(run.rows()) >= target, TIMEOUT_S)  # noqa: B023 (called within this iteration)
        delay, index = draw.uniform(0, run.rows()[-1]["timing_s/step"]), draw.randrange(2)
        time.sleep(delay)
        hosts.lose(index)
        lost, rows_before = time.monotonic(), len(run.rows())
        time.sleep(REJOIN_S)
        hosts.rejoin(index)
        run.wait_for(lambda: len(run.rows()) > rows_before, TIMEOUT_S)  # noqa: B023 (called within this iteration)
        print(
            f"kill {kill + 1}: host {index}, {delay:.1f} s after an update; next completed update after {time.monotonic() - lost:.1f} s",
            flush=True,
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("recipe")
    options.add_argument("--overlay", action="append", default=[])
    options.add_argument("--set", action="append", default=[], dest="sets")
    options.add_argument("--updates", type=int, default=8)
    options.add_argument("--kills", type=int, default=0)
    options.add_argument("--cpus", type=int, default=len(os.sched_getaffinity(0)) // 2, help="CPUs of each host")
    options.add_argument("--gpus", type=int, default=1, help="GPUs of each host")
    options.add_argument("--out", type=Path, help="keep the runs in this new folder")
    options.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = options.parse_args()
    import torch

    sets = ["train.stages=[rl]", "train.rl.dynamic_sampling=false", f"train.rl.steps={arguments.updates}", "sync.verify=always"]
    sets += ["train.checkpoint_every=1"] if arguments.kills else []
    common = [word for overlay in arguments.overlay for word in ("--overlay", overlay)]
    common += [word for text in (*sets, *arguments.sets) for word in ("--set", text)]
    gpus = arguments.gpus if torch.cuda.is_available() else 0
    print_environment()
    misses = []
    with tempfile.TemporaryDirectory() as scratch:
        root, times = arguments.out or Path(scratch) / "runs", {}
        root.mkdir()
        if not arguments.kills:
            one_host = [*common, "--set", f"cluster.gpus_per_node={2 * gpus}"] if gpus else common
            times["one host"] = measure_times("one host", TrainingRun(root / "one", arguments.recipe, one_host))
        hosts = Hosts(arguments.cpus, gpus)
        try:
            on_cluster = [*common, "--set", f"cluster.address={hosts.cluster.address}"]
            on_cluster += ["--set", f"cluster.gpus_per_node={gpus}"] if gpus else []
            run = TrainingRun(root / "two", arguments.recipe, on_cluster)
            if arguments.kills:
                lose_hosts(hosts, run, arguments.kills, random.Random(arguments.seed))
            times["two hosts"] = measure_times("two hosts", run)
            steps = sorted({row["step"] for row in run.rows()})
            if steps != list(range(1, arguments.updates + 1)):
                misses.append(f"not all of {arguments.updates} updates were completed: {steps}")
        finally:
            hosts.cluster.shutdown()
        for part, seconds in times.get("one host", {}).items():
            ratio = times["two hosts"][part] / seconds
            print(f"{part}: two hosts / one host {ratio:.2f}")
            if ratio > BOUND:
                misses.append(f"{part}: {ratio:.2f} times as long over two hosts, bound {BOUND}")
    finish(misses)


if __name__ == "__main__":
    main()
