"""All kernels under Triton's interpreter, which computes on a CPU."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.interpreted import run_interpreted


def test_kernels_under_the_interpreter() -> None:
    """In one process: its imports take longer than the tests of most files."""
    run_interpreted(*Path(__file__).parent.glob("interpreted_*.py"))
