"""Routers are not sought within the block, and another release of megatron-core is refused."""

from __future__ import annotations

import importlib

import pytest

from mtpctl.compat.router_updates import SEARCHES, without_router_updates

UPSTREAM = importlib.import_module("megatron.core.distributed.finalize_model_grads")


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_is_left_out_within_the_block_alone(name: str) -> None:
    before = getattr(UPSTREAM, name)
    with pytest.raises(KeyError), without_router_updates():
        assert getattr(UPSTREAM, name)(None, [object()], tp_dp_cp_group=None) is None
        raise KeyError
    assert getattr(UPSTREAM, name) is before


@pytest.mark.parametrize("name", SEARCHES)
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kept = {each: getattr(UPSTREAM, each) for each in SEARCHES}
    monkeypatch.delattr(UPSTREAM, name)
    with pytest.raises(RuntimeError, match=f"no longer updates routers by {name}"), without_router_updates():
        pass
    assert all(getattr(UPSTREAM, each) is kept[each] for each in SEARCHES if each != name)
