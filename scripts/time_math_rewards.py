"""What answers that hang cost the others: rewards of `math` a second, without hanging ones and with one in a hundred, in turns.

    scripts/time_math_rewards.py [--answers 3000] [--turns 3]

One JSON line a measurement: answers a second on the clock, and the CPU seconds that all workers took for each right answer until the last
of them was there, and those of the controller. CPU seconds tell the same on a machine that does other work as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time

import psutil

from mtpctl.data.problems import Problem
from mtpctl.recipe.reward import RewardConfig
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.samples import Sample

HANGS = "$10^{10^{10^{10}}}$"
WARM = 100


def asked(number: int) -> tuple[str, Problem]:
    """A right answer and its problem, other ones for each number: what was read before is read again without any work."""
    answer = rf"\frac{{{2 * number + 1}}}{{{2 * number + 3}}}"
    response = rf"So we get $x = {2 * number + 1}$ and then the answer is $\boxed{{{answer}}}$."
    return response, Problem(f"rows.jsonl:{number + 1}", f"What is {2 * number + 1} : {2 * number + 3}?", answer)


async def measure(answers: int, every: int) -> dict[str, float]:
    """Reward so many right answers, with one that hangs for each `every` of them; 0: none."""
    sample = Sample("rows.jsonl:1", "0", [1])
    async with Rewarder(RewardConfig(function="math")) as reward:
        await asyncio.gather(*(reward(*asked(answers + number), sample) for number in range(WARM)))
        spent, own, began = _workers_cpu(), time.process_time(), time.monotonic()
        right, hanging = [], []
        for number in range(answers):
            if every and number % every == every // 2:
                hanging.append(asyncio.create_task(reward(HANGS, asked(number)[1], sample)))
            right.append(asyncio.create_task(reward(*asked(number), sample)))
        wrong = sum(outcome.reward != 1.0 for outcome in await asyncio.gather(*right))
        seconds, spent, own = time.monotonic() - began, _workers_cpu() - spent, time.process_time() - own
        for task in hanging:
            task.cancel()
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "hanging": len(hanging),
        "answers_per_s": round(answers / seconds),
        "cpu_ms_per_answer": round(1e3 * spent / answers, 2),
        "controller_ms_per_answer": round(1e3 * own / answers, 2),
        "wrong": wrong,
        "load": round(os.getloadavg()[0], 1),
    }


def _workers_cpu() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    for _ in range(arguments.turns):
        for every in (0, 100):
            print(json.dumps(asyncio.run(measure(arguments.answers, every))), flush=True)


if __name__ == "__main__":
    main()
