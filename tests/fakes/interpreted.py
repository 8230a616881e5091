"""Test files that run in Triton's interpreter, which is selected when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.environment import TREE


def run_interpreted(*tests: Path | str, seconds: float = 200) -> None:
    """Run the tests of files, or single ones, in a separate process with the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={seconds:g}", *map(str, tests)],
        cwd=TREE,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
