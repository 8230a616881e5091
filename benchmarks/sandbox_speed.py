"""Programs, judged answers and cells of a session that the sandbox runs per second on this machine.

    python benchmarks/sandbox_speed.py --runs 400

Prints a line for each.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from harness import parser
from mtpctl.sandbox.sandbox import Sandbox


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=400)
    num_runs = arguments.parse_args().runs
    cores = len(os.sched_getaffinity(0))
    with Sandbox("none") as sandbox:
        session = sandbox.session()
        tests = [f"assert f({n}) == {n + 1}" for n in range(3)]
        for name, workers, run in (
            ("runs", cores, lambda: sandbox.run("print(sum(range(10)))")),
            ("answers with three tests", cores, lambda: sandbox.judge("def f(x): return x + 1", tests)),
            ("cells of one session", 1, lambda: session.run("1 + 1")),
        ):
            with ThreadPoolExecutor(workers) as pool:
                start = time.perf_counter()
                for future in [pool.submit(run) for _ in range(num_runs)]:
                    future.result()
                print(f"{name}: {num_runs / (time.perf_counter() - start):.0f} a second, {workers} concurrently on {cores} cores")
        session.close()


if __name__ == "__main__":
    main()
