"""Engines that start at the same time compile one after another only as long as the cache is empty."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from mtpctl.rollout.vllm.patches import cores
from mtpctl.rollout.vllm.patches.cores import install_shared_compilation, run_first_exclusively

LONG_S = 60.0


def test_others_wait_for_the_first_and_then_run_at_the_same_time(tmp_path: Path) -> None:
    lock, together = tmp_path / "lock", threading.Barrier(2)
    entered = threading.Semaphore(0)

    def load() -> None:
        with run_first_exclusively(lock):
            entered.release()
            together.wait(LONG_S)  # passes only if both are in the block

    others = [threading.Thread(target=load, daemon=True) for _ in range(2)]
    with run_first_exclusively(lock):
        for other in others:
            other.start()
        assert not entered.acquire(timeout=0.3), "the first one is alone"
    for other in others:
        other.join(LONG_S)
    assert not together.broken
    assert not any(other.is_alive() for other in others)


def test_an_engine_that_compiles_takes_the_lock_and_an_eager_one_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert install_shared_compilation()
    assert UniProcExecutor.determine_available_memory is Executor.determine_available_memory
    monkeypatch.setattr(cores.tempfile, "gettempdir", lambda: str(tmp_path))

    def locks(mode: CompilationMode) -> list[str]:
        config = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode), compute_hash=lambda: "graphs")
        during: list[str] = []
        executor: Any = SimpleNamespace(vllm_config=config)
        executor.collective_rpc = lambda method: during.extend(path.name for path in tmp_path.iterdir()) or [1]
        assert Executor.determine_available_memory(executor) == [1]
        return during

    assert locks(CompilationMode.NONE) == []
    assert [name.endswith("-graphs.lock") for name in locks(CompilationMode.VLLM_COMPILE)] == [True]
