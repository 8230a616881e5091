"""`python -m mtpctl.sandbox` prints how runs are isolated on this machine, and the number of runs per second."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from mtpctl.sandbox.sandbox import Sandbox, describe_layers

NUM_RUNS = 400


def main() -> None:
    """Print a line for each layer, for mechanisms that do not work, and for the speed."""
    cores = len(os.sched_getaffinity(0))
    with Sandbox("none") as sandbox:
        print(f"isolation: {sandbox.mechanism()}")
        for layer in describe_layers(sandbox):
            print(f"{layer.name}: {layer.by or 'NOT RESTRICTED'}")
        for mechanism, reason in sandbox.refused.items():
            print(f"without {mechanism}: {reason}")
        session = sandbox.session()
        tests = [f"assert f({n}) == {n + 1}" for n in range(3)]
        for name, workers, run in (
            ("runs", cores, lambda: sandbox.run("print(sum(range(10)))")),
            ("answers with three tests", cores, lambda: sandbox.judge("def f(x): return x + 1", tests)),
            ("cells of one session", 1, lambda: session.run("1 + 1")),
        ):
            with ThreadPoolExecutor(workers) as pool:
                start = time.perf_counter()
                for future in [pool.submit(run) for _ in range(NUM_RUNS)]:
                    future.result()
                print(f"{name}: {NUM_RUNS / (time.perf_counter() - start):.0f} a second, {workers} concurrently on {cores} cores")
        session.close()


if __name__ == "__main__":
    main()
