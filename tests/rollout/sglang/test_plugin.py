"""The SGLang plugin gives the drafter the state before the final norm, and rejects other releases and its own absence."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mtpctl.errors import PrerequisiteMissing, UpstreamMoved
from mtpctl.rollout.sglang import plugin


class Norm(torch.nn.Module):
    """Returns its output, and the sum that it is of."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden / 2, hidden


class Model(torch.nn.Module):
    """Ends in a norm, unless a graph is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.replayed = Norm(), False

    def forward(self, ids: torch.Tensor, positions: Any, batch: Any, embeds: Any) -> torch.Tensor:
        return ids / 2 if self.replayed else self.norm(ids)[0]


class LogitsProcessor:
    """Returns the state that it received for the drafter."""

    def forward(self, ids: Any, hidden: Any, head: Any, batch: Any, hidden_states_before_norm: Any = None) -> Any:
        return hidden_states_before_norm

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.forward(*args, **options)


class MiMo:
    """As SGLang's, of which the plugin replaces `forward`."""

    def __init__(self) -> None:
        self.model, self.logits_processor, self.lm_head = Model(), LogitsProcessor(), None

    def forward(self, *args: Any) -> Any:
        raise AssertionError("upstream's own")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> type[MiMo]:
    """A stand-in for the installed package, of the release that the plugin was written for."""
    model = type("MiMoForCausalLM", (MiMo,), {"forward": MiMo.forward})
    processor = type("LogitsProcessor", (LogitsProcessor,), {"forward": LogitsProcessor.forward})
    for name, stored in (
        ("sglang.srt.layers.logits_processor", {"LogitsProcessor": processor}),
        ("sglang.srt.models.mimo", {"MiMoForCausalLM": model}),
    ):
        module = ModuleType(name)
        vars(module).update(stored)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "version", lambda package: plugin.PINNED)
    return model


def batch(drafts: bool) -> Any:
    return SimpleNamespace(capture_hidden_mode=SimpleNamespace(need_capture=lambda: drafts))


def test_the_drafter_has_the_state_before_the_norm(sglang: type[MiMo]) -> None:
    plugin.register()
    plugin.register()
    ids = torch.ones(3)
    assert sglang().forward(ids, None, batch(drafts=True)) is ids


def test_graph_that_bypasses_the_norm_is_reported_with_drafts(sglang: type[MiMo]) -> None:
    plugin.register()
    model = sglang()
    model.model.replayed = True
    assert model.forward(torch.ones(3), None, batch(drafts=False)) is None
    with pytest.raises(UpstreamMoved, match="the hook on the final norm did not run"):
        model.forward(torch.ones(3), None, batch(drafts=True))


def test_another_release_is_refused(sglang: type[MiMo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda package: "0.6.0")
    with pytest.raises(UpstreamMoved, match=r"written for SGLang 0\.5\.21, found 0\.6\.0"):
        plugin.register()


def test_a_processor_that_takes_no_such_state_is_refused(sglang: type[MiMo], monkeypatch: pytest.MonkeyPatch) -> None:
    processor = sys.modules["sglang.srt.layers.logits_processor"].LogitsProcessor
    monkeypatch.setattr(processor, "forward", lambda self, ids, hidden, head, batch: None)
    with pytest.raises(UpstreamMoved, match="no longer takes hidden_states_before_norm"):
        plugin.register()


def test_environment_without_the_plugin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    result = [EntryPoint("mtpctl", "mtpctl.rollout.sglang.plugin:register", plugin.PLUGIN_GROUP)]
    monkeypatch.setattr(plugin, "entry_points", lambda group: result if group == plugin.PLUGIN_GROUP else [])
    plugin.check_plugin()
    result.clear()
    with pytest.raises(PrerequisiteMissing, match=r"rollout\.python: mtpctl is not installed in SGLang"):
        plugin.check_plugin()
