"""Selects the backend of the LM-head kernels. `auto` picks the one that was measured fastest and logs its choice once."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from mtpctl.kernels.backend import Backend
from mtpctl.kernels.chunked import Chunked, Exact
from mtpctl.kernels.triton_backend import Triton, tiles_for, unsupported

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton", "exact")
ONE_PASS = ("auto", "chunked", "triton", "exact")
"""The implementations of `linear_policy_loss`."""
# By compute capability: (minimum rows, fastest implementation), the last match wins. See docs/benchmarks/kernels.md; on an H200 the order
# did not depend on hidden size (2048 to 4096) or vocabulary (32,000 to 256,000).
MEASURED = {(9, 0): ((0, "chunked"), (64, "triton"))}
log = logging.getLogger("mtpctl.kernels")


def choose(implementation: str, hidden: Tensor, weight: Tensor, *, rows: int, topk: int = 0, names: tuple[str, ...] = ONE_PASS) -> Backend:
    """The backend for `rows` selected rows. Raises ValueError if `implementation` is not in `names` or does not support the call."""
    if implementation not in names:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(names)}")
    if implementation == "auto":
        implementation = _auto(hidden, weight, rows, topk)
    if implementation == "exact":
        return Exact()
    if implementation == "chunked" or rows == 0:
        return Chunked()
    if reason := _triton_unsupported(hidden, weight, topk):
        raise ValueError(f"implementation: 'triton' {reason}")
    return _triton(hidden.device.index if hidden.is_cuda else None)


def _auto(hidden: Tensor, weight: Tensor, rows: int, topk: int) -> str:
    if not hidden.is_cuda:
        return _logged("chunked", hidden.device.type, "it runs on any device")
    gpu = torch.cuda.get_device_name(hidden.device)
    table = MEASURED.get(torch.cuda.get_device_capability(hidden.device))
    if table is None:
        return _logged("chunked", gpu, "this GPU was not measured, and it runs on any device")
    min_rows, name = [entry for entry in table if rows >= entry[0]][-1]
    reason = _triton_unsupported(hidden, weight, topk) if name == "triton" else None
    if reason is not None:
        return _logged("chunked", gpu, f"triton {reason}")
    return _logged(name, gpu, f"measured fastest there from {min_rows} rows on")


def _triton_unsupported(hidden: Tensor, weight: Tensor, topk: int) -> str | None:
    return "does not support topk" if topk else unsupported(hidden, weight)


@cache
def _triton(device: int | None) -> Backend:
    return Triton(tiles_for(device))


@cache
def _logged(name: str, device: str, reason: str) -> str:
    log.info("linear_logprob: auto runs %s on %s: %s", name, device, reason)
    return name
