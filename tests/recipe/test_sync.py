"""Each value of `sync.transport` is a transport, with a module of the same name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

import pytest

from mtpctl.recipe.sync import TRANSPORTS, SyncConfig


def test_every_value_of_the_key_is_a_transport() -> None:
    variants = get_args(get_args(SyncConfig)[0])
    assert [variant().transport for variant in variants] == list(TRANSPORTS)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_has_a_module_of_its_name(name: str) -> None:
    assert find_spec(f"mtpctl.sync.transports.{name}") is not None
