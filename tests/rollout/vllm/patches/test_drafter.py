"""Each MTP layer runs at its depth, and drafting times are reported by number of drafts."""

from __future__ import annotations

import inspect
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.mimo_mtp import MiMoMTP

from mtpctl.rollout.vllm.patches import drafter as patches
from mtpctl.rollout.vllm.patches.drafter import DRAFTING_TIMES, DraftTimes, install_depths
from mtpctl.rollout.vllm.plugin import install


class Layers(nn.Module):
    """Three MTP layers, which add 10, 20 and 30."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None, spec_step_idx: int
    ) -> Tensor:
        return hidden_states + (10.0, 20.0, 30.0)[spec_step_idx]


def added_by_a_compiled_drafter() -> list[float]:
    """What a DeepSeek drafter with `Layers`, compiled as vLLM compiles it, adds at depths 1 to 3."""
    config = VllmConfig(compilation_config=CompilationConfig(mode=2, backend="eager"))
    drafter = DeepSeekMTP.__new__(DeepSeekMTP)
    nn.Module.__init__(drafter)
    drafter.model = Layers()
    drafter.vllm_config, drafter.compilation_config = config, config.compilation_config
    drafter.do_not_compile = drafter.compiled = drafter.was_aot_compile_fn_loaded_from_disk = False
    drafter._dynamic_arg_dims, drafter._compile_tag = {}, ""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(2, dtype=torch.int64), "positions": torch.zeros(2), "hidden_states": torch.zeros(2)}
    with set_current_vllm_config(config):
        TorchCompileWithNoGuardsWrapper.__init__(drafter)
        return [float(drafter(**inputs, spec_step_idx=depth)[0]) for depth in range(3)]


def test_patch_runs_the_layer_of_each_depth_of_a_compiled_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream runs the first layer for every depth."""
    # An engine that another test has started in this process on a CPU has switched compilation off, and the patch may be in place.
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(DeepSeekMTP, "__call__", inspect.unwrap(DeepSeekMTP.__call__))
    monkeypatch.setattr(MiMoMTP, "forward", MiMoMTP.forward)
    monkeypatch.setattr(install_depths, "is_applied", False)
    monkeypatch.setattr(patches, "_takes_later_depths", lambda forward: False)
    with torch._dynamo.config.patch(disable=False):
        assert added_by_a_compiled_drafter() == [10.0, 10.0, 10.0]
        install_depths()
        assert added_by_a_compiled_drafter() == [10.0, 20.0, 30.0]


def test_mimo_drafter_runs_the_requested_layer() -> None:
    install()
    drafter = SimpleNamespace(model=lambda ids, positions, state, embedded, depth: (ids, positions, state, embedded, depth))
    assert MiMoMTP.forward(drafter, "ids", "positions", "state", None, "embedded", 2) == ("ids", "positions", "state", "embedded", 2)


CPU = torch.device("cpu")


def draft(times: DraftTimes, drafts: int, seconds: float, monkeypatch: pytest.MonkeyPatch, device: torch.device = CPU) -> None:
    clock = iter([10.0, 10.0 + seconds])
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        times.begin(drafts, device)()


def test_take_returns_medians_by_number_of_drafts_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    times = DraftTimes()
    for seconds in (0.25, 0.5, 8.0):
        draft(times, 1, seconds, monkeypatch)
    draft(times, 3, 2.0, monkeypatch)
    assert times.take_medians() == {1: 0.5, 3: 2.0}
    assert times.take_medians() == {}


def test_only_recent_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = DraftTimes()
    for seconds in [1.0] * DRAFTING_TIMES + [2.0] * DRAFTING_TIMES:
        draft(times, 1, seconds, monkeypatch)
    assert times.take_medians() == {1: 2.0}


class Event:
    """A CUDA event that has passed, or not."""

    created: list[Event]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.passed = True
        Event.created.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        assert other.passed
        return 1.5


def test_steps_that_the_gpu_has_not_finished_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.created = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = DraftTimes()
    for _ in range(2):
        times.begin(2, torch.device("cuda"))()
    times.begin(1, torch.device("cuda"))()
    Event.created[-1].passed = False
    assert times.take_medians() == {2: pytest.approx(0.0015)}
