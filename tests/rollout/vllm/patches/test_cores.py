"""Engine cores are forked from a server, with the environment and threads of the process that starts them, and end with it."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.patches import cores
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engines import START_S, cpu_settings
from tests.fakes.processes import command_line, runs
from tests.fakes.toys import MIMO, toy_folder

PRELOADED = "tests.fakes.processes"
VARIABLE = "MTPCTL_TEST_SET_AFTER_THE_START"
END_S = 60


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[forkserver.ForkServer]:
    """A fork server for this test, which imports little."""
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(cores, "PRELOADED_MODULE", PRELOADED)
    yield server
    server._stop()  # type: ignore[attr-defined]


def core_context() -> object:
    from vllm.v1.engine import utils

    cores.install_forked_cores()
    return utils.get_mp_context()


def describe(pipe: Connection) -> None:
    import torch

    process = multiprocessing.current_process()
    pipe.send((process.name, os.environ.get(VARIABLE), PRELOADED in sys.modules, torch.get_num_threads(), os.getppid(), "" in sys.path))


@pytest.mark.parametrize("threads", ["3", "3,2"])
def test_a_core_has_the_environment_threads_and_name_that_the_actor_gives(
    threads: str, fork_server: forkserver.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores.start_fork_server()
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv(VARIABLE, "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    core = cores.CoreContext().Process(target=describe, name="EngineCore", kwargs={"pipe": sender})
    core.start()
    description = receiver.recv()
    core.join()
    server = fork_server._forkserver_pid  # type: ignore[attr-defined]
    assert description == ("EngineCore", "yes", True, 3, server, False)
    assert core.exitcode == 0
    cores.stop_fork_server()
    assert not runs(server)


def test_cores_are_spawned_by_vllm_without_a_prepared_fork_server(fork_server: forkserver.ForkServer) -> None:
    assert not isinstance(core_context(), cores.CoreContext)
    fork_server.ensure_running()  # of another user
    cores.start_fork_server()
    assert not isinstance(core_context(), cores.CoreContext)
    fork_server._stop()  # type: ignore[attr-defined]
    cores.start_fork_server()
    assert isinstance(core_context(), cores.CoreContext)


def test_cores_are_spawned_by_vllm_if_the_fork_server_has_ended(
    fork_server: forkserver.ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    cores.start_fork_server()
    server = psutil.Process(fork_server._forkserver_pid)  # type: ignore[attr-defined]
    server.kill()
    ends(server.pid)
    assert not isinstance(core_context(), cores.CoreContext)
    assert "the core imports vLLM itself" in caplog.text


def sleep_long(pipe: Connection) -> None:
    pipe.send(os.getpid())
    time.sleep(10 * END_S)


def actor() -> None:
    """What a process does that starts a core, and prints the ids of the core and of the fork server."""
    cores.PRELOADED_MODULE = PRELOADED
    cores.start_fork_server()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    core = cores.CoreContext().Process(target=sleep_long, name="EngineCore", kwargs={"pipe": sender})
    core.start()
    print(receiver.recv(), forkserver._forkserver._forkserver_pid, flush=True)  # type: ignore[attr-defined]
    time.sleep(10 * END_S)


def test_core_and_fork_server_end_if_the_actor_is_killed() -> None:
    program = f"from {__name__} import actor; actor()"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4])
    assert process.stdout is not None
    children = [int(text) for text in process.stdout.readline().split()]
    assert len(children) == 2 and all(map(runs, children))
    process.send_signal(signal.SIGKILL)
    process.wait()
    ends(*children)


def ends(*processes: int) -> None:
    deadline = time.monotonic() + END_S
    while any(map(runs, processes)):
        assert time.monotonic() < deadline, processes
        time.sleep(0.02)


@pytest.mark.slow
def test_an_engine_in_separate_processes_answers(tmp_path: Path) -> None:
    settings = cpu_settings(toy_folder(MIMO, tmp_path, 0, "fp32"), dtype="fp32", max_in_flight=8)
    variables = {name: value for name, value in settings.environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    settings = dataclasses.replace(
        settings,
        in_loop=False,
        args=settings.args | {"distributed_executor_backend": "mp"},
        environment=variables | {"OMP_NUM_THREADS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
    )

    async def answer() -> tuple[int, list[str]]:
        engine = await VllmEngine.start(settings)
        try:
            sample = await engine.generate(GenerationRequest(Sample("p", "g", [5, 6, 7, 8]), 8, temperature=0.0))
            server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
            names = [command_line(child).strip() for child in psutil.Process(server).children(recursive=True)]
            return len(sample.response_ids), sorted(names)
        finally:
            await engine.shutdown()

    assert asyncio.run(asyncio.wait_for(answer(), START_S)) == (8, ["VLLM::EngineCore", "VLLM::Worker"])
    assert forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]
