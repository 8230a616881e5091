"""The cost of answers that hang: rewards of `math` without hanging answers and with one in a hundred, alternating.

    python benchmarks/math_rewards.py --answers 3000 --turns 3

Prints a JSON line for each measurement: answers a second, CPU milliseconds of all workers for each correct answer until the last of them
is rewarded, and those of the controller. CPU time is the same on a machine that does other work.
"""

from __future__ import annotations

import asyncio
import json
import os
import time

import psutil

from harness import parser
from mtpctl.data.problems import Problem
from mtpctl.recipe.reward import RewardConfig
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.samples import Sample

HANGS = "$10^{10^{10^{10}}}$"
WARMUP = 100


def case(number: int) -> tuple[str, Problem]:
    """A response with a correct answer, and its problem. They differ for each number, because parsed answers are cached."""
    answer = rf"\frac{{{2 * number + 1}}}{{{2 * number + 3}}}"
    response = rf"So we get $x = {2 * number + 1}$ and then the answer is $\boxed{{{answer}}}$."
    return response, Problem(f"rows.jsonl:{number + 1}", f"What is {2 * number + 1} : {2 * number + 3}?", answer)


def workers_cpu_s() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


async def measure(answers: int, hang_interval: int) -> dict[str, float]:
    """Measure the rewards of `answers` correct answers, with one hanging answer per `hang_interval` of them (0: none)."""
    sample = Sample("rows.jsonl:1", "0", [1])
    async with Rewarder(RewardConfig(function="math")) as reward:
        await asyncio.gather(*(reward(*case(answers + number), sample) for number in range(WARMUP)))
        workers_s, controller_s, began = workers_cpu_s(), time.process_time(), time.monotonic()
        correct, hanging = [], []
        for number in range(answers):
            if hang_interval and number % hang_interval == hang_interval // 2:
                hanging.append(asyncio.create_task(reward(HANGS, case(number)[1], sample)))
            correct.append(asyncio.create_task(reward(*case(number), sample)))
        num_wrong = sum(outcome.reward != 1.0 for outcome in await asyncio.gather(*correct))
        seconds = time.monotonic() - began
        workers_s, controller_s = workers_cpu_s() - workers_s, time.process_time() - controller_s
        for task in hanging:
            task.cancel()
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "hanging": len(hanging),
        "answers_per_s": round(answers / seconds),
        "cpu_ms_per_answer": round(1e3 * workers_s / answers, 2),
        "controller_ms_per_answer": round(1e3 * controller_s / answers, 2),
        "wrong": num_wrong,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--answers", type=int, default=3000)
    arguments.add_argument("--turns", type=int, default=3)
    options = arguments.parse_args()
    for _ in range(options.turns):
        for every in (0, 100):
            print(json.dumps(asyncio.run(measure(options.answers, every))), flush=True)


if __name__ == "__main__":
    main()
