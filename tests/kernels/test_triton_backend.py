"""The Triton backend without a card: its kernels run under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from mtpctl.kernels.problem import Problem
from mtpctl.kernels.triton_backend import Tiles, Triton

REPOSITORY = Path(__file__).parents[2]


def test_the_kernels_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("interpreted_triton.py"))],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def reference_problem(workspace: int, rows: int = 8192) -> Problem:
    hidden, weight = (
        torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta"),
        torch.empty(151680, 4096, dtype=torch.bfloat16, device="meta"),
    )
    return Problem(hidden, weight, torch.empty(rows, dtype=torch.long, device="meta"), 1.0, 151680, workspace)


def test_what_is_kept_and_what_is_worked_on_fit_the_workspace_together() -> None:
    backend = Triton(Tiles())
    for gib in (0.25, 0.5, 1, 2, 3, 8):
        p = reference_problem(int(gib * (1 << 30)))
        kept, chunk = backend._kept_columns(p), backend._chunk_columns(p)
        columns = kept if kept == p.valid else kept + chunk
        assert 4 * 8192 * 4096 + columns * 8192 * 2 <= p.workspace_bytes
        assert (kept == p.valid) == (gib >= 3)


def test_slices_of_the_policy_loss_keep_every_logit() -> None:
    backend = Triton(Tiles())
    whole = reference_problem(3 << 29)
    rows = backend.rows_that_keep(whole)
    assert 4096 <= rows < 8192
    assert backend._kept_columns(reference_problem(3 << 29, rows)) == whole.valid
