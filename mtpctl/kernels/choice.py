"""Which implementation runs. A name is taken at its word or refused; `auto` follows what was measured, and says so in the log once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mtpctl.kernels.call import Call
from mtpctl.kernels.chunked import Chunked
from mtpctl.kernels.problem import Backend

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton", "liger")
ONE_PASS = ("auto", "chunked", "triton")
"""Those that `linear_policy_loss` has."""
# What was measured fastest, by compute capability: (fewest rows, implementation), last match wins. See docs/benchmarks/kernels.md;
# on an H200 the order did not depend on hidden size (2048 to 4096) or vocabulary (32,000 to 256,000).
MEASURED = {(9, 0): ((0, "chunked"), (64, "triton"))}
log = logging.getLogger("mtpctl.kernels")


@dataclass(frozen=True)
class Wants:
    """What a call asks for that not every backend can do."""

    call: Call
    topk: int = 0
    hit: bool = False
    separable_loss: bool = False


def choose(implementation: str, hidden: Tensor, weight: Tensor, wants: Wants) -> Backend:
    """The backend for this call. Raises ValueError for a name that does not exist, or that cannot do what is asked."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        implementation = _auto(hidden, weight, wants)
    if implementation == "chunked" or wants.call.rows.count == 0:
        return Chunked()
    if implementation == "triton":
        reason = _triton_refusal(hidden, weight, wants)
        if reason is None:
            return _triton(hidden.device.index if hidden.is_cuda else None)
    elif implementation == "liger":
        from mtpctl.kernels import liger

        reason = liger.refusal(hidden, wants.call.temperature, wants.hit, wants.topk, wants.call.shard.world, wants.separable_loss)
        if reason is None:
            return liger.Liger()
    else:
        reason = "takes every path at once in linear_logprob alone"
    raise ValueError(f"implementation: {implementation!r} {reason}")


def _auto(hidden: Tensor, weight: Tensor, wants: Wants) -> str:
    if not hidden.is_cuda:
        return _told("chunked", hidden.device.type, "it runs on any device")
    card, rows = torch.cuda.get_device_name(hidden.device), wants.call.rows.count
    table = MEASURED.get(torch.cuda.get_device_capability(hidden.device))
    if table is None:
        return _told("chunked", card, "nothing was measured on this card, and it runs on any")
    fewest, name = [(least, name) for least, name in table if rows >= least][-1]
    reason = _triton_refusal(hidden, weight, wants) if name == "triton" else None
    if reason is not None:
        return _told("chunked", card, f"triton {reason}")
    return _told(name, card, f"measured fastest there from {fewest} rows on")


def _triton_refusal(hidden: Tensor, weight: Tensor, wants: Wants) -> str | None:
    from mtpctl.kernels import triton_backend

    return "does not do topk" if wants.topk else triton_backend.refusal(hidden, weight)


@cache
def _triton(device: int | None) -> Backend:
    from mtpctl.kernels.triton_backend import Triton, tiles_for

    return Triton(tiles_for(device))


@cache
def _told(name: str, where: str, why: str) -> str:
    log.info("linear_logprob: auto runs %s on %s: %s", name, where, why)
    return name
