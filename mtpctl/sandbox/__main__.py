"""`python -m mtpctl.sandbox`: what confines a run on this machine, and how many runs a second it does."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from mtpctl.sandbox.layers import layers
from mtpctl.sandbox.sandbox import Sandbox

RUNS = 400


def main() -> None:
    """Print a line for each layer, for walls that could not be had, and for the speed."""
    cores = len(os.sched_getaffinity(0))
    with Sandbox("none") as sandbox:
        print(f"walls: {sandbox.walls()}")
        for layer in layers(sandbox):
            print(f"{layer.name}: {layer.by or 'NOT HELD'}")
        for kind, why in sandbox.refused.items():
            print(f"without {kind}: {why}")
        session = sandbox.session()
        for name, work in (
            ("runs", lambda: sandbox.run("print(sum(range(10)))")),
            ("answers with three tests", lambda: sandbox.judge("def f(x): return x + 1", [f"assert f({n}) == {n + 1}" for n in range(3)])),
            ("cells of one session", lambda: session.run("1 + 1")),
        ):
            at_once = 1 if name.startswith("cells") else cores
            with ThreadPoolExecutor(at_once) as pool:
                began = time.perf_counter()
                for each in [pool.submit(work) for _ in range(RUNS)]:
                    each.result()
                print(f"{name}: {RUNS / (time.perf_counter() - began):.0f} a second, {at_once} at once on {cores} cores")
        session.close()


if __name__ == "__main__":
    main()
