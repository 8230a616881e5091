"""`linear_logprob`: per-token log-probs of given labels from hidden states and the LM head.

Shape legend: N rows (tokens), n selected rows, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels import inputs, reduce
from mtpctl.kernels.choice import choose
from mtpctl.kernels.problem import Backend, Problem, RowGrads
from mtpctl.kernels.reference import reference_scores

DEFAULT_WORKSPACE_BYTES = 1 << 30


class TopK(NamedTuple):
    """The k likeliest entries of every row: `logprob` and `ids` [N, k], likeliest first; without gradient."""

    logprob: Tensor
    ids: Tensor


class LogProbOut(NamedTuple):
    """All [N], fp32; None where not asked for; 0 (False) in rows that were not selected.

    logprob: log p(label), never above 0, differentiable. entropy: in nats, differentiable. hit: no entry is likelier than the label,
    which for
    an MTP head is greedy acceptance. topk: see `TopK`.
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
    ignore_index: int = -100,
    rows: Tensor | None = None,
    detach_weight: bool = False,
    valid_vocab: int | None = None,
    sequence_parallel: bool = False,
    workspace_bytes: int | None = None,
    deterministic: bool = False,
    implementation: str = "auto",
    main_grad: bool = False,
) -> LogProbOut:
    """Log-prob (entropy, greedy hit, top k) of `labels` [N] under softmax(hidden · weightᵀ / temperature).

    hidden [N, H] and weight [V, H] share a dtype (bf16, fp16, fp32, fp64) and a device; products accumulate in fp32, results are fp32.

    temperature: a number, or [N] fp32, one a token.
    group: weight holds this rank's V of the V x world vocabulary entries, in rank order; labels count in the whole vocabulary and are
    the same
        on all ranks, and so are the results. The caller's loss is taken to be the same on every rank of the group; the gradient of
        hidden is
        then summed over ranks inside (no further reduction is due).
    sequence_parallel: hidden is this rank's N / world rows, in rank order, while labels, rows, temperature and results have all N. Rows are
        gathered inside, and the gradient of hidden is reduce-scattered.
    ignore_index, rows: a label that is ignored, or a row outside `rows` (bool mask [N] or indices), is not projected at all: it costs no
        time, its results are 0 and it takes no gradient.
    detach_weight: no gradient of the weight is computed (an isolated MTP head).
    valid_vocab: size of the whole vocabulary where the weight is padded; entries from there on have probability 0.
    workspace_bytes: memory beside inputs, results and gradients (default 1 GiB). With enough of it logits are kept for the backward pass.
    deterministic: ranks are summed in a fixed order, and no backend is chosen whose sums depend on timing.
    implementation: "auto" (a measured table per card and shape; `choice.choose` says which), "reference", "chunked", "triton", "liger".
    main_grad: where the weight has Megatron's `main_grad`, its gradient is added there, and `grad_added_to_main_grad` set.

    Raises ValueError, naming the argument and both values, for labels out of range, shapes, dtypes or devices that do not fit, and
    values in
    hidden or weight that are not finite.
    """
    inputs.check_tensors(hidden, weight, labels, group, sequence_parallel)
    inputs.check_temperature(temperature, labels)
    shard = inputs.vocab_shard(weight, group, valid_vocab)
    if not 0 <= topk <= shard.total:
        raise ValueError(f"topk: {topk}, expected 0 to {shard.total}, the size of the vocabulary")
    workspace = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    if workspace <= 0:
        raise ValueError(f"workspace_bytes: {workspace}, expected above 0")
    selected = inputs.select_rows(labels, rows, ignore_index, temperature, shard)
    if detach_weight:
        weight = weight.detach()
    if implementation == "reference":
        scores = reference_scores(hidden, weight, labels, temperature, selected, shard, sequence_parallel, topk)
        logprob, plain_entropy, greedy, best, ids = scores
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        spread = selected.spread
        return LogProbOut(
            spread(logprob.to(wide)),
            spread(plain_entropy.to(wide)) if entropy else None,
            spread(greedy) if hit else None,
            TopK(spread(best.to(wide)), spread(ids)) if topk else None,
        )
    grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    backend = choose(
        implementation,
        hidden=hidden,
        weight=weight,
        rows=selected.count,
        topk=topk,
        deterministic=deterministic,
        entropy=entropy,
        grad=grad,
    )
    options = _Options(shard, selected, sequence_parallel, deterministic, workspace, entropy, topk, grad, backend, main_grad)
    logprob, plain_entropy, greedy, best, ids = _LinearLogProb.apply(hidden, weight, labels, temperature, options)
    return LogProbOut(logprob, plain_entropy if entropy else None, greedy if hit else None, TopK(best, ids) if topk else None)


class _Options(NamedTuple):
    shard: inputs.Shard
    rows: inputs.Rows
    sequence_parallel: bool
    deterministic: bool
    workspace: int
    entropy: bool
    topk: int
    grad: bool
    backend: Backend
    main_grad: bool


def local_problem(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor, o: _Options) -> Problem:
    if o.sequence_parallel:
        hidden = reduce.gather_rows(hidden, o.shard)
    inverse: float | Tensor
    if isinstance(temperature, Tensor):
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        inverse = o.rows.take(temperature.to(wide).expand(o.rows.total).reciprocal())
    else:
        inverse = 1.0 / temperature
    targets = o.rows.take(labels).long() - o.shard.start
    return Problem(o.rows.take(hidden).contiguous(), weight, targets, inverse, o.shard.valid, o.workspace)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor, o: _Options) -> tuple[Tensor, ...]:
        problem = local_problem(hidden, weight, labels, temperature, o)
        scores = o.backend.scores(problem, entropy=o.entropy, topk=o.topk, keep=o.grad)
        stats = reduce.join_shards(scores.stats, o.shard)
        lse = stats.lse
        if not torch.isfinite(lse).all():
            raise inputs.explain_nonfinite(problem.hidden, weight)
        row_entropy = stats.entropy if o.entropy else torch.zeros_like(lse)
        best, ids = (
            _whole_topk(scores.best, lse, o) if o.topk else (lse.new_empty(len(lse), 0), lse.new_empty(len(lse), 0, dtype=torch.long))
        )
        spread = o.rows.spread
        outputs = (spread(stats.logprob), spread(row_entropy), spread(stats.hit), spread(best), spread(ids))
        ctx.mark_non_differentiable(*outputs[2:])
        ctx.set_materialize_grads(False)
        if o.grad:
            ctx.save_for_backward(hidden, weight, labels, temperature if isinstance(temperature, Tensor) else None, lse, row_entropy)
            ctx.temperature, ctx.options, ctx.kept = temperature, o, scores.kept
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperature, lse, row_entropy = ctx.saved_tensors
        o: _Options = ctx.options
        by_logprob, by_entropy = grads[:2]
        if not o.entropy:
            by_entropy = None
        if by_logprob is None and by_entropy is None:
            return None, None, None, None, None
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        problem = local_problem(hidden, weight, labels, ctx.temperature if temperature is None else temperature, o)
        zero = torch.zeros_like(lse)
        per_row = RowGrads(
            zero if by_logprob is None else o.rows.take(by_logprob).to(lse.dtype),
            lse,
            None if by_entropy is None else o.rows.take(by_entropy).to(lse.dtype),
            None if by_entropy is None else row_entropy,
        )
        into = weight.main_grad if o.main_grad and need_weight and hasattr(weight, "main_grad") else None
        kept, ctx.kept = ctx.kept, None
        hidden_grad, weight_grad = o.backend.grads(problem, per_row, kept, hidden=need_hidden, weight=need_weight, main_grad=into)
        if into is not None and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            weight_grad = torch.empty_like(weight)  # never read: Megatron's hooks fire only for parameters that are given a gradient
        return None if hidden_grad is None else _hidden_grad(hidden_grad, hidden.dtype, o), weight_grad, None, None, None


def _hidden_grad(local: Tensor, dtype: torch.dtype, o: _Options) -> Tensor:
    """Summed over vocabulary shards, in the rows' places, in hidden's dtype."""
    if o.sequence_parallel:
        return reduce.scatter_sum(o.rows.spread(local), o.shard, o.deterministic).to(dtype)
    return o.rows.spread(reduce.sum_ranks(local, o.shard, o.deterministic).to(dtype))


def _whole_topk(best: tuple[Tensor, Tensor] | None, lse: Tensor, o: _Options) -> tuple[Tensor, Tensor]:
    """The best k of the whole vocabulary from every shard's best k: log-probs and ids in the whole vocabulary."""
    if best is None:  # this rank's shard is all padding
        best = lse.new_empty(len(lse), 0), lse.new_empty(len(lse), 0, dtype=torch.long)
    missing = o.topk - best[0].shape[1]
    values = torch.nn.functional.pad(best[0], (0, missing), value=float("-inf"))
    ids = torch.nn.functional.pad(best[1], (0, missing)) + o.shard.start
    if o.shard.world > 1:
        values = reduce.gather(values, o.shard).transpose(0, 1).flatten(1)
        ids = reduce.gather(ids, o.shard).transpose(0, 1).flatten(1)
        values, order = values.topk(o.topk, dim=1)
        ids = ids.gather(1, order)
    return (values - lse.unsqueeze(1)).clamp(max=0), ids
