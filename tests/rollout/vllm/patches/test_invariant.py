"""Layers of a bitwise engine on CUDA: they compute with the trainer's operations, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[4]


def test_layers_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("interpreted_invariant.py"))],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
