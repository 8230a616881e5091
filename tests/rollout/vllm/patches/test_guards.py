"""Every patch rejects any vLLM release other than the pinned one, and reports if upstream no longer has the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import cpu_kernels, drafter, exact, fp8_kernels, nemotron_h, sampling, weights
from mtpctl.rollout.vllm.patches.guard import PINNED, Patch
from mtpctl.rollout.vllm.plugin import OURS, install

PROGRAM = """
import asyncio, importlib, json, pkgutil
from torch import nn
from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm import patches
from mtpctl.rollout.vllm.patches import guard

guard.installed = lambda: "0.33.0"
modules = [importlib.import_module(f"{patches.__name__}.{module.name}") for module in pkgutil.iter_modules(patches.__path__)]
calls = {each.name: each for module in modules for each in vars(module).values() if isinstance(each, guard.Patch)}
from mtpctl.rollout.vllm.patches import loop, pauses, weights

for name, call in {
    "weights.refresh_derived": lambda: weights.refresh_derived(nn.Module(), "float32"),
    "weights.renamer": lambda: weights.renamer(nn.Module()),
    "loop.core_in_loop": lambda: loop.core_in_loop().__enter__(),
    "pauses.pause": lambda: asyncio.run(pauses.pause(None, "keep")),
}.items():
    calls[f"{patches.__name__}.{name}"] = call
results = {}
for name, call in calls.items():
    try:
        results[name] = repr(call())
    except UpstreamMoved as moved:
        results[name] = str(moved)
print(json.dumps(results))
"""
"""Calls every patch as if another release were installed, and prints what it returns or raises."""
CPU_ONLY = {
    patch.name
    for module in (cpu_kernels, exact, fp8_kernels, nemotron_h, sampling, weights)
    for patch in vars(module).values()
    if isinstance(patch, Patch) and patch._cpu_only
}


def test_all_patches_apply_together_as_on_a_gpu() -> None:
    """A patch that wraps what another one has wrapped still finds its arguments."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "tests.rollout.vllm.patches.gpu_patches"]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0 and "all patches apply" in done.stdout, done.stderr[-3000:]


def test_every_patch_rejects_another_release() -> None:
    # In a separate process: a patch that is already in place would not be applied again.
    environment = {name: value for name, value in os.environ.items() if name != OURS} | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 32 and results.keys() > CPU_ONLY
    for name, result in results.items():
        if name in CPU_ONLY and not current_platform.is_cpu():
            assert result == "False"
        else:
            assert result.startswith(f"{name} was written for vLLM {PINNED}, found 0.33.0")


@pytest.mark.skipif(not current_platform.is_cpu(), reason="most of them are faults of vLLM's CPU build")
@pytest.mark.parametrize(
    ("patch", "attribute", "replacement", "message"),
    [
        (sampling.install_sampler, f"{sampling.__name__}._loses_result", lambda upstream: False, "remove the patch"),
        (sampling.install_seeds, f"{sampling.__name__}._has_offset", lambda: True, "remove the patch"),
        (cpu_kernels.install_rotary, "vllm._custom_ops.rotary_embedding", lambda *_: None, "no longer shows the fault"),
        (
            cpu_kernels.install_context_norms,
            "vllm._custom_ops.rms_norm",
            lambda out, *_: [part.fill_(i) for i, part in enumerate(out)],
            "no longer shows the fault",
        ),
        (
            cpu_kernels.install_experts,
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend",
            None,
            "is gone",
        ),
        (cpu_kernels.install_narrow_values, "vllm.model_executor.models.mimo_v2.Attention", None, "is gone"),
        (cpu_kernels.install_biased_router, f"{cpu_kernels.__name__}._ignores_bias", lambda router: False, "remove the patch"),
        (weights.install_gemm, "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", None, "is gone"),
        (
            nemotron_h.install_ungated_experts,
            "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts._supports_no_act_and_mul",
            lambda: True,
            "remove the patch",
        ),
        (nemotron_h.install_log_decays, "vllm.model_executor.layers.mamba.mamba_mixer2.composed_weight_loader", None, "is gone"),
        (
            nemotron_h.install_draft_dtype,
            "vllm.model_executor.models.nemotron_h_mtp.NemotronHMTPAttentionDecoderLayer.__init__",
            lambda self: None,
            "remove the patch",
        ),
        (nemotron_h.install_mamba_drafts, f"{nemotron_h.__name__}._ignores_accepted", lambda: False, "remove the patch"),
        (exact.install_exact, "vllm.v1.sample.sampler.Sampler.sample", None, "is gone"),
        (drafter.install_mimo_v2_layers, "vllm.model_executor.models.mimo_v2_mtp._MIMO_V2_FLASH_NUM_MTP_LAYERS", 3, "remove the patch"),
        (drafter.install_depths, f"{drafter.__name__}._takes_later_depths", lambda forward: True, "takes later depths by itself"),
    ],
    ids=lambda value: value.name.rpartition(".")[2] if isinstance(value, Patch) else "",
)
def test_fault_that_is_gone_upstream_is_reported(
    patch: Patch, attribute: str, replacement: Callable[..., Any] | int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    if replacement is None:
        monkeypatch.delattr(attribute)
    else:
        monkeypatch.setattr(attribute, replacement)
    monkeypatch.setattr(patch, "in_place", False)
    with pytest.raises(UpstreamMoved, match=message) as moved:
        patch()
    assert patch.name.rpartition(".")[0] in str(moved.value)


def test_depth_check_recognizes_a_drafter_that_takes_later_depths() -> None:
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    install()
    assert drafter._takes_later_depths(MiMoMTP.forward), "as patched"
