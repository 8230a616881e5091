"""Every patch rejects any vLLM release other than the pinned one, and reports if upstream no longer has the fault."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from vllm.platforms import current_platform

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm import patches
from mtpctl.rollout.vllm.patches import PINNED, Patch, cpu_kernels, drafter, exact, loop, nemotron_h, pauses, sampling, weights
from mtpctl.rollout.vllm.plugin import install

MODULES = [importlib.import_module(f"{patches.__name__}.{module.name}") for module in pkgutil.iter_modules(patches.__path__)]
PATCHES = {each.name: each for module in MODULES for each in vars(module).values() if isinstance(each, Patch)}
GUARDED: dict[str, Callable[[], object]] = {
    f"{weights.__name__}.refresh_derived_weights": lambda: weights.refresh_derived_weights([], "float32"),
    f"{weights.__name__}.get_name_mapper": lambda: weights.get_name_mapper(nn.Module()),
    f"{loop.__name__}.core_in_loop": lambda: loop.core_in_loop().__enter__(),
    f"{pauses.__name__}.pause": lambda: asyncio.run(pauses.pause(None, "keep")),  # type: ignore[arg-type]
}
"""Other functions that depend on the release."""
CPU_ONLY = {name for name, patch in PATCHES.items() if patch._cpu_only}


def test_every_installed_function_is_a_guarded_patch() -> None:
    functions = {f"{module.__name__}.{name}" for module in MODULES for name in vars(module) if name.startswith("install_")}
    assert functions == PATCHES.keys()


def applied() -> None:
    raise AssertionError("applied to another release")


def test_every_patch_rejects_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "installed_release", lambda: "0.33.0")
    for patch in PATCHES.values():
        monkeypatch.setattr(patch, "is_applied", False)
        monkeypatch.setattr(patch, "_apply", applied)
    for name, call in (PATCHES | GUARDED).items():
        if name in CPU_ONLY and not current_platform.is_cpu():
            assert call() is False
        else:
            with pytest.raises(UpstreamMoved, match=f"^{re.escape(name)} was written for vLLM {re.escape(PINNED)}, found 0.33.0"):
                call()


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
    monkeypatch.setattr(patch, "is_applied", False)
    with pytest.raises(UpstreamMoved, match=message) as moved:
        patch()
    assert patch.name.rpartition(".")[0] in str(moved.value)


def test_depth_check_recognizes_a_drafter_that_takes_later_depths() -> None:
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    install()
    assert drafter._takes_later_depths(MiMoMTP.forward), "as patched"
