"""Where an engine lets adapters in, a CPU computes experts by its own kernel; upstream names Triton's, which it has not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.platforms import current_platform

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import experts

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="what vLLM's CPU build does")


@dataclass
class Config:
    is_lora_enabled: bool


def test_the_kernel_is_chosen_as_without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "select_unquantized_moe_backend", lambda config: config)
    assert experts.install()
    assert method.select_unquantized_moe_backend(Config(True)) == Config(False)  # type: ignore[arg-type]


def test_a_choice_that_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(method, "select_unquantized_moe_backend")
    with pytest.raises(UpstreamMoved, match=r"patches\.experts"):
        experts.install()
