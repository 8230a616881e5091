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
# Cards (compute capability) on which the Triton kernels were measured ahead of everything else, at every shape of docs/benchmarks.md.
TRITON_CARDS = {(9, 0)}
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
    card = torch.cuda.get_device_name(hidden.device)
    if torch.cuda.get_device_capability(hidden.device) not in TRITON_CARDS:
        return _told("chunked", card, "the Triton kernels were not measured on this card")
    reason = _triton_refusal(hidden, weight, wants)
    return _told("triton", card, "measured fastest there") if reason is None else _told("chunked", card, f"triton {reason}")


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
