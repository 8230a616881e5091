"""Megatron-Bridge is imported without Transformer Engine, and nobody is left to take the stand-in for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import pytest

from mtpctl.compat import transformer_engine


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="the real one is installed")
def test_stand_in_is_gone_after_the_import():
    bridge = transformer_engine.import_auto_bridge()
    assert bridge.__name__ == "AutoBridge"
    assert not [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]
    from megatron.core.models.gpt import gpt_layer_specs

    assert gpt_layer_specs.HAVE_TE is False


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.0")
    with pytest.raises(RuntimeError, match=r"megatron-bridge 0\.7\.0 is installed"):
        transformer_engine.import_auto_bridge()
