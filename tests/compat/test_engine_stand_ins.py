"""The engine's smaller stand-ins fail loud where upstream has moved."""

from __future__ import annotations

import queue

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.ssm.gated_delta_net import common

from mtpctl.compat import checkpoint_queue, flash_linear_attention


def test_checkpoint_results_stay_in_this_process(monkeypatch):
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    checkpoint_queue.install()
    assert isinstance(filesystem_async.get_write_results_queue(), queue.Queue)


def test_checkpoint_queue_that_moved(monkeypatch):
    monkeypatch.delattr(filesystem_async, "_results_queue")
    with pytest.raises(RuntimeError, match="_results_queue"):
        checkpoint_queue.install()


def test_delta_net_asks_again_afterwards():
    before = common.HAVE_FLA
    with flash_linear_attention.not_required():
        assert common.HAVE_FLA is True
    assert common.HAVE_FLA is before


def test_delta_net_that_moved(monkeypatch):
    monkeypatch.delattr(common, "HAVE_FLA")
    with pytest.raises(RuntimeError, match="HAVE_FLA"), flash_linear_attention.not_required():
        pass
