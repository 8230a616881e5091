"""vLLM's drafters of several MTP layers take one depth's layer for all of them, or none beyond the first, without the patch."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm.model_executor.models.mimo_mtp import MiMoMTP

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import depths
from mtpctl.rollout.vllm.plugin import install

COMPILED = """
import sys
import torch
from torch import nn
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP


class Layers(nn.Module):
    def forward(self, input_ids, positions, hidden_states, inputs_embeds, spec_step_idx):
        return hidden_states + (10.0, 20.0, 30.0)[spec_step_idx]


if sys.argv[1] == "patched":
    from mtpctl.rollout.vllm.patches import depths

    depths.install()
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
    print([float(call(depth)[0]) for depth in range(3)])
"""
"""A DeepSeek drafter of three layers that add 10, 20 and 30, compiled as vLLM compiles it: what it adds at depths 1 to 3."""


def compiled(how: str) -> str:
    """What `COMPILED` prints, in a process of its own: a patch stays for as long as its process lives."""
    # An engine that another test has started in this process on a CPU has switched compilation off.
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_upstream_runs_the_first_layer_of_a_compiled_drafter_for_every_depth() -> None:
    assert compiled("as shipped") == "[10.0, 10.0, 10.0]"


def test_each_depth_has_its_layer() -> None:
    assert compiled("patched") == "[10.0, 20.0, 30.0]"


def test_mimos_drafter_runs_the_layer_that_it_is_asked_for() -> None:
    install()
    drafter = SimpleNamespace(model=lambda ids, positions, state, embedded, depth: (ids, positions, state, embedded, depth))
    assert MiMoMTP.forward(drafter, "ids", "positions", "state", None, "embedded", 2) == ("ids", "positions", "state", "embedded", 2)


def test_a_drafter_that_takes_later_depths_by_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.delattr(MiMoMTP, "mtpctl_depths")
    with pytest.raises(UpstreamMoved, match="takes later depths by itself"):
        depths.install()
