"""Each MTP layer runs at its depth, and drafting times are reported by number of drafts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.mimo_mtp import MiMoMTP

from mtpctl.rollout.vllm.patches.drafter import TIMED_STEPS, DraftTimes
from mtpctl.rollout.vllm.plugin import install

COMPILED = """
import torch
from torch import nn
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP


class Layers(nn.Module):
    def forward(self, input_ids, positions, hidden_states, inputs_embeds, spec_step_idx):
        return hidden_states + (10.0, 20.0, 30.0)[spec_step_idx]


def added():
    config = VllmConfig(compilation_config=CompilationConfig(mode=2, backend="eager"))
    drafter = DeepSeekMTP.__new__(DeepSeekMTP)
    nn.Module.__init__(drafter)
    drafter.model = Layers()
    drafter.vllm_config, drafter.compilation_config = config, config.compilation_config
    drafter.do_not_compile = drafter.compiled = drafter.was_aot_compile_fn_loaded_from_disk = False
    drafter._dynamic_arg_dims, drafter._compile_tag = {}, ""
    with set_current_vllm_config(config):
        TorchCompileWithNoGuardsWrapper.__init__(drafter)
        call = lambda depth: drafter(
            input_ids=torch.zeros(2, dtype=torch.int64), positions=torch.zeros(2), hidden_states=torch.zeros(2), spec_step_idx=depth
        )
        return [float(call(depth)[0]) for depth in range(3)]


shipped = added()
from mtpctl.rollout.vllm.patches.drafter import install_depths

install_depths()
print(shipped, added())
"""
"""A DeepSeek drafter of three layers that add 10, 20 and 30, compiled as vLLM compiles it: what it adds at depths 1 to 3 without and with
the patch."""


def test_patch_runs_the_layer_of_each_depth_of_a_compiled_drafter() -> None:
    """Upstream runs the first layer for every depth."""
    # In a process of its own: a patch stays for as long as its process lives.
    # An engine that another test has started in this process on a CPU has switched compilation off.
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[10.0, 10.0, 10.0] [10.0, 20.0, 30.0]"


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
    assert times.take() == {1: 0.5, 3: 2.0}
    assert times.take() == {}


def test_only_recent_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = DraftTimes()
    for seconds in [1.0] * TIMED_STEPS + [2.0] * TIMED_STEPS:
        draft(times, 1, seconds, monkeypatch)
    assert times.take() == {1: 2.0}


class Event:
    """A CUDA event that has passed, or not."""

    made: list[Event]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.passed = True
        Event.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Event) -> float:
        assert other.passed
        return 1.5


def test_steps_that_the_gpu_has_not_finished_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = DraftTimes()
    for _ in range(2):
        times.begin(2, torch.device("cuda"))()
    times.begin(1, torch.device("cuda"))()
    Event.made[-1].passed = False
    assert times.take() == {2: pytest.approx(0.0015)}
