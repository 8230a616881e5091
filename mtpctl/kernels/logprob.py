"""`linear_logprob`: per-token log-probs of given labels from hidden states and the LM head.

Shape legend: N rows (tokens), n selected rows, H hidden size, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtpctl.kernels.backend import Backend, GradOutputs, RowGrads, Shard, combine_shards, gather_shards
from mtpctl.kernels.dispatch import IMPLEMENTATIONS, reference_scores, select_backend
from mtpctl.kernels.inputs import Call, FiniteCheck, HeadOptions, prepare_call, weight_grad_buffer


class TopK(NamedTuple):
    """The k most likely entries per row: `logprob` and `ids` [N, k] in descending order; not differentiable."""

    logprob: Tensor
    ids: Tensor


class LogProbOut(NamedTuple):
    """One value per row [N], in fp32 (fp64 from fp64), except for `hit` (bool) and `topk` ([N, k]). None if not requested.

    Rows that are not in `rows`, or have the label `IGNORE_INDEX`, are 0 or False.

    logprob: log p(label), at most 0, differentiable. entropy: in nats, differentiable. hit: whether no entry is more likely than the label
    (for an MTP head: whether its greedy draft is accepted). topk: see `TopK`.
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
    entropy: bool = False,
    hit: bool = False,
    topk: int = 0,
    detach_weight: bool = False,
    implementation: str = "auto",
    **options: Unpack[HeadOptions],
) -> LogProbOut:
    """Compute log-probs of `labels` [N] under softmax(hidden · weightᵀ / temperature), optionally with entropy, greedy hits and top k.

    hidden [N, H] and weight [V, H] share a dtype (bf16, fp16, fp32, fp64) and a device. Products and results are fp32 (fp64 from fp64).

    detach_weight: do not compute the weight's gradient (for an isolated MTP head).
    implementation: "auto" (a table measured per GPU and number of rows, see `dispatch.select_backend`), "reference", "chunked", "triton"
        or "exact".
    options: see `HeadOptions`.

    Raises ValueError, naming the argument and its value, for labels out of range, mismatched shapes, dtypes or devices, non-finite values
    in hidden or weight, and logits that overflow.
    """
    call = prepare_call(hidden, weight, labels, **options)
    if not 0 <= topk <= call.shard.total:
        raise ValueError(f"topk: {topk}, expected 0 to {call.shard.total}, the size of the vocabulary")
    if detach_weight:
        weight = weight.detach()
    if implementation == "reference":
        logprob, row_entropy, is_hit, topk_logprob, topk_ids = reference_scores(hidden, weight, labels, call, topk)
    else:
        for_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        backend = select_backend(implementation, hidden, weight, rows=call.rows.count, topk=topk, names=IMPLEMENTATIONS)
        arguments = _Arguments(call, backend, entropy, topk, for_backward)
        logprob, row_entropy, is_hit, topk_logprob, topk_ids = _LinearLogProb.apply(hidden, weight, labels, arguments)
    return LogProbOut(logprob, row_entropy if entropy else None, is_hit if hit else None, TopK(topk_logprob, topk_ids) if topk else None)


class _Arguments(NamedTuple):
    call: Call
    backend: Backend
    entropy: bool
    topk: int
    for_backward: bool


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, arguments: _Arguments) -> tuple[Tensor, ...]:
        call, rows, topk = arguments.call, arguments.call.rows, arguments.topk
        inputs = call.selected_inputs(hidden, weight, labels)
        scores = arguments.backend.scores(inputs, entropy=arguments.entropy, topk=topk, for_backward=arguments.for_backward)
        stats = combine_shards(scores.stats, call.shard)
        lse = stats.lse
        row_entropy = stats.entropy if arguments.entropy else torch.zeros_like(lse)
        outputs = [rows.scatter(x) for x in (stats.logprob, row_entropy, stats.hit)]
        topk_columns = _merge_shard_topk(scores.topk, lse, topk, call.shard) if topk else (lse.new_empty(0), lse.new_empty(0))
        outputs += [rows.scatter(x) for x in topk_columns] if topk else topk_columns
        ctx.mark_non_differentiable(*outputs[2:])
        ctx.set_materialize_grads(False)
        finite = FiniteCheck(lse + row_entropy)
        if arguments.for_backward:
            ctx.save_for_backward(hidden, weight, labels, lse, row_entropy)
            ctx.arguments, ctx.backend_state, ctx.finite = arguments, scores.saved, finite
        else:
            # A backward pass would check for a non-finite weight and for overflow. Without a backward pass, check here.
            finite.enforce(inputs.hidden, weight)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, row_entropy = ctx.saved_tensors
        arguments: _Arguments = ctx.arguments
        call, select = arguments.call, arguments.call.rows.select
        logprob_grad, entropy_grad = grads[0], grads[1] if arguments.entropy else None
        if logprob_grad is None and entropy_grad is None:
            return None, None, None, None
        row_grads = RowGrads(
            torch.zeros_like(lse) if logprob_grad is None else select(logprob_grad).to(lse.dtype).contiguous(),
            lse,
            None if entropy_grad is None else select(entropy_grad).to(lse.dtype).contiguous(),
            None if entropy_grad is None else row_entropy,
        )
        backend_state, ctx.backend_state = ctx.backend_state, None  # `grads` overwrites it
        buffer = weight_grad_buffer(weight, ctx.needs_input_grad[1], call.main_grad)
        inputs = call.selected_inputs(hidden, weight, labels)
        outputs = GradOutputs(call.partial_dtype(hidden) if ctx.needs_input_grad[0] else None, buffer.out, buffer.accumulates)
        local_grad = arguments.backend.grads(inputs, row_grads, backend_state, outputs)
        ctx.finite.enforce(inputs.hidden, weight)
        return None if local_grad is None else call.reduce_hidden_grad(local_grad, hidden.dtype), buffer.finish(), None, None


def _merge_shard_topk(local_topk: tuple[Tensor, Tensor] | None, lse: Tensor, k: int, shard: Shard) -> tuple[Tensor, Tensor]:
    """Log-probs and global ids of the whole vocabulary's top k, merged from the top k of each shard."""
    if local_topk is None:  # this rank's shard is all padding
        local_topk = lse.new_empty(len(lse), 0), lse.new_empty(len(lse), 0, dtype=torch.long)
    missing = k - local_topk[0].shape[1]
    values = torch.nn.functional.pad(local_topk[0], (0, missing), value=float("-inf"))
    ids = torch.nn.functional.pad(local_topk[1], (0, missing)) + shard.start
    if shard.world > 1:
        values = gather_shards(values, shard).transpose(0, 1).flatten(1)
        ids = gather_shards(ids, shard).transpose(0, 1).flatten(1)
        values, order = values.topk(k, dim=1)
        ids = ids.gather(1, order)
    return (values - lse.unsqueeze(1)).clamp(max=0), ids
