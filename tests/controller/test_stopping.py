"""The first signal stops a run, the second gives it up, and the loss of its cluster is the error that is reported."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtpctl.controller import stopping
from mtpctl.controller.state import RunState
from mtpctl.controller.stopping import StopHandler
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.train import TrainConfig
from mtpctl.signals import STOP_SIGNALS, StopRequested
from tests.environment import with_tree


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The ends of this process that were armed, instead of arming them."""
    armed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(stopping, "_exit_after", lambda *end: armed.append(end))
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    yield armed  # type: ignore[misc]
    for each, handler in before.items():
        signal.signal(each, handler)


def stops(tmp_path: Path, message: list[str], ended: str | None = None) -> StopHandler:
    daemons: Any = SimpleNamespace(describe_ended=lambda: ended)
    return StopHandler(RunState(tmp_path, TrainConfig()), message.append, daemons)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_signal_stops_after_the_update_and_second_stops_at_once(tmp_path: Path, deadlines: list[Any], number: signal.Signals) -> None:
    message: list[str] = []
    cleaned = []

    async def scenario() -> None:
        stop = stops(tmp_path, message)
        with stop.handle_signals():
            signal.raise_signal(number)
            await asyncio.wait_for(stop.state.stop_requested.wait(), 20)
            assert (stop.number, deadlines) == (number, [])
            signal.raise_signal(number)
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(True)

    with pytest.raises(StopRequested) as caught:
        asyncio.run(scenario())
    assert caught.value.number == number and cleaned
    assert message == ["stopping after this step; another signal stops immediately"]
    assert deadlines == [(stopping.SIGNAL_EXIT_S, 128 + number, "interrupted")]


@pytest.mark.parametrize("error", [None, RuntimeFailure("rollout replica 0: ActorDiedError")])
def test_lost_cluster_stops_the_run_and_is_its_error(tmp_path: Path, deadlines: list[Any], error: RuntimeFailure | None) -> None:
    message: list[str] = []
    line = "Ray on this machine: gcs_server has ended with signal 9; start the same command again to continue"

    async def scenario() -> None:
        stop = stops(tmp_path, message, "gcs_server has ended with signal 9")
        with stop.handle_signals():
            await asyncio.wait_for(stop.state.stop_requested.wait(), 20)
            await asyncio.sleep(0)
            if error is not None:
                raise error

    with pytest.raises(RuntimeFailure) as caught:
        asyncio.run(scenario())
    assert (str(caught.value), caught.value.exit_code, caught.value.__cause__) == (line, 5, error)
    assert message == [f"{line}; stopping after this step"]
    assert deadlines == [(stopping.CLUSTER_EXIT_S, 5, f"error: {line}")]


def test_errors_are_unchanged_while_the_cluster_is_alive(tmp_path: Path, deadlines: list[Any]) -> None:
    async def scenario() -> None:
        with stops(tmp_path, []).handle_signals():
            raise RuntimeFailure("rollout replica 0: ActorDiedError")

    with pytest.raises(RuntimeFailure, match=r"^rollout replica 0"):
        asyncio.run(scenario())


BLOCKED = """
import asyncio, time
from pathlib import Path
from types import SimpleNamespace
from mtpctl.controller import stopping
from mtpctl.controller.state import RunState
from mtpctl.recipe.train import TrainConfig

stopping.POLL_S, stopping.CLUSTER_EXIT_S = 0.01, 0.1
daemons = SimpleNamespace(describe_ended=lambda: "gcs_server has ended with signal 9")

async def scenario():
    with stopping.StopHandler(RunState(Path("."), TrainConfig()), print, daemons).handle_signals():
        time.sleep(600)

asyncio.run(scenario())
"""


def test_lost_cluster_ends_a_run_whose_event_loop_is_blocked_by_a_call_of_ray() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120, env=with_tree())
    line = "error: Ray on this machine: gcs_server has ended with signal 9; start the same command again to continue"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (5, line)


HANGING = """
import asyncio, signal, time
from pathlib import Path
from mtpctl.controller import stopping
from mtpctl.controller.state import RunState
from mtpctl.recipe.train import TrainConfig

stopping.SIGNAL_EXIT_S = 0.1

async def scenario():
    with stopping.StopHandler(RunState(Path("."), TrainConfig()), print).handle_signals():
        try:
            print("ready", flush=True)
            await asyncio.sleep(600)
        finally:
            time.sleep(600)

asyncio.run(scenario())
"""


def test_second_signal_ends_a_process_whose_cleanup_hangs() -> None:
    with subprocess.Popen(
        [sys.executable, "-uc", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=with_tree()
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline().startswith("stopping after this step")
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read() == "interrupted\n"
    assert process.returncode == 143
