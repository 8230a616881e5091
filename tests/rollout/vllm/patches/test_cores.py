"""Engine cores come from a fork server, with the environment and threads of the process that starts them."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.patches import cores
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.engines import START_S, cpu_settings
from tests.fakes.processes import command_line
from tests.fakes.toys import MIMO, toy_folder

PRELOADED = "tests.fakes.processes"
VARIABLE = "MTPCTL_TEST_SET_AFTER_THE_START"


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server of this test alone, which imports little."""
    monkeypatch.setattr(forkserver, "_forkserver", server := forkserver.ForkServer())
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(cores, "IMPORTS", PRELOADED)


def describe(pipe: Connection) -> None:
    import torch

    process = multiprocessing.current_process()
    pipe.send((process.name, os.environ.get(VARIABLE), PRELOADED in sys.modules, torch.get_num_threads(), os.getppid()))


def test_a_core_has_the_environment_and_name_that_its_parent_gives(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cores.prepare()
    monkeypatch.setenv(VARIABLE, "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    core = cores.CoreContext().Process(target=describe, name="EngineCore", kwargs={"pipe": sender})
    core.start()
    name, value, preloaded, threads, parent = receiver.recv()
    core.join()
    assert (name, value, preloaded, threads, core.exitcode) == ("EngineCore", "yes", True, 3, 0)
    assert parent == forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def test_cores_are_spawned_as_before_without_a_fork_server(fork_server: None) -> None:
    from vllm.v1.engine import utils

    cores.install_forked_cores()
    assert not isinstance(utils.get_mp_context(), cores.CoreContext)
    cores.prepare()
    assert isinstance(utils.get_mp_context(), cores.CoreContext)


@pytest.mark.slow
def test_an_engine_in_processes_of_its_own_answers(tmp_path: Path) -> None:
    settings = cpu_settings(toy_folder(MIMO, tmp_path, 0, "fp32"), dtype="fp32", max_in_flight=8)
    kept = {name: value for name, value in settings.environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    settings = dataclasses.replace(
        settings,
        in_loop=False,
        args=settings.args | {"distributed_executor_backend": "mp"},
        environment=kept | {"OMP_NUM_THREADS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
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
