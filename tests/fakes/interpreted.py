"""Test files that run in Triton's interpreter, which is selected when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.environment import TREE


def pytest_configure(config: pytest.Config) -> None:
    """Multiply in float64. `run_interpreted` loads this module as a plugin.

    The interpreter multiplies with NumPy. BLAS kernels of some CPUs sum in another order if a tile has fewer rows, so that rows of tiles of
    different heights differ in their last bit; GPUs do not.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def run_interpreted(*tests: Path | str, seconds: float = 200) -> None:
    """Run the tests of files, or single ones, in a separate process with the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", __name__, f"--timeout={seconds:g}", *map(str, tests)],
        cwd=TREE,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
