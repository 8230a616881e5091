"""Routers' counters are not sought within the block, and another release of megatron-core is refused."""

from __future__ import annotations

import importlib

import pytest

from mtpctl.compat import router_counters

UPSTREAM = importlib.import_module("megatron.core.distributed.finalize_model_grads")


def test_the_search_is_left_out_within_the_block_alone() -> None:
    before = UPSTREAM.reset_model_temporary_tensors
    with pytest.raises(KeyError), router_counters.not_sought():
        assert UPSTREAM.reset_model_temporary_tensors(None, [object()]) is None
        raise KeyError
    assert UPSTREAM.reset_model_temporary_tensors is before


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(UPSTREAM, "reset_model_temporary_tensors")
    with pytest.raises(RuntimeError, match="no longer zeroes routers' counters"), router_counters.not_sought():
        pass
