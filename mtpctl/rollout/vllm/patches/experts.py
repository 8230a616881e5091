"""Compute the experts of a model with an adapter by the CPU's own kernel (vLLM 0.32.0).

An engine that lets adapters in computes experts by Triton kernels, which know adapters, also where the adapter leaves experts alone; a CPU
has no Triton. `engine_settings` lets adapters into the layers that the recipe names, and a recipe that adapts experts on a CPU is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

_SELECT = "select_unquantized_moe_backend"
_MENDED = "_mtpctl_adapters_elsewhere"


def install() -> bool:
    """Have a CPU choose its kernel for experts as it does without adapters; returns whether it does. May be called again.

    Raises UpstreamMoved for another release, and where the function that chooses no longer exists.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    upstream = getattr(method, _SELECT, None)
    if getattr(upstream, _MENDED, False):
        return True
    require_pinned(__name__)
    if upstream is None:
        raise UpstreamMoved(f"{__name__}: {method.__name__}.{_SELECT} is gone; find where the kernel of experts is chosen")

    @wraps(upstream)
    def select(moe_config: FusedMoEConfig) -> tuple[UnquantizedMoeBackend, type[FusedMoEExperts] | None]:
        found: tuple[UnquantizedMoeBackend, type[FusedMoEExperts] | None] = upstream(replace(moe_config, is_lora_enabled=False))
        return found

    setattr(select, _MENDED, True)
    assign(method, **{_SELECT: select})
    return True
