"""Reward functions in worker processes: concurrent calls, time limits, and errors with file and line of the user's code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mtpctl.data.problems import Problem
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.reward import RewardConfig
from mtpctl.rl.rewards.function import Outcome
from mtpctl.rl.rewards.pool import Rewarder
from mtpctl.rl.rewards.worker import descendants
from mtpctl.samples import Sample
from tests.environment import with_tree
from tests.fakes.processes import runs

PROBLEM = Problem("rows.jsonl:1", "1+1=", "2")

PLAIN = """\
import os, subprocess, sys, time

def score(response, problem, sample, bonus=0.0):
    if response == "hang": time.sleep(1000)
    if response == "spin":
        while True: pass
    if response == "child": subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])
    if response == "raise": raise ValueError("no\\nnumber in it")
    if response == "die": os._exit(3)
    if response == "exit": sys.exit(3)
    if response == "sleep": time.sleep(1)
    returned = {"nan": float("nan"), "huge": 10**9000, "list": [1, 2]}
    returned |= {"none": None, "text": "1.0", "no reward": {"part": 1.0}, "taken": {"reward": 1, "mean": 1}}
    if response in returned: return returned[response]
    return {"reward": float(response == problem.answer) + bonus, "tokens": sum(sample.loss_mask), "pid": os.getpid()}

async def later(response, problem, sample): return score(response, problem, sample)
"""

COROUTINE = """\
import asyncio, time

async def score(response, problem, sample):
    if response == "hang":
        try: await asyncio.sleep(1000)
        except asyncio.CancelledError: await asyncio.sleep(1000)
    if response == "block": time.sleep(1000)
    if response == "raise": raise ValueError("no number in it")
    await asyncio.sleep(0.2)
    return 1.0
"""


def sample() -> Sample:
    sample = Sample("rows.jsonl:1", "0", [1, 2])
    sample.append([3, 4], [-0.5, -1.0], 0)
    sample.append([5], [0.0], 0, trained=False)
    return sample


@pytest.fixture
def plain(tmp_path: Path) -> str:
    (tmp_path / "judge.py").write_text(PLAIN)
    return f"{tmp_path / 'judge.py'}:score"


@pytest.fixture
def coroutine(tmp_path: Path) -> str:
    (tmp_path / "judge.py").write_text(COROUTINE)
    return f"{tmp_path / 'judge.py'}:score"


Timed = tuple[float, Outcome]
"""Seconds and outcome of a response."""


async def reward_all(config: RewardConfig, *responses: str, lines: list[str] | None = None) -> list[Timed]:
    """Seconds and outcome of each response, all requested concurrently."""
    async with Rewarder(config, report=(lines if lines is not None else []).append) as reward:
        began = time.monotonic()

        async def timed(response: str) -> Timed:
            outcome = await reward(response, PROBLEM, sample())
            return time.monotonic() - began, outcome

        return await asyncio.gather(*map(timed, responses))


def rewarded(config: RewardConfig, *responses: str, lines: list[str] | None = None) -> list[Timed]:
    return asyncio.run(asyncio.wait_for(reward_all(config, *responses, lines=lines), 100))


def test_function_receives_response_problem_sample_and_arguments(plain: str) -> None:
    (_, right), (_, wrong) = rewarded(RewardConfig(function=plain, args={"bonus": 0.25}), "2", "3")
    assert (right.reward, wrong.reward, right.parts["tokens"], right.error) == (1.25, 0.25, 2.0, "")


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", "judge.py:8: ValueError: no"),
        ("nan", "judge.py:3: score returned nan, which is not finite"),
        ("huge", "judge.py:3: score returned a value of type int, which is not finite as a float"),
        ("list", "judge.py:3: score returned [1, 2], which is not a number"),
        ("none", "judge.py:3: score returned None, which is not a number"),
        ("text", "judge.py:3: score returned '1.0', which is not a number"),
        ("no reward", "judge.py:3: score returned a dict without the key 'reward': {'part': 1.0}"),
        ("taken", "judge.py:3: score returned a part 'mean': reward/mean is already a metric"),
        ("exit", "judge.py:10: SystemExit: 3"),
        ("die", "judge.py:score: the process that ran it died"),
    ],
)
def test_failure_is_reported_once_with_file_and_line_and_other_calls_succeed(plain: str, response: str, message: str) -> None:
    lines: list[str] = []
    outcomes = [outcome for _, outcome in rewarded(RewardConfig(function=plain), response, "2", response, "2", lines=lines)]
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 0.0, 1.0]
    assert [bool(outcome.error) for outcome in outcomes] == [True, False, True, False]
    (line,) = lines
    assert line.startswith(message) and "(rows.jsonl:1): the response counts as 0" in line and "\n" not in line


def test_failure_drops_the_group_or_stops_the_run_as_configured(plain: str) -> None:
    ((_, dropped),) = rewarded(RewardConfig(function=plain, on_error="drop"), "raise")
    assert dropped.reward is None and dropped.error
    with pytest.raises(RuntimeFailure, match=r"^reward\.function: judge\.py:8: ValueError.*set reward\.on_error: zero or drop$"):
        rewarded(RewardConfig(function=plain, on_error="stop"), "raise")


@pytest.mark.parametrize(
    ("kind", "workers", "line"),
    [
        ("spin", 1, 6),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("hang", None, 4), ("hang", 1, 4), ("spin", None, 6), ("child", None, 7))
        ),
    ],
)
def test_hung_calls_do_not_delay_others_and_are_reported_with_their_line(plain: str, kind: str, workers: int | None, line: int) -> None:
    """More hung calls than processes. Their children are killed with them."""
    config = RewardConfig(function=plain, workers=workers, timeout_s=12)
    before = set(psutil.Process().children(recursive=True))
    results = rewarded(config, *[kind] * 3, *["2"] * 200)
    message = f"judge.py:{line}: score took more than 12 s (reward.timeout_s)"
    assert [(outcome.timed_out, outcome.error) for _, outcome in results[:3]] == [(True, message)] * 3
    assert all(outcome.reward == 1.0 for _, outcome in results[3:])
    assert max(seconds for seconds, _ in results[3:]) < 11.5 < min(seconds for seconds, _ in results[:3])
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [each for each in left if runs(each)]


def test_waiting_calls_get_more_processes_than_cpus_unless_workers_is_set(plain: str) -> None:
    assert max(seconds for seconds, _ in rewarded(RewardConfig(function=plain), *["sleep"] * 40)) < 12, (
        "sequential calls take 20 s on two CPUs"
    )
    results = rewarded(RewardConfig(function=plain, workers=3), *["sleep"] * 6)
    assert len({outcome.parts["pid"] for _, outcome in results}) == 3


def test_coroutines_run_concurrently_in_one_process(coroutine: str) -> None:
    results = rewarded(RewardConfig(function=coroutine), *["2"] * 200)
    assert max(seconds for seconds, _ in results) < 10, "sequential calls take 40 s"
    lines: list[str] = []
    rewarded(RewardConfig(function=coroutine), "raise", lines=lines)
    assert lines[0].startswith("judge.py:8: ValueError: no number in it")


def test_workers_bounds_concurrent_coroutines(coroutine: str) -> None:
    results = sorted(seconds for seconds, _ in rewarded(RewardConfig(function=coroutine, workers=2), *["2"] * 6))
    assert results[-1] > 0.6


def test_coroutine_that_ignores_cancellation_or_blocks_the_loop_delays_others_at_most_until_its_time_limit(coroutine: str) -> None:
    config = RewardConfig(function=coroutine, timeout_s=4)

    async def both() -> list[list[Timed]]:
        return await asyncio.gather(*(reward_all(config, kind, *["2"] * 50) for kind in ("hang", "block")))

    ((_, hung), *quick), ((_, blocked), *others) = asyncio.run(asyncio.wait_for(both(), 100))
    assert hung.timed_out and max(seconds for seconds, _ in quick) < 4
    assert hung.error.startswith("judge.py:5: score took more than 4 s")
    assert blocked.timed_out and blocked.error.startswith("judge.py:7: score took more than 4 s")
    assert [outcome.reward for _, outcome in others] == [1.0] * 50, "restarted in another process"


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        (
            "def score(response): return 1",
            {},
            r"reward\.function: score\(response\) cannot be called as score\(response, problem, sample\)",
        ),
        ("def score(response, problem, sample): return 1", {"bonus": 1}, r"reward\.args: .*unexpected keyword argument 'bonus'"),
        ("def score(response, problem, sample, bonus): return 1", {}, r"reward\.args: .*missing a required argument: 'bonus'"),
        ("def scores(): return 1", {}, r"reward\.function: .*judge\.py defines no score; did you mean scores\?"),
        ("import time\nimport nothing_here", {}, r"reward\.function: judge\.py:2: ModuleNotFoundError"),
        ("def score(:", {}, r"reward\.function: judge\.py:1: "),
        ("class score: pass", {}, r"reward\.function: .* is a class"),
    ],
)
def test_function_that_cannot_be_called_is_refused_at_the_start(tmp_path: Path, text: str, args: dict[str, object], message: str) -> None:
    (tmp_path / "judge.py").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        rewarded(RewardConfig(function=f"{tmp_path / 'judge.py'}:score", args=args), "2")
    assert "\n" not in str(caught.value)


def test_module_that_starts_threads_is_loaded_by_every_process(tmp_path: Path) -> None:
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n" + PLAIN
    (tmp_path / "judge.py").write_text(text)
    results = rewarded(RewardConfig(function=f"{tmp_path / 'judge.py'}:score", workers=2, timeout_s=6), "hang", "sleep", *["2"] * 20)
    assert results[0][1].timed_out and all(outcome.reward == 1.0 for _, outcome in results[2:])


def test_children_of_a_late_call_are_killed_even_in_their_own_session(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import subprocess, sys, threading, time\n"
        "def start(file):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        "    open(file, 'a').write(f'{child.pid} ')\n"
        "def score(response, problem, sample):\n"
        "    start(response)\n"
        "    threading.Thread(target=start, args=(response,)).start()\n"
        "    time.sleep(1000)\n"
    )
    pids = tmp_path / "pids"
    ((_, outcome),) = rewarded(RewardConfig(function=f"{tmp_path / 'judge.py'}:score", timeout_s=3), str(pids))
    started = [int(pid) for pid in pids.read_text().split()]
    assert outcome.timed_out and len(started) == 2
    deadline = time.monotonic() + 5
    while any(map(runs, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, started))


def test_daemons_that_a_call_has_left_are_killed_at_the_end(tmp_path: Path) -> None:
    """In their own session, with the template as their parent."""
    (tmp_path / "judge.py").write_text(
        "import os, sys, time\n"
        "def score(response, problem, sample):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if (pid := os.fork()) == 0:\n"
        "            time.sleep(1000)\n"
        "        open(response, 'w').write(str(pid))\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    return 1.0\n"
    )
    file = tmp_path / "pid"
    ((_, outcome),) = rewarded(RewardConfig(function=f"{tmp_path / 'judge.py'}:score"), str(file))
    assert outcome.reward == 1.0
    deadline = time.monotonic() + 5
    while runs(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(int(file.read_text()))


CONTROLLER = """\
import asyncio, sys
from mtpctl.recipe.reward import RewardConfig
from mtpctl.rl.rewards.pool import Rewarder
from tests.rl.rewards.test_pool import PROBLEM, sample

async def run():
    async with Rewarder(RewardConfig(function=sys.argv[1], timeout_s=900)) as reward:
        await reward(sys.argv[2], PROBLEM, sample())

asyncio.run(run())
"""


@pytest.mark.parametrize("kind", ["plain", "coroutine", "loaded by each"])
def test_children_of_calls_are_killed_if_the_controller_is_killed(tmp_path: Path, kind: str) -> None:
    wait = "await asyncio.sleep(1000)" if kind == "coroutine" else "time.sleep(1000)"
    (tmp_path / "judge.py").write_text(
        "import asyncio, os, subprocess, sys, threading, time\n"
        + ("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n" if kind == "loaded by each" else "")
        + ("async " if kind == "coroutine" else "")
        + "def score(response, problem, sample):\n"
        '    server = \'import subprocess, sys; subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])\'\n'
        "    child = subprocess.Popen([sys.executable, '-c', server], start_new_session=True)\n"
        "    open(response + '.part', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "    os.rename(response + '.part', response)\n"
        f"    {wait}\n"
    )
    file = tmp_path / "pids"
    command = [sys.executable, "-c", CONTROLLER, f"{tmp_path / 'judge.py'}:score", str(file)]
    with subprocess.Popen(command, env=with_tree()) as controller:
        try:
            wait_until(lambda: file.exists() or controller.poll() is not None, 60)
            worker, child = map(int, file.read_text().split())
            wait_until(lambda: bool(descendants(child)), 20)
            started = [worker, child, *descendants(child)]
        finally:
            controller.kill()
    wait_until(lambda: not any(map(runs, started)), 20)


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_math_that_never_ends_is_wrong_and_does_not_delay_others() -> None:
    config = RewardConfig(function="math", args={"seconds": 1}, timeout_s=20)
    results = rewarded(config, "$10^{10^{10^{10}}}$", *["$2$"] * 50)
    assert [outcome.reward for _, outcome in results] == [0.0] + [1.0] * 50


def test_second_hung_call_is_replaced_by_the_spare_process(plain: str) -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    async def run() -> tuple[set[int], float, float]:
        others = children()  # of earlier tests
        async with Rewarder(RewardConfig(function=plain, workers=1, timeout_s=60)) as reward:
            hanging = [asyncio.create_task(reward("spin", PROBLEM, sample()))]
            await asyncio.sleep(0)  # so that it starts first
            before = (await reward("2", PROBLEM, sample())).parts["pid"]
            while len(processes := children() - others) < 4:  # template, hanging, free, spare
                await asyncio.sleep(0.01)
            hanging.append(asyncio.create_task(reward("spin", PROBLEM, sample())))
            await asyncio.sleep(0)
            after = (await reward("2", PROBLEM, sample())).parts["pid"]
            for task in hanging:
                task.cancel()
            return processes, before, after

    processes, before, after = asyncio.run(asyncio.wait_for(run(), 60))
    assert before != after and after in processes


BURNS = """\
import time

def score(response, problem, sample):
    end = time.process_time() + 0.002
    while response == "hang" or time.process_time() < end: pass
    return 1.0
"""


def test_calls_that_use_much_cpu_run_at_idle_priority(tmp_path: Path) -> None:
    """One in a hundred, on one CPU. The bound is in CPU seconds, because a busy machine slows all of them."""
    (tmp_path / "judge.py").write_text(BURNS)
    hanging, every = 8, 100

    async def run() -> tuple[float, float]:
        async with Rewarder(RewardConfig(function=f"{tmp_path / 'judge.py'}:score", timeout_s=200)) as reward:
            await asyncio.gather(*(reward("quick", PROBLEM, sample()) for _ in range(every)))
            before = psutil.Process().children(recursive=True)
            spent = sum(sum(each.cpu_times()[:2]) for each in before)
            tasks = [
                asyncio.create_task(reward("hang" if n % every == every // 2 else "quick", PROBLEM, sample()))
                for n in range(hanging * every)
            ]
            quick = [task for n, task in enumerate(tasks) if n % every != every // 2]
            assert all(outcome.reward == 1.0 for outcome in await asyncio.gather(*quick))
            after = sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True))
            assert not any(task.done() for task in tasks if task not in quick)
            for task in tasks:
                task.cancel()
            return after - spent, 0.002 * len(quick)

    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        used, needed = asyncio.run(asyncio.wait_for(run(), 200))
    finally:
        os.sched_setaffinity(0, allowed)
    assert used < 4 * needed  # 1.2 times on an idle machine, 2.1 on a busy one, 5.9 without the priority


def test_worker_imports_no_heavy_package() -> None:
    program = "import mtpctl.rl.rewards.worker, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert not {"torch", "ray", "numpy", "transformers", "sympy", "pydantic"} & set(loaded)
