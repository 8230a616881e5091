"""The LM head over the hidden states of a microbatch: log-probs of response tokens, and their losses.

A loss is separable if the term of each token depends on that token's log-prob only. A separable loss takes one pass over slices of rows,
with three matrix products for the logits and the gradients of states and LM head (`linear_policy_loss`). MTP depths that learn the trunk's
distribution use those logits in the same pass. A loss that couples tokens needs all log-probs first. Its backward pass recomputes the
logits that did not fit the workspace, which is a fourth product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mtpctl.families.shape import ModelShape
from mtpctl.kernels.backend import DraftLoss
from mtpctl.kernels.candidates import CandidateTerm, candidate_loss
from mtpctl.kernels.dispatch import ONE_PASS
from mtpctl.kernels.drafts import Draft, DraftLossOut
from mtpctl.kernels.logprob import LogProbOut, TopK, linear_logprob
from mtpctl.kernels.policy import TokenLoss, linear_draft_loss, linear_policy_loss
from mtpctl.kernels.rows import distinct_rows
from mtpctl.model.packing import Packing
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer.batch import DraftRows
from mtpctl.trainer.objective import Sums

HITS = "hits"
"""Key in a loss's `Sums`: the number of response tokens that a greedy draft would have matched."""


class _KernelOptions(TypedDict):
    group: dist.ProcessGroup | None
    valid_vocab: int
    workspace_bytes: int
    implementation: str
    main_grad: bool


class Head:
    """Log-probs and losses under the LM head, with one engine's kernels and layout. Results are the same on all tp and cp ranks.

    state [t, H]: this rank's hidden states. weight [vocab / tp, H]: its shard of the LM head. rows, labels [R]: for each response token of
    the microbatch, the index of the hidden state that predicts it, and its id. temperature: a number or [R].
    """

    def __init__(
        self,
        kernels: KernelsConfig,
        shape: ModelShape,
        parallel: ParallelConfig,
        *,
        sequence_parallel: bool,
        numerics: Numerics = "default",
    ) -> None:
        self.kernels, self.shape, self.parallel, self.sequence_parallel = kernels, shape, parallel, sequence_parallel
        self.implementation = "exact" if numerics == "bitwise" else kernels.linear_logprob

    def logprob(
        self,
        packing: Packing,
        state: Tensor,
        weight: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        *,
        entropy: bool = False,
        hit: bool = False,
        topk: int = 0,
        detach_weight: bool = False,
    ) -> LogProbOut:
        """Log-probs of the labels under the states at `rows`, and the requested other fields of `LogProbOut`."""
        state, total = self._gather_sequence(state), len(rows)
        rows, labels, temperature, index = self._select_local(packing, rows, labels, temperature)
        out = linear_logprob(
            distinct_rows(state, rows),
            weight,
            labels,
            temperature=temperature,
            entropy=entropy,
            hit=hit,
            topk=topk,
            detach_weight=detach_weight,
            **self._kernel_options(weight),
        )
        if index is None:
            return out
        group = parallel_state.get_context_parallel_group()

        def gather(values: Tensor) -> Tensor:
            return _GatherOverRanks.apply(values, index, total, group)

        return LogProbOut(
            gather(out.logprob),
            None if out.entropy is None else gather(out.entropy),
            None if out.hit is None else gather(out.hit.float()) > 0,
            None if out.topk is None else TopK(gather(out.topk.logprob), gather(out.topk.ids)),
        )

    def loss(
        self,
        packing: Packing,
        state: Tensor,
        weight: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        token_loss: TokenLoss,
        *,
        scale: float,
        couples_tokens: bool = False,
        entropy: bool = False,
        hit: bool = False,
        detach_weight: bool = False,
    ) -> tuple[Tensor, Sums]:
        """The sum of `token_loss` over the tokens times `scale`, and its metric sums, with `HITS` if `hit` is set.

        Call `backward` on the loss without another factor, because its gradients are already computed for a factor of 1. If cp ranks share
        the tokens, a loss computed in one pass is this rank's part; any other loss, and the sums, are those of the whole microbatch.
        """
        if couples_tokens or self.implementation not in ONE_PASS:
            scores = self.logprob(packing, state, weight, rows, labels, temperature, entropy=entropy, hit=hit, detach_weight=detach_weight)
            loss, sums = token_loss(scores.logprob, scores.entropy, torch.arange(len(labels), device=labels.device))
            return loss * scale, sums if scores.hit is None else sums | {HITS: scores.hit.sum()}
        state = self._gather_sequence(state)
        rows, labels, temperature, index = self._select_local(packing, rows, labels, temperature)
        out = linear_policy_loss(
            distinct_rows(state, rows),
            weight,
            labels,
            token_loss if index is None else lambda logprob, entropy, rows: token_loss(logprob, entropy, index[rows]),
            grad_scale=scale,
            temperature=temperature,
            entropy=entropy,
            hit=hit,
            detach_weight=detach_weight,
            **self._kernel_options(weight),
        )
        sums = out.sums if out.hit is None else out.sums | {HITS: out.hit.sum()}
        if index is not None:
            stacked_sums = torch.stack([sums[name].float() for name in sums])
            dist.all_reduce(stacked_sums, group=parallel_state.get_context_parallel_group())
            sums = dict(zip(sums, stacked_sums, strict=True))
        return out.loss_sum * scale, sums

    def candidate_loss(
        self, state: Tensor, weight: Tensor, rows: Tensor, term: CandidateTerm, temperature: float, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The loss `term` over the R response tokens times `scale`, and the divergence [R]. Does not support context parallelism.

        Call `backward` as for `loss`.
        """
        options = self._kernel_options(weight)
        out = candidate_loss(
            distinct_rows(self._gather_sequence(state), rows),
            weight,
            term,
            grad_scale=scale,
            temperature=temperature,
            group=options["group"],
            valid_vocab=options["valid_vocab"],
            workspace_bytes=options["workspace_bytes"],
            # Megatron reads a weight's gradient either from autograd or from main_grad. The backends that are not in `ONE_PASS` return
            # theirs to autograd, so this loss does the same.
            main_grad=options["main_grad"] and self.implementation in ONE_PASS,
        )
        return out.loss_sum * scale, out.divergence

    def supports_joint_loss(self, *, couples_tokens: bool) -> bool:
        """Whether `loss_with_drafts` can be used: the loss is computed in one pass, and a draft's teacher logits are on the same rank."""
        return not couples_tokens and self.implementation in ONE_PASS and self.parallel.cp == 1

    def loss_with_drafts(
        self,
        state: Tensor,
        weight: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        token_loss: TokenLoss,
        drafts: Sequence[tuple[DraftRows, Draft, Tensor | None]],
        *,
        scale: float,
        entropy: bool = False,
    ) -> tuple[Tensor, Sums, list[DraftLossOut]]:
        """Like `loss`, plus the losses of MTP depths against the trunk's distribution, each times its weight and `scale`.

        drafts: for each depth its rows, its draft, and factors for the gradients of its rows (None: 1), which only the backward pass reads.
        A draft's `hidden` has all of this rank's states [t, H]. Also returns each depth's token statistics.
        """
        out = linear_policy_loss(
            distinct_rows(self._gather_sequence(state), rows),
            weight,
            labels,
            token_loss,
            drafts=[
                replace(
                    draft,
                    hidden=scale_gradient(distinct_rows(self._gather_sequence(draft.hidden), draft_rows.rows), row_factors),
                    rows=draft_rows.response_indices,
                )
                for draft_rows, draft, row_factors in drafts
            ],
            grad_scale=scale,
            temperature=temperature,
            entropy=entropy,
            **self._kernel_options(weight),
        )
        return out.loss_sum * scale, out.sums, out.drafts

    def draft_loss(
        self,
        packing: Packing,
        state: Tensor,
        trunk: Tensor,
        weight: Tensor,
        draft_rows: DraftRows,
        targets: Tensor,
        temperature: float,
        *,
        depth: int,
        loss: DraftLoss,
        loss_share: float,
        scale: float,
        detach_weight: bool,
        row_factors: Tensor | None = None,
    ) -> tuple[Tensor, DraftLossOut]:
        """The loss of an MTP depth against the trunk's distribution times `scale`, and the statistics of its tokens on all cp ranks.

        Recomputes the trunk's logits. state, trunk [t, H]: states of the depth and of the trunk. targets [n]: trunk rows that the draft's
        labels were sampled from, `depth` tokens after the draft's rows. loss_share: weight of `loss`; the cross-entropy has weight
        1 − `loss_share`. row_factors [n]: factors for the gradients of the rows, as in `loss_with_drafts`. Call `backward` as for `loss`.
        """
        state = self._gather_sequence(state)
        with torch.no_grad():
            trunk = self._gather_sequence(trunk)
        group = parallel_state.get_context_parallel_group() if self.parallel.cp > 1 else None
        rows, labels, _, index = self._select_local(packing, draft_rows.rows, draft_rows.labels, temperature)
        out = linear_draft_loss(
            scale_gradient(distinct_rows(state, rows), row_factors, index),
            _target_states(packing, trunk, targets if index is None else targets[index], depth, group),
            weight,
            labels,
            loss=loss,
            mix=loss_share,
            grad_scale=scale,
            temperature=temperature,
            detach_weight=detach_weight,
            **self._kernel_options(weight),
        )
        if index is None:
            return out.loss_sum * scale, out
        statistics = torch.stack([x.float() for x in out[1:]])
        gathered = statistics.new_zeros(len(statistics), len(draft_rows.labels))
        gathered[:, index] = statistics
        dist.all_reduce(gathered, group=group)
        total = out.loss_sum.detach().float().clone()
        dist.all_reduce(total, group=group)
        logprob, teacher_logprob, overlap, greedy, hit = gathered.unbind(0)
        return out.loss_sum * scale, DraftLossOut(total, logprob, teacher_logprob, overlap, greedy, hit > 0)

    def _select_local(
        self, packing: Packing, rows: Tensor, labels: Tensor, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor, float | Tensor, Tensor | None]:
        """This context-parallel rank's rows, labels and temperatures, and their indices among all rows (None without CP)."""
        if self.parallel.cp == 1:
            return rows, labels, temperature, None
        local_rows = packing.local_index[rows]
        index = torch.nonzero(local_rows >= 0).squeeze(1)
        return local_rows[index], labels[index], temperature[index] if isinstance(temperature, Tensor) else temperature, index

    def _gather_sequence(self, state: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return state
        return gather_from_sequence_parallel_region(state, tensor_parallel_output_grad=False)

    def _kernel_options(self, weight: Tensor) -> _KernelOptions:
        return {
            "group": parallel_state.get_tensor_model_parallel_group() if self.parallel.tp > 1 else None,
            "valid_vocab": self.shape.vocab,
            "workspace_bytes": self.kernels.workspace_bytes,
            "implementation": self.implementation,
            # A tied head shares the embedding's weight. With one pipeline stage both add to the same buffer, and Megatron sets the weight's
            # `zero_out_wgrad`. With several stages autograd returns the head's part, which rounds a half-precision gradient at every slice.
            "main_grad": not self.shape.tied or getattr(weight, "zero_out_wgrad", False),
        }


class _GatherOverRanks(torch.autograd.Function):
    """Values [r, ...] of this rank → [total, ...] of all context-parallel ranks. index [r]: the rows of the values in the result.

    An all-reduce over disjoint rows combines them. In the backward pass each rank selects the gradient of its rows, so the sum over
    ranks counts every token once.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        gathered = values.new_zeros(total, *values.shape[1:])
        gathered[index] = values
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0][index], None, None, None


def _target_states(packing: Packing, state: Tensor, targets: Tensor, depth: int, group: dist.ProcessGroup | None) -> Tensor:
    """Select trunk states from `state` [t, H] at `targets` [n]. No gradient.

    A target is a row of the microbatch, `depth` tokens after one of this rank's rows.

    With context parallelism a target may be at the start of the next block, on another rank. The first `depth` states of every block except
    the first are therefore exchanged. Collective over `group`.
    """
    state = state.detach()
    if group is None:
        return state[targets]
    block_size = len(packing.tokens) // 2
    halo_size = min(depth, block_size)
    blocks = len(packing.local_index) // block_size
    rows = (torch.arange(1, blocks, device=state.device)[:, None] * block_size + torch.arange(halo_size, device=state.device)).flatten()
    local_rows = packing.local_index[rows]
    halo = torch.where((local_rows >= 0)[:, None], state[local_rows.clamp(min=0)], 0)
    dist.all_reduce(halo, group=group)
    local_targets = packing.local_index[targets]
    halo_index = ((targets // block_size - 1) * halo_size + targets % block_size).clamp(0, max(0, len(halo) - 1))
    return torch.where((local_targets >= 0)[:, None], state[local_targets.clamp(min=0)], halo[halo_index])


def scale_gradient(x: Tensor, row_factors: Tensor | None, index: Tensor | None = None) -> Tensor:
    """Return x [n, ·], and multiply its gradient by a factor for each row.

    row_factors: read in the backward pass, so they may be written after this call; None: 1. index [n]: the index into `row_factors` of each
    row; None: row i has factor i.
    """
    return x if row_factors is None else _ScaledGradient.apply(x, row_factors, index)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_factors: Tensor, index: Tensor | None) -> Tensor:
        ctx.row_factors, ctx.index = row_factors, index  # not saved tensors, because the factors are written after the forward pass
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        row_factors = ctx.row_factors if ctx.index is None else ctx.row_factors[ctx.index]
        # The product is computed in the factors' precision without a copy of the gradient in that precision.
        return torch.mul(grads[0], row_factors.unsqueeze(1), out=torch.empty_like(grads[0])), None, None
