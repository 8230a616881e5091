"""What the tests' forked ranks need of the process that forks them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mtpctl.model.parallel import Rank
from tests.fakes.forked import exit_code, run_ranks


def gradient(rank: Rank) -> float:
    x = torch.full((1,), 3.0, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return float(x.grad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, autograd has a thread for it")
def test_ranks_run_backward_passes_after_this_process_has_traced() -> None:
    with FakeTensorMode():  # as torch.compile does
        torch.ones(1)
    torch.ones(1, requires_grad=True).sum().backward()
    answers, error = run_ranks(1, gradient, 60)
    assert not error, error
    assert answers == [6.0]


class Cycle:
    """Garbage that only a collection destroys, as the process groups of a closed engine."""

    def __init__(self, destroyed: Path) -> None:
        self.destroyed, self.itself = destroyed, self

    def __del__(self) -> None:
        self.destroyed.write_text(str(os.getpid()))


def test_garbage_of_this_process_is_not_destroyed_in_a_forked_one(tmp_path: Path) -> None:
    destroyed = tmp_path / "by"
    gc.disable()
    try:
        Cycle(destroyed)
        assert exit_code(gc.collect, 60) == 0
    finally:
        gc.enable()
    assert not destroyed.exists()
    gc.collect()
    assert destroyed.read_text() == str(os.getpid())
