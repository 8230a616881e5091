"""Selects the backend of the LM-head kernels, and implements `reference`.

`auto` picks the backend that was measured fastest and logs its choice once. `exact` is the backend of `numerics: bitwise`; `auto` never
picks it. `reference` computes in float64, with all logits in memory and gradients by autograd, for tests and debugging.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mtpctl.kernels.backend import SOFT_CE_WEIGHT, Backend, Shard, gather_shards
from mtpctl.kernels.chunked import Chunked, Exact
from mtpctl.kernels.inputs import Call
from mtpctl.kernels.triton_backend import Triton, tiles_for, unsupported_reason

IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton", "exact")
ONE_PASS = ("auto", "chunked", "triton", "exact")
"""The implementations of `linear_policy_loss`."""
# By compute capability: pairs of (minimum rows, fastest implementation), ascending. See docs/benchmarks/kernels.md. On an H200 the order
# did not depend on hidden size (2048 to 4096) or vocabulary (32,000 to 256,000).
MEASURED_BACKENDS = {(9, 0): ((0, "chunked"), (64, "triton"))}
log = logging.getLogger("mtpctl.kernels")


def select_backend(
    implementation: str, hidden: Tensor, weight: Tensor, *, rows: int, topk: int = 0, names: tuple[str, ...] = ONE_PASS
) -> Backend:
    """The backend for `rows` selected rows. Raises ValueError if `implementation` is not in `names` or does not support the call."""
    if implementation not in names:
        raise ValueError(f"implementation: {implementation!r}, expected one of {', '.join(names)}")
    if implementation == "auto":
        implementation = _select_auto(hidden, weight, rows, topk)
    if implementation == "exact":
        return Exact()
    if implementation == "chunked" or rows == 0:
        return Chunked()
    if reason := _triton_unsupported(hidden, weight, topk):
        raise ValueError(f"implementation: 'triton' {reason}")
    return _triton(hidden.device.index if hidden.is_cuda else None)


def _select_auto(hidden: Tensor, weight: Tensor, rows: int, topk: int) -> str:
    if not hidden.is_cuda:
        return _log_choice("chunked", hidden.device.type, "it runs on any device")
    gpu = torch.cuda.get_device_name(hidden.device)
    table = MEASURED_BACKENDS.get(torch.cuda.get_device_capability(hidden.device))
    if table is None:
        return _log_choice("chunked", gpu, "this GPU was not measured, and it runs on any device")
    min_rows, name = [entry for entry in table if rows >= entry[0]][-1]
    reason = _triton_unsupported(hidden, weight, topk) if name == "triton" else None
    if reason is not None:
        return _log_choice("chunked", gpu, f"triton {reason}")
    return _log_choice(name, gpu, f"measured fastest there from {min_rows} rows on")


def _triton_unsupported(hidden: Tensor, weight: Tensor, topk: int) -> str | None:
    return "does not support topk" if topk else unsupported_reason(hidden, weight)


@cache
def _triton(device: int | None) -> Backend:
    return Triton(tiles_for(device))


@cache
def _log_choice(name: str, device: str, reason: str) -> str:
    log.info("linear_logprob: auto runs %s on %s: %s", name, device, reason)
    return name


class _GatherWeight(torch.autograd.Function):
    """Gather the shards of all ranks along dimension 0. All ranks compute the same loss, so a rank's slice of the gradient is complete."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.local_rows = slice(shard.rank * x.shape[0], (shard.rank + 1) * x.shape[0])
        return gather_shards(x, shard).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.local_rows], None


def _logits(hidden: Tensor, weight: Tensor, call: Call) -> Tensor:
    """Scaled float64 logits of the selected rows, with the gathered `weight` of all ranks."""
    temperature = call.temperature
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = call.rows.select(temperature).double().unsqueeze(1)
    return (call.rows.select(hidden.double()) @ weight[: call.shard.total].T) / temperature


def _gather_weight(weight: Tensor, call: Call) -> Tensor:
    weight = weight.double()
    return _GatherWeight.apply(weight, call.shard) if call.shard.world > 1 else weight


def reference_draft(
    hidden: Tensor, teacher: Tensor, weight: Tensor, labels: Tensor, call: Call, loss: str, mix: float
) -> tuple[Tensor, ...]:
    """The fields of `DraftLossOut`, computed from the equations in `mtpctl.kernels.drafts`."""
    wide_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    head = _gather_weight(weight, call)
    labels = call.rows.select(labels).long().unsqueeze(1)
    logq = _logits(hidden, head, call).log_softmax(1)
    logp = _logits(teacher.detach(), head.detach(), call).log_softmax(1)
    p, q = logp.exp(), logq.exp()
    label_logprob = logq.gather(1, labels).squeeze(1)
    overlap = torch.minimum(p, q).sum(1)
    terms = {"ce": -label_logprob, "soft_ce": -(p * logq).sum(1), "kl": (p * (logp - logq)).sum(1), "tv": 1 - overlap}
    terms["e2e_tv"] = terms["tv"] + SOFT_CE_WEIGHT * terms["soft_ce"]
    terms["e2e_greedy"] = 1 - (p * q).sum(1) + SOFT_CE_WEIGHT * terms["soft_ce"]
    value = (mix * terms[loss] + (1 - mix) * terms["ce"]).sum()
    best = logq.argmax(1, keepdim=True)
    rows = (label_logprob, logp.gather(1, labels).squeeze(1), overlap, p.gather(1, best).squeeze(1))
    scatter = call.rows.scatter
    return (
        value.to(wide_dtype),
        *(scatter(x.detach().to(wide_dtype)) for x in rows),
        scatter(label_logprob.detach() >= logq.detach().amax(1)),
    )


def reference_scores(hidden: Tensor, weight: Tensor, labels: Tensor, call: Call, topk: int) -> tuple[Tensor, ...]:
    """Log-prob, entropy, hit [N], top-k log-probs and ids [N, k], as `linear_logprob` returns them."""
    wide_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    labels, scatter = call.rows.select(labels).long().unsqueeze(1), call.rows.scatter
    logits = _logits(hidden, _gather_weight(weight, call), call)
    logp = logits.log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    hit = logits.gather(1, labels).squeeze(1) >= logits.amax(1)
    best = logp.detach().topk(topk, dim=1)
    logprob = logp.gather(1, labels).squeeze(1)
    return (
        scatter(logprob.to(wide_dtype)),
        scatter(entropy.to(wide_dtype)),
        scatter(hit),
        scatter(best.values.to(wide_dtype)),
        scatter(best.indices),
    )
