"""The LM head over the hidden states of a micro-batch: log-probs of response tokens, and losses of them.

A loss is separable when every token's term depends on that token's log-prob alone. A separable loss is computed in one pass over slices of
rows, which makes logits, loss and the gradients of states and head in three matrix products (`linear_policy_loss`). MTP depths that learn
the trunk's distribution learn it in that pass, from those logits. A loss that couples tokens needs all log-probs first, and its backward
pass computes most of the logits again: four products, fewer where the workspace kept some logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypedDict

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mtpctl.families.shape import ModelShape
from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.candidates import CandidateTerm, candidate_loss
from mtpctl.kernels.choice import ONE_PASS
from mtpctl.kernels.draft import linear_draft_loss
from mtpctl.kernels.draft_terms import Draft, DraftLossOut
from mtpctl.kernels.logprob import LogProbOut, TopK, linear_logprob
from mtpctl.kernels.policy import TokenLoss, linear_policy_loss
from mtpctl.kernels.problem import DraftLoss
from mtpctl.kernels.rows import distinct_rows
from mtpctl.model.packing import Packing
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.trainer.batch import DraftRows
from mtpctl.trainer.objective import Sums

HITS = "hits"
"""Name among a loss's sums: how many tokens a greedy drafter would have drafted, since no entry of the vocabulary is likelier."""


class _KernelOptions(TypedDict):
    group: dist.ProcessGroup | None
    valid_vocab: int
    workspace_bytes: int
    implementation: str
    main_grad: bool


class Head:
    """Log-probs and losses under the LM head, with one engine's kernels and layout. Results are the same on all tp and cp ranks."""

    def __init__(self, kernels: KernelsConfig, shape: ModelShape, parallel: ParallelConfig, *, sequence_parallel: bool) -> None:
        self.kernels, self.shape, self.parallel, self.sequence_parallel = kernels, shape, parallel, sequence_parallel

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
        """Log-probs of `labels` [R] under the states at `rows` [R] of the whole micro-batch, and what else of `LogProbOut` is asked for.

        state [t, H]: this rank's hidden states; weight [vocab / tp, H]: its rows of the head; temperature: a number or [R].
        """
        state = self._gather_sequence(state)

        def logprob(rows: Tensor, labels: Tensor, temperature: float | Tensor) -> LogProbOut:
            return linear_logprob(
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

        if self.parallel.cp == 1:
            return logprob(rows, labels, temperature)
        return gather_over_cp(logprob, rows, labels, temperature, here=packing.here, group=parallel_state.get_context_parallel_group())

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
        """The sum of `token_loss` over the tokens times `scale`, and the sums that `token_loss` names, with `HITS` where `hit` is set.

        Call `backward` on the loss without a further factor: its gradients are made for that. Where cp ranks share the tokens the loss is
        this rank's part, while the sums are those of the whole micro-batch. States, weight, rows and labels are as in `logprob`.
        """
        if couples_tokens or self.kernels.linear_logprob not in ONE_PASS:
            out = self.logprob(packing, state, weight, rows, labels, temperature, entropy=entropy, hit=hit, detach_weight=detach_weight)
            loss, sums = token_loss(out.logprob, out.entropy, torch.arange(len(labels), device=labels.device))
            return loss * scale, sums if out.hit is None else sums | {HITS: out.hit.sum()}
        state = self._gather_sequence(state)
        places: Tensor | None = None
        if self.parallel.cp > 1:
            own = packing.here[rows]
            places = torch.nonzero(own >= 0).squeeze(1)
            rows, labels = own[places], labels[places]
            temperature = temperature[places] if isinstance(temperature, Tensor) else temperature
        one = linear_policy_loss(
            distinct_rows(state, rows),
            weight,
            labels,
            token_loss if places is None else lambda logprob, entropy, rows: token_loss(logprob, entropy, places[rows]),
            grad_scale=scale,
            temperature=temperature,
            entropy=entropy,
            hit=hit,
            detach_weight=detach_weight,
            **self._kernel_options(weight),
        )
        sums = one.sums if one.hit is None else one.sums | {HITS: one.hit.sum()}
        if places is not None:
            flat = torch.stack([sums[name].float() for name in sums])
            dist.all_reduce(flat, group=parallel_state.get_context_parallel_group())
            sums = dict(zip(sums, flat, strict=True))
        return one.loss_sum * scale, sums

    def candidate_loss(
        self, state: Tensor, weight: Tensor, rows: Tensor, term: CandidateTerm, temperature: float, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The loss of `term` at the R response tokens times `scale`, and the divergence [R]. States, weight and rows are as in `logprob`,
        without cp. Call `backward` as for `loss`.
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
            # The others leave the weight's gradient to autograd, and Megatron reads that or its buffer, not both.
            main_grad=options["main_grad"] and self.kernels.linear_logprob in ONE_PASS,
        )
        return out.loss_sum * scale, out.divergence

    def teaches_drafts(self, *, couples_tokens: bool) -> bool:
        """Whether `loss_with_drafts` can be called: the loss makes logits once, and every token's are on the rank that drafts it."""
        return not couples_tokens and self.kernels.linear_logprob in ONE_PASS and self.parallel.cp == 1

    def loss_with_drafts(
        self,
        state: Tensor,
        weight: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        token_loss: TokenLoss,
        drafts: Sequence[tuple[DraftRows, Draft]],
        *,
        scale: float,
        entropy: bool = False,
    ) -> tuple[Tensor, Sums, list[DraftLossOut]]:
        """As `loss`, with the losses of MTP depths against the trunk's distribution, each times its weight and `scale`; and what the tokens
        of each depth tell.

        drafts: of each depth its rows, and a draft whose `hidden` are all of this rank's states [t, H].
        """
        one = linear_policy_loss(
            distinct_rows(self._gather_sequence(state), rows),
            weight,
            labels,
            token_loss,
            drafts=[
                replace(draft, hidden=distinct_rows(self._gather_sequence(draft.hidden), places.rows), rows=places.tokens)
                for places, draft in drafts
            ],
            grad_scale=scale,
            temperature=temperature,
            entropy=entropy,
            **self._kernel_options(weight),
        )
        return one.loss_sum * scale, one.sums, one.drafts

    def draft(
        self,
        packing: Packing,
        state: Tensor,
        trunk: Tensor,
        weight: Tensor,
        draft: DraftRows,
        targets: Tensor,
        temperature: float,
        *,
        depth: int,
        loss: DraftLoss,
        mix: float,
        scale: float,
        detach_weight: bool,
    ) -> tuple[Tensor, DraftLossOut]:
        """The loss of an MTP depth against the trunk's distribution, times `scale`, and what each of its tokens tells, on all cp ranks. The
        trunk's logits are made for it alone.

        state, trunk [t, H]: the depth's states and the trunk's; targets [n]: places in the whole micro-batch of the trunk's states that the
        draft's labels were sampled from, `depth` tokens behind its rows. Call `backward` as for `loss`.
        """
        state = self._gather_sequence(state)
        with torch.no_grad():
            trunk = self._gather_sequence(trunk)
        group = parallel_state.get_context_parallel_group() if self.parallel.cp > 1 else None
        rows, labels = draft.rows, draft.labels
        places: Tensor | None = None
        if group is not None:
            own = packing.here[rows]
            places = torch.nonzero(own >= 0).squeeze(1)
            rows, labels, targets = own[places], labels[places], targets[places]
        options = self._kernel_options(weight)
        teacher = teacher_states(packing, trunk, targets, depth, group)
        out = linear_draft_loss(
            distinct_rows(state, rows),
            teacher,
            weight,
            labels,
            loss=loss,
            mix=mix,
            grad_scale=scale,
            temperature=temperature,
            detach_weight=detach_weight,
            **options,
        )
        if places is None:
            return out.loss_sum * scale, out
        told = torch.stack([x.float() for x in out[1:]])
        whole = told.new_zeros(len(told), len(draft.labels))
        whole[:, places] = told
        dist.all_reduce(whole, group=group)
        total = out.loss_sum.detach().float().clone()
        dist.all_reduce(total, group=group)
        logprob, teacher_logprob, overlap, greedy, hit = whole.unbind(0)
        return out.loss_sum * scale, DraftLossOut(total, logprob, teacher_logprob, overlap, greedy, hit > 0)

    def _gather_sequence(self, state: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return state
        return gather_from_sequence_parallel_region(state, tensor_parallel_output_grad=False)

    def _kernel_options(self, weight: Tensor) -> _KernelOptions:
        return {
            "group": parallel_state.get_tensor_model_parallel_group() if self.parallel.tp > 1 else None,
            "valid_vocab": self.shape.vocab,
            "workspace_bytes": self.kernels.workspace_bytes,
            "implementation": self.kernels.linear_logprob,
            # A tied head's weight is the embedding's, which on one pipeline stage adds its part to the same buffer; Megatron marks the
            # weight there with `zero_out_wgrad`. On several stages autograd returns the head's part, and every slice of rows rounds a
            # half-precision gradient once more.
            "main_grad": not self.shape.tied or getattr(weight, "zero_out_wgrad", False),
        }


# Log-probs of a micro-batch whose tokens lie on several context-parallel ranks, gathered so that every rank has all of them.
#
# Each rank computes the log-probs of its own tokens, and an all-reduce over disjoint places puts them together. A loss over all tokens is
# then the same on every rank. In the backward pass each rank takes the gradient of its own tokens alone, so that the sum over ranks counts
# every token once.


class _Gather(torch.autograd.Function):
    """values [r, ...] of this rank → [total, ...] of all ranks; `places` [r] says where this rank's values go."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(total, *values.shape[1:])
        whole[places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][places], None, None, None


def gather_over_cp(
    logprob: Callable[[Tensor, Tensor, float | Tensor], LogProbOut],
    rows: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    *,
    here: Tensor,
    group: dist.ProcessGroup,
) -> LogProbOut:
    """Call `logprob(rows, labels, temperature)` for the rows that are this rank's, and return the results for all `rows` on every rank.

    rows [R]: places in the whole micro-batch; labels [R]; temperature: a number or [R]; here: `Packing.here`, from a place in the whole
    micro-batch to one among this rank's tokens.
    """
    own = here[rows]
    places = torch.nonzero(own >= 0).squeeze(1)
    out = logprob(own[places], labels[places], temperature[places] if isinstance(temperature, Tensor) else temperature)

    def gathered(values: Tensor) -> Tensor:
        return _Gather.apply(values, places, len(rows), group)

    return LogProbOut(
        gathered(out.logprob),
        None if out.entropy is None else gathered(out.entropy),
        None if out.hit is None else gathered(out.hit.float()) > 0,
        None if out.topk is None else TopK(gathered(out.topk.logprob), gathered(out.topk.ids)),
    )


# The trunk's states that an MTP depth learns from.


def teacher_states(packing: Packing, state: Tensor, targets: Tensor, depth: int, group: dist.ProcessGroup | None) -> Tensor:
    """state [t, H] at `targets` [n], places in the whole row that lie `depth` tokens behind tokens of this rank. Without gradient.

    All ranks of `group`, which share the row's tokens, call together.
    """
    state = state.detach()
    if group is None:
        return state[targets]
    size = len(packing.tokens) // 2
    ahead = min(depth, size)
    blocks = len(packing.here) // size
    places = (torch.arange(1, blocks, device=state.device)[:, None] * size + torch.arange(ahead, device=state.device)).flatten()
    held = packing.here[places]
    borders = torch.where((held >= 0)[:, None], state[held.clamp(min=0)], 0)
    dist.all_reduce(borders, group=group)
    here = packing.here[targets]
    border = ((targets // size - 1) * ahead + targets % size).clamp(0, max(0, len(borders) - 1))
    return torch.where((here >= 0)[:, None], state[here.clamp(min=0)], borders[border])
