"""Which implementation runs. A named one runs or is refused; `auto` takes what was measured fastest, and logs its choice once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mtpctl.kernels.call import Call
from mtpctl.kernels.chunked import Chunked
from mtpctl.kernels.problem import Backend, SweepBackend

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton", "liger")
ONE_PASS = ("auto", "chunked", "triton")
"""The implementations that `linear_policy_loss` and `linear_draft_loss` have."""
# What was measured fastest, by compute capability: (fewest rows, implementation), last match wins. See docs/benchmarks/kernels.md;
# on an H200 the order did not depend on hidden size (2048 to 4096) or vocabulary (32,000 to 256,000).
MEASURED = {(9, 0): ((0, "chunked"), (64, "triton"))}
log = logging.getLogger("mtpctl.kernels")


@dataclass(frozen=True)
class Features:
    """What a call needs that not every backend can do."""

    call: Call
    topk: int = 0
    hit: bool = False


def choose(implementation: str, hidden: Tensor, weight: Tensor, features: Features) -> Backend:
    """The backend for this call. Raises ValueError for a name that does not exist, or that cannot do what is asked."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    if implementation in ONE_PASS or features.call.rows.count == 0:
        return choose_one_pass(implementation, hidden, weight, features)
    if implementation == "liger":
        from mtpctl.kernels import liger

        call = features.call
        reason = liger.refusal(hidden, call.temperature, features.hit, features.topk, call.shard.world)
        if reason is None:
            return liger.Liger()
    else:
        reason = "takes every path at once in linear_logprob alone"
    raise ValueError(f"implementation: {implementation!r} {reason}")


def choose_one_pass(implementation: str, hidden: Tensor, weight: Tensor, features: Features) -> SweepBackend:
    """The backend for a loss in one sweep. Raises ValueError as `choose` does."""
    if implementation == "auto":
        implementation = _auto(hidden, weight, features)
    if implementation == "chunked" or features.call.rows.count == 0:
        return Chunked()
    if implementation != "triton":
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(ONE_PASS)}")
    if reason := _triton_refusal(hidden, weight, features):
        raise ValueError(f"implementation: 'triton' {reason}")
    return _triton(hidden.device.index if hidden.is_cuda else None)


def _auto(hidden: Tensor, weight: Tensor, features: Features) -> str:
    if not hidden.is_cuda:
        return _logged("chunked", hidden.device.type, "it runs on any device")
    card, rows = torch.cuda.get_device_name(hidden.device), features.call.rows.count
    table = MEASURED.get(torch.cuda.get_device_capability(hidden.device))
    if table is None:
        return _logged("chunked", card, "nothing was measured on this card, and it runs on any")
    fewest, name = [(least, name) for least, name in table if rows >= least][-1]
    reason = _triton_refusal(hidden, weight, features) if name == "triton" else None
    if reason is not None:
        return _logged("chunked", card, f"triton {reason}")
    return _logged(name, card, f"measured fastest there from {fewest} rows on")


def _triton_refusal(hidden: Tensor, weight: Tensor, features: Features) -> str | None:
    from mtpctl.kernels import triton_backend

    return "does not do topk" if features.topk else triton_backend.refusal(hidden, weight)


@cache
def _triton(device: int | None) -> SweepBackend:
    from mtpctl.kernels.triton_backend import Triton, tiles_for

    return Triton(tiles_for(device))


@cache
def _logged(name: str, where: str, why: str) -> str:
    log.info("linear_logprob: auto runs %s on %s: %s", name, where, why)
    return name
