"""Keep weights where they can be updated on a CPU (vLLM 0.32.0).

After loading, vLLM's CPU backend hands each linear layer's weight to oneDNN, which packs a copy, and then drops the
parameter. Nothing is left that a weight update could write to or that a checksum could read. Without oneDNN it falls back
to `torch.nn.functional.linear` on the parameter itself, at the same precision.
"""

from __future__ import annotations

from mtpctl.compat.vllm_version import UpstreamMoved, require_pinned

_FLAG = "_supports_onednn"


def install() -> bool:
    """Switch the packing off on a CPU; returns whether it is off. May be called again.

    Raises UpstreamMoved for another release, and where the switch is gone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    require_pinned(__name__)
    from vllm import _custom_ops as ops

    if not hasattr(ops, _FLAG):
        raise UpstreamMoved(f"{__name__}: vllm._custom_ops.{_FLAG} is gone; find the new way to keep weights unpacked")
    setattr(ops, _FLAG, False)
    return True
