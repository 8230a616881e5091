"""The loss of one update: the objective's on the trunk, and for every MTP depth that trains one of the token after next, or of the trunk's
own distribution of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mtpctl.kernels.draft_terms import Draft, DraftLossOut
from mtpctl.model.gpt import Hidden
from mtpctl.trainer.acceptance import DepthChances, acceptance_metrics, acceptance_sums
from mtpctl.trainer.batch import DraftRows, MicroBatch, Totals
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.head import HITS, Head
from mtpctl.trainer.objective import Objective, Sums

MEASURED_TOKENS = 8192
"""Response tokens of a rank and update, sequences whole, that tell the acceptance to expect. It takes the trunk's distribution, which
`mtp.loss: ce` does not need, and a walk over each response on the host."""


class UpdateLoss:
    """The loss of an update, as the `MicroBatchLoss` of a training pass. `totals`: of all its sequences, with the MTP depths that train.

    Every term is divided by a count over the whole batch, so that cutting the batch another way leaves its gradient the same.
    """

    def __init__(self, head: Head, config: EngineConfig, objective: Objective, totals: Totals, *, temperature: float) -> None:
        self.head, self.config, self.objective, self.temperature = head, config, objective, temperature
        self.denominator = objective.denominator(tokens=totals.trained, sequences=totals.sequences)
        self.drafts = [max(1, count) for count in totals.drafted]
        """For each depth, how many tokens of the batch a drafter can be asked for."""
        self.left = MEASURED_TOKENS

    def __call__(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        states = (hidden.trunk, *hidden.mtp)
        finite = self._finite(states)
        if not finite:
            hidden = Hidden(torch.zeros_like(hidden.trunk), hidden.head, [torch.zeros_like(state) for state in hidden.mtp])
        if self.drafts and self.config.mtp.loss != "ce" and self.head.teaches_drafts(couples_tokens=self.objective.couples_tokens):
            total, sums = self._together(micro, hidden)
        else:
            total, sums = self._apart(micro, hidden)
        if self.config.parallel.cp > 1:
            # A rank without a supervised token still has to take part in the collectives of the other ranks' backward pass.
            for state in states:
                total = total + 0.0 * state.sum()
        if not finite:
            # A loss that is not a number passes through all collectives and makes gradients by which every rank skips the step.
            total = torch.nan * torch.stack([state.sum() for state in states]).sum()
            sums = {name: torch.nan * value for name, value in sums.items()}
        return total, sums

    def _together(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        """The trunk's loss and those of the MTP depths, which learn from the trunk's logits as its own loss makes them."""
        mtp, scale = self.config.mtp, 1 / self.denominator
        drafts = [
            (
                rows,
                Draft(state, None, mtp.loss, mtp.loss_mix, weight=self._scale(depth) / scale, detach_weight=mtp.mode == "isolated"),
            )
            for depth, (state, rows) in enumerate(zip(hidden.mtp, micro.drafts, strict=True), start=1)
        ]
        further, sums = self._candidates(micro, hidden)
        loss, found, told = self.head.loss_with_drafts(
            hidden.trunk,
            hidden.head,
            micro.rows,
            micro.labels,
            self.temperature,
            self.objective.token_loss(micro),
            drafts,
            scale=scale,
            entropy=self.objective.needs_entropy,
        )
        sums |= found
        measured = self._measured(micro)
        for depth, each in enumerate(told, start=1):
            sums |= _depth_sums(depth, each)
        chances = [_chances(each, draft, len(micro.labels), measured) for each, draft in zip(told, micro.drafts, strict=True)]
        return sum(further, loss), sums | acceptance_sums(micro, chances, measured, self.config.drafts)

    def _apart(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        """The trunk's loss and those of the MTP depths, one after the other."""
        # MTP first: the one-pass kernels add gradients of the head as they go, and a backward pass would add them in this order.
        parts, sums = self._drafts(micro, hidden)
        further, more = self._candidates(micro, hidden)
        loss, found = self.head.loss(
            micro.packing,
            hidden.trunk,
            hidden.head,
            micro.rows,
            micro.labels,
            self.temperature,
            self.objective.token_loss(micro),
            scale=1 / self.denominator,
            couples_tokens=self.objective.couples_tokens,
            entropy=self.objective.needs_entropy,
        )
        return torch.stack([loss, *parts, *further]).sum(), sums | found | more

    def _candidates(self, micro: MicroBatch, hidden: Hidden) -> tuple[list[Tensor], Sums]:
        """The objective's term of named tokens, and the sum of its divergences; both empty without one."""
        term = self.objective.candidates(micro)
        if term is None:
            return [], {}
        loss, divergence = self.head.candidate_loss(
            hidden.trunk, hidden.head, micro.rows, term, self.temperature, scale=1 / self.denominator
        )
        return [loss], {"teacher_kl": divergence.sum()}

    def _scale(self, depth: int) -> float:
        """What the summed loss of an MTP depth is multiplied by."""
        return self.config.mtp.loss_scale / (self.drafts[depth - 1] * len(self.drafts))

    def _drafts(self, micro: MicroBatch, hidden: Hidden) -> tuple[list[Tensor], Sums]:
        """The loss of each MTP depth, deepest first, and their sums."""
        if not self.drafts:
            return [], {}
        mtp = self.config.mtp
        parts: list[Tensor] = []
        sums: Sums = {}
        chances: list[DepthChances] = []
        measured = self._measured(micro)
        for depth, (state, draft) in reversed(list(enumerate(zip(hidden.mtp, micro.drafts, strict=True), start=1))):
            # Rounded to fp32, like the gradient that autograd will pass: the kernels check that the two are equal.
            scale = torch.tensor(self._scale(depth)).item()
            if mtp.loss == "ce":
                loss, found = self.head.loss(
                    micro.packing,
                    state,
                    hidden.head,
                    draft.rows,
                    draft.labels,
                    self.temperature,
                    _negative_log_likelihood,
                    scale=scale,
                    hit=True,
                    detach_weight=mtp.mode == "isolated",
                )
                some = int((draft.tokens < measured).sum())
                few = DraftRows(draft.rows[:some], draft.labels[:some], draft.tokens[:some])
                sums |= {f"mtp/loss_{depth}": found["loss"], f"mtp/accept_{depth}": found[HITS]}
                with torch.no_grad():
                    told = self._against_trunk(micro, hidden, state, few, depth, 0.0)[1]
            else:
                few = draft
                loss, told = self._against_trunk(micro, hidden, state, draft, depth, scale)
                sums |= _depth_sums(depth, told)
            parts.append(loss)
            chances.insert(0, _chances(told, few, len(micro.labels), measured))
        return parts, sums | acceptance_sums(micro, chances, measured, self.config.drafts)

    def _against_trunk(
        self, micro: MicroBatch, hidden: Hidden, state: Tensor, draft: DraftRows, depth: int, scale: float
    ) -> tuple[Tensor, DraftLossOut]:
        mtp = self.config.mtp
        return self.head.draft(
            micro.packing,
            state,
            hidden.trunk,
            hidden.head,
            draft,
            micro.rows[draft.tokens],
            self.temperature,
            depth=depth,
            loss=mtp.loss,
            mix=mtp.loss_mix,
            scale=scale,
            detach_weight=mtp.mode == "isolated",
        )

    def _measured(self, micro: MicroBatch) -> int:
        """How many response tokens of the micro-batch tell the acceptance to expect: whole sequences, as long as some are still wanted."""
        tokens = 0
        for length in [] if micro.idle else micro.lengths:
            if self.left <= 0:
                break
            tokens, self.left = tokens + length, self.left - length
        return tokens

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The objective's metrics, and loss and acceptance of each MTP depth, from sums over the whole batch."""
        values = {name: float(value) for name, value in sums.items()}
        metrics = self.objective.metrics({name: value for name, value in values.items() if not name.startswith("mtp/")})
        for depth, drafts in enumerate(self.drafts, start=1):
            metrics |= {name: values[name] / drafts for name in (f"mtp/loss_{depth}", f"mtp/accept_{depth}") if name in values}
        return metrics | (acceptance_metrics(values, len(self.drafts)) if self.drafts else {})

    def _finite(self, states: tuple[Tensor, ...]) -> bool:
        """Whether all states are finite, on all ranks that share this micro-batch's loss."""
        bad = torch.stack([~torch.isfinite(state).all() for state in states]).any().float()
        if self.config.parallel.tp * self.config.parallel.cp > 1:
            dist.all_reduce(bad, group=parallel_state.get_tensor_and_context_parallel_group())
        return not bad


def _depth_sums(depth: int, told: DraftLossOut) -> Sums:
    """The summed loss of a depth, and how many of its tokens were its first choice."""
    return {f"mtp/loss_{depth}": told.loss_sum.detach(), f"mtp/accept_{depth}": told.hit.sum()}


def _chances(told: DraftLossOut, draft: DraftRows, count: int, measured: int) -> DepthChances:
    """What the tokens of a depth tell, at their places among the micro-batch's `count` response tokens, 0 from `measured` on."""
    chosen = draft.tokens < measured
    tokens = draft.tokens[chosen]

    def spread(values: Tensor) -> Tensor:
        whole = torch.zeros(count, dtype=torch.float32, device=values.device)
        whole[tokens] = values[chosen].detach().float()
        return whole

    kept = (told.logprob - told.teacher_logprob).exp().clamp(max=1)
    return DepthChances(
        there=spread(torch.ones_like(told.overlap)),
        accepted={"probabilistic": spread(told.overlap), "greedy": spread(told.greedy)},
        kept={"probabilistic": spread(kept), "greedy": spread(told.hit)},
    )


def _negative_log_likelihood(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
    """The loss of an MTP depth, summed over its tokens."""
    loss = -logprob.sum()
    return loss, {"loss": loss.detach()}
