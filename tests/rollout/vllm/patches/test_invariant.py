"""Layers of a bitwise engine on CUDA: they compute with the trainer's operations, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.interpreted import run_interpreted


def test_layers_under_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_invariant.py"))
