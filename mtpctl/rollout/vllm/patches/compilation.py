"""Engines of one host compile a model once (vLLM 0.32.0).

vLLM stores compiled graphs in a cache on disk, but engines that start at the same time all miss it: each compiles, and they compete for
the host's cores. Here the first one compiles while the others wait, and then all others load its graphs from the cache at the same time.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.rollout.vllm.patches.guard import assign, patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor import Executor


@patch
def install_shared_compilation() -> None:
    """Wait for other engines before the run in which vLLM compiles the model and measures its memory."""
    from vllm.v1.executor import Executor

    determine = Executor.determine_available_memory

    def determine_available_memory(self: Executor) -> list[int]:
        if not _compiles(self.vllm_config):
            return determine(self)
        with first_alone(lock_path(self.vllm_config)):
            return determine(self)

    assign(Executor, determine_available_memory=determine_available_memory)


def _compiles(config: VllmConfig) -> bool:
    from vllm.config import CompilationMode

    return config.compilation_config.mode not in (None, CompilationMode.NONE)


def lock_path(config: VllmConfig) -> Path:
    """The lock of all engines on this host, of this user, whose graphs are the same."""
    return Path(tempfile.gettempdir()) / f"mtpctl-compilation-{os.getuid()}-{config.compute_hash()}.lock"


@contextmanager
def first_alone(path: Path) -> Iterator[None]:
    """Run the block alone if no other process is in it; otherwise wait until the one that runs alone has left it.

    The system releases the lock of a process that ends.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
