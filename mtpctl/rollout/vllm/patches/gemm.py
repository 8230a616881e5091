"""Keep weights where they can be updated on a CPU (vLLM 0.32.0).

After loading, vLLM's CPU backend packs each linear layer's weight for a kernel of that CPU: its own on AMX up to 1 MiB, zentorch's on
Zen where that is installed, oneDNN's elsewhere. It then drops the parameter, so that nothing is left that a weight update could write
to or that a checksum could read; an output head keeps its parameter beside a packed copy, which an update would leave stale. Here every
linear layer computes `torch.nn.functional.linear` on the parameter itself, as vLLM does where no kernel packs. Packing anew after
each update would buy little: torch hands the same product to oneDNN, AMX included.

Latent attention drops `kv_b_proj` for its own packed halves where there is AMX, and takes bfloat16 alone there. vLLM's other kernel for
it runs on every CPU in any type and keeps the weight, so it is chosen unless a backend is named.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

import torch
from torch import nn

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

_DISPATCH = "dispatch_cpu_unquantized_gemm"
_MENDED = "_mtpctl_unpacked"


def install() -> bool:
    """Switch the packing off on a CPU; returns whether it is off. May be called again.

    Raises UpstreamMoved for another release, and where the function that packs no longer exists.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.model_executor.layers import utils

    upstream = getattr(utils, _DISPATCH, None)
    if getattr(upstream, _MENDED, False):
        return True
    require_pinned(__name__)
    if upstream is None:
        raise UpstreamMoved(f"{__name__}: vllm.model_executor.layers.utils.{_DISPATCH} is gone; find the new way to keep weights unpacked")

    @wraps(upstream)
    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        # Weights of other dimensions are convolutions, whose loaded layout vLLM keeps, and experts: see `packed`.
        if layer.get_parameter("weight").ndim != 2:
            upstream(layer, remove_weight)
        else:
            layer.__dict__["cpu_linear"] = torch.nn.functional.linear

    setattr(dispatch, _MENDED, True)
    assign(utils, **{_DISPATCH: dispatch})
    _keep_latent()
    return True


def _keep_latent() -> None:
    """Have the platform choose the latent attention that keeps its weights."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    configure = CpuPlatform.__dict__["check_and_update_config"].__func__

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        attention, model = vllm_config.attention_config, vllm_config.model_config
        if attention.backend is None and model is not None and model.use_mla:
            attention.backend = AttentionBackendEnum.CPU_MLA
        configure(cls, vllm_config)

    assign(CpuPlatform, check_and_update_config=classmethod(check_and_update_config))
