"""A failed start of an engine core is reported with the exception of the core's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtpctl.rollout.vllm.engine import CORE_FAILED, add_root_cause, find_root_cause
from tests.environment import with_tree
from tests.fakes.engine_checkpoints import random_tensors, tiny_config, write_checkpoint

ALONE = """
Process EngineCore:
Traceback (most recent call last):
  File "core.py", line 1488, in run_engine_core
    from cutlass import cute
    ^^^^^^^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'cutlass'
"""
LOGGED = """
(EngineCore pid=71) ERROR 11-22 18:12:00 [core.py:1510] EngineCore failed to start.
(EngineCore pid=71) ERROR 11-22 18:12:00 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=71) ERROR 11-22 18:12:00 [core.py:1510]   File "core.py", line 1488, in run_engine_core
(EngineCore pid=71) ERROR 11-22 18:12:00 [core.py:1510] torch.OutOfMemoryError: CUDA out of memory.
(EngineCore pid=71) ERROR 11-22 18:12:00 [core.py:1510] Tried to allocate 2 GiB
"""
WORKER = """
\x1b[36m(Worker_TP1 pid=72)\x1b[0;0m ERROR 11-22 18:12:00 [multiproc_executor.py:9] Traceback (most recent call last):
\x1b[36m(Worker_TP0 pid=73)\x1b[0;0m ERROR 11-22 18:12:00 [multiproc_executor.py:9] Traceback (most recent call last):
\x1b[36m(Worker_TP1 pid=72)\x1b[0;0m ERROR 11-22 18:12:00 [multiproc_executor.py:9]   File "gpu_worker.py", line 3
\x1b[36m(Worker_TP1 pid=72)\x1b[0;0m ERROR 11-22 18:12:00 [multiproc_executor.py:9] ValueError: no kernel for heads of 24
(EngineCore pid=71) ERROR 11-22 18:12:01 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=71) ERROR 11-22 18:12:01 [core.py:1510] Exception: WorkerProc initialization failed due to an exception in a background
Traceback (most recent call last):
  File "resource_tracker.py", line 264, in main
KeyError: '/psm_5bf0'
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (ALONE, "ModuleNotFoundError: No module named 'cutlass'"),
        (LOGGED, "torch.OutOfMemoryError: CUDA out of memory."),
        (WORKER, "ValueError: no kernel for heads of 24"),
        ("(EngineCore pid=71) WARNING 11-22 18:12:00 [core.py:1] note: slow\nKeyError: 'printed, not raised'\n", None),
    ],
    ids=["alone", "logged", "a worker's", "none"],
)
def test_root_cause_is_the_last_exception_before_a_referring_error(text: str, cause: str | None) -> None:
    assert find_root_cause(text) == cause


def test_only_output_of_the_block_is_searched(tmp_path: Path) -> None:
    stderr = tmp_path / "worker.err"
    stderr.write_text(ALONE)
    with pytest.raises(RuntimeError, match=rf"^{CORE_FAILED}$"), add_root_cause(stderr):
        raise RuntimeError(CORE_FAILED)
    message = rf"^{CORE_FAILED}; root cause: torch\.OutOfMemoryError: CUDA out of memory\.$"
    with pytest.raises(RuntimeError, match=message), add_root_cause(stderr):
        with stderr.open("a") as file:
            file.write(LOGGED)
        raise RuntimeError(CORE_FAILED)


def test_other_errors_and_other_kinds_of_stderr_are_unchanged(tmp_path: Path) -> None:
    stderr = tmp_path / "worker.err"
    stderr.touch()
    with pytest.raises(RuntimeError, match=r"^no such model$"), add_root_cause(stderr):
        stderr.write_text(ALONE)
        raise RuntimeError("no such model")
    reads, writes = os.pipe()
    with pytest.raises(RuntimeError, match=rf"^{CORE_FAILED}$"), add_root_cause(Path(f"/proc/self/fd/{writes}")):
        os.write(writes, ALONE.encode())
        raise RuntimeError(CORE_FAILED)
    os.close(reads)
    os.close(writes)


START = """
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from mtpctl.rollout.vllm.engine import VllmEngine
from tests.fakes.engines import cpu_settings

if __name__ == "__main__":
    # Ten bytes are less than a block of the KV cache, which the core alone knows.
    settings = cpu_settings(Path(sys.argv[1]), k=0, engine_args={"kv_cache_memory_bytes": 10})
    environment = {name: value for name, value in settings.environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    try:
        asyncio.run(VllmEngine.start(replace(settings, in_loop=False, environment=environment)))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_failure_of_a_separate_core_process_names_the_root_cause(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tiny_config(), random_tensors(tiny_config(), 0))
    script = tmp_path / "start.py"
    script.write_text(START)
    with (tmp_path / "stderr").open("wb") as stderr:
        environment = with_tree()
        command = [sys.executable, str(script), str(folder)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, timeout=240, text=True)
    assert CORE_FAILED in result.stdout and "; root cause: ValueError: " in result.stdout, (tmp_path / "stderr").read_text()[-4000:]
