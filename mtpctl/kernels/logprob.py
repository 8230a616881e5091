"""`linear_logprob`: per-token log-probs of given labels from hidden states and the LM head.

Shape legend: N rows (tokens), n selected rows, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels import inputs, reduce
from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.call import Call, prepare, weight_sink
from mtpctl.kernels.choice import IMPLEMENTATIONS, choose
from mtpctl.kernels.problem import Backend, RowGrads
from mtpctl.kernels.reference import reference_scores


class TopK(NamedTuple):
    """The k likeliest entries of every row: `logprob` and `ids` [N, k], likeliest first; without gradient."""

    logprob: Tensor
    ids: Tensor


class LogProbOut(NamedTuple):
    """All [N], fp32; None where not asked for; 0 (False) in rows that were not selected.

    logprob: log p(label), never above 0, differentiable. entropy: in nats, differentiable. hit: no entry is likelier than the
    label, which for an MTP head is greedy acceptance. topk: see `TopK`.
    """

    logprob: Tensor
    entropy: Tensor | None
    hit: Tensor | None
    topk: TopK | None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy: bool = False,
    hit: bool = False,
    topk: int = 0,
    rows: Tensor | None = None,
    detach_weight: bool = False,
    valid_vocab: int | None = None,
    workspace_bytes: int | None = None,
    implementation: str = "auto",
    main_grad: bool = False,
) -> LogProbOut:
    """Log-prob (entropy, greedy hit, top k) of `labels` [N] under softmax(hidden · weightᵀ / temperature).

    hidden [N, H] and weight [V, H] share a dtype (bf16, fp16, fp32, fp64) and a device; products accumulate in fp32, results are fp32.

    temperature: a number, or [N] fp32, one a token.
    group: weight holds this rank's V of the V x world vocabulary entries, in rank order; labels count in the whole vocabulary and
        are the same on all ranks, and so are the results. The caller's loss is taken to be the same on every rank of the group; the
        gradient of hidden is then summed over ranks inside (no further reduction is due).
    rows: a bool mask [N]. A row outside it, or with the label `inputs.IGNORE_INDEX`, is not projected on the vocabulary: it costs no time,
        its results are 0 and it takes no gradient.
    detach_weight: no gradient of the weight is computed (an isolated MTP head).
    valid_vocab: size of the whole vocabulary where the weight is padded; entries from there on have probability 0.
    workspace_bytes: memory beside inputs, results and gradients (default 1 GiB). With enough of it logits are kept for the backward pass.
    implementation: "auto" (a measured table per card and shape; `choice.choose` says which), "reference", "chunked", "triton".
    main_grad: where the weight has Megatron's `main_grad`, its gradient is added there, and `grad_added_to_main_grad` set.

    Raises ValueError, naming the argument and both values, for labels out of range, shapes, dtypes or devices that do not fit, and
    values in hidden or weight that are not finite.
    """
    call = prepare(
        hidden,
        weight,
        labels,
        temperature=temperature,
        group=group,
        rows=rows,
        valid_vocab=valid_vocab,
        workspace_bytes=workspace_bytes,
        main_grad=main_grad,
    )
    if not 0 <= topk <= call.shard.total:
        raise ValueError(f"topk: {topk}, expected 0 to {call.shard.total}, the size of the vocabulary")
    if detach_weight:
        weight = weight.detach()
    if implementation == "reference":
        exact = reference_scores(hidden, weight, labels, call, topk)
        return LogProbOut(exact[0], exact[1] if entropy else None, exact[2] if hit else None, TopK(*exact[3:]) if topk else None)
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    backend = choose(implementation, hidden, weight, rows=call.rows.count, topk=topk, names=IMPLEMENTATIONS)
    arguments = _Arguments(call, backend, entropy, topk, keep)
    logprob, row_entropy, greedy, best, ids = _LinearLogProb.apply(hidden, weight, labels, arguments)
    return LogProbOut(logprob, row_entropy if entropy else None, greedy if hit else None, TopK(best, ids) if topk else None)


class _Arguments(NamedTuple):
    call: Call
    backend: Backend
    entropy: bool
    topk: int
    keep: bool


class _Context(AutogradContext, Protocol):
    arguments: _Arguments
    kept: object
    finite: inputs.FiniteCheck


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, labels: Tensor, arguments: _Arguments) -> tuple[Tensor, ...]:
        call, rows = arguments.call, arguments.call.rows
        problem = call.problem(hidden, weight, labels)
        scores = arguments.backend.scores(problem, entropy=arguments.entropy, topk=arguments.topk, keep=arguments.keep)
        stats = reduce.join_shards(scores.stats, call.shard)
        lse = stats.lse
        row_entropy = stats.entropy if arguments.entropy else torch.zeros_like(lse)
        outputs = [rows.spread(x) for x in (stats.logprob, row_entropy, stats.hit)]
        if arguments.topk:
            outputs += [rows.spread(x) for x in _whole_topk(scores.best, lse, arguments.topk, call.shard)]
        else:
            outputs += [lse.new_empty(0), lse.new_empty(0)]
        ctx.mark_non_differentiable(*outputs[2:])
        ctx.set_materialize_grads(False)
        finite = inputs.FiniteCheck(lse + row_entropy)
        if arguments.keep:
            ctx.save_for_backward(hidden, weight, labels, lse, row_entropy)
            ctx.arguments, ctx.kept, ctx.finite = arguments, scores.kept, finite
        # `prepare` has checked hidden. A weight that is not finite, or logits that overflow, can wait for the backward pass.
        if not arguments.keep:
            finite.enforce(problem.hidden, weight)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, row_entropy = ctx.saved_tensors
        arguments = ctx.arguments
        call, take = arguments.call, arguments.call.rows.take
        by_logprob, by_entropy = grads[0], grads[1] if arguments.entropy else None
        if by_logprob is None and by_entropy is None:
            return None, None, None, None
        per_row = RowGrads(
            torch.zeros_like(lse) if by_logprob is None else take(by_logprob).to(lse.dtype).contiguous(),
            lse,
            None if by_entropy is None else take(by_entropy).to(lse.dtype).contiguous(),
            None if by_entropy is None else row_entropy,
        )
        kept, ctx.kept = ctx.kept, None  # the backward pass overwrites what was kept
        sink = weight_sink(weight, ctx.needs_input_grad[1], call.main_grad)
        problem = call.problem(hidden, weight, labels)
        share = call.share_dtype(hidden) if ctx.needs_input_grad[0] else None
        local = arguments.backend.grads(problem, per_row, kept, hidden=share, weight=sink.out, add=sink.add)
        ctx.finite.enforce(problem.hidden, weight)
        return None if local is None else call.whole_hidden_grad(local, hidden.dtype), sink.finish(), None, None


def _whole_topk(best: tuple[Tensor, Tensor] | None, lse: Tensor, k: int, shard: inputs.Shard) -> tuple[Tensor, Tensor]:
    """The best k of the whole vocabulary from every shard's best k: log-probs and ids in the whole vocabulary."""
    if best is None:  # this rank's shard is all padding
        best = lse.new_empty(len(lse), 0), lse.new_empty(len(lse), 0, dtype=torch.long)
    missing = k - best[0].shape[1]
    values = torch.nn.functional.pad(best[0], (0, missing), value=float("-inf"))
    ids = torch.nn.functional.pad(best[1], (0, missing)) + shard.start
    if shard.world > 1:
        values = reduce.gather(values, shard).transpose(0, 1).flatten(1)
        ids = reduce.gather(ids, shard).transpose(0, 1).flatten(1)
        values, order = values.topk(k, dim=1)
        ids = ids.gather(1, order)
    return (values - lse.unsqueeze(1)).clamp(max=0), ids
