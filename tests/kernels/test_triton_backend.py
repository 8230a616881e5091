"""The Triton backend without a GPU: memory arithmetic, and imports without Triton."""

from __future__ import annotations

import subprocess
import sys

import torch

from mtpctl.kernels.backend import Problem, vocab_shard
from mtpctl.kernels.triton_backend import Tiles, Triton
from tests.environment import TREE


def reference_problem(workspace: int, rows: int = 8192) -> Problem:
    hidden, weight = (
        torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta"),
        torch.empty(151680, 4096, dtype=torch.bfloat16, device="meta"),
    )
    return Problem(
        hidden, weight, torch.empty(rows, dtype=torch.long, device="meta"), 1.0, 151680, workspace, vocab_shard(weight, None, None)
    )


def test_saved_logits_and_chunk_fit_the_workspace_together() -> None:
    backend = Triton(Tiles())
    for gib in (0.25, 0.5, 1, 2, 3, 8):
        p = reference_problem(int(gib * (1 << 30)))
        saved, chunk = backend._saved_columns(p), backend._chunk_columns(p)
        columns = saved if saved == p.vocab_columns else saved + chunk
        assert 4 * 8192 * 4096 + columns * 8192 * 2 <= p.workspace_bytes
        assert (saved == p.vocab_columns) == (gib >= 3)


def test_policy_loss_slices_save_all_logits() -> None:
    backend = Triton(Tiles())
    whole = reference_problem(3 << 29)
    rows = backend.rows_per_slice(whole)
    assert 4096 <= rows < 8192
    assert backend._saved_columns(reference_problem(3 << 29, rows)) == whole.vocab_columns


def test_kernels_run_on_a_cpu_without_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from mtpctl.kernels import activations, grouped, logprob, norm, policy, qkv, routing, rows
assert activations.swiglu(torch.ones(2, 4)).shape == (2, 2)
assert logprob.linear_logprob(torch.ones(1, 8), torch.ones(3, 8), torch.tensor([1])).logprob.isfinite().all()
try:
    norm.rms_norm_kernel[(1,)]()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=TREE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "Triton is not installed\n"
