"""The loss of an update: the objective's loss on the trunk, and a loss for each trained MTP depth."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mtpctl.kernels.backend import DraftLoss
from mtpctl.kernels.drafts import Draft, DraftLossOut
from mtpctl.model.gpt import Hidden
from mtpctl.model.parallel import max_over_ranks
from mtpctl.trainer.acceptance import Chains, DepthProbabilities, acceptance_metrics, acceptance_sums
from mtpctl.trainer.batch import DraftRows, MicroBatch, Totals
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.head import HITS, Head
from mtpctl.trainer.objective import Objective, Sums

NON_FINITE = "non_finite"
"""Key in `Sums`: the number of microbatches whose loss is not finite."""
MEASURED_TOKENS = 8192
"""Number of response tokens per rank and update from which acceptance is estimated, rounded up to whole sequences.

Bounded, because the estimate is expensive: it needs a pass over each response on the host, and with `mtp.loss: ce` also the trunk's
distribution, which is otherwise not computed.
"""


class UpdateLoss:
    """The `MicroBatchLoss` of a training pass: the objective's loss on the trunk, and a loss for each trained MTP depth.

    totals: counts over all sequences of the update. Every term is divided by a global count, so the gradient does not depend on how the
    batch is split.
    """

    def __init__(self, head: Head, config: EngineConfig, objective: Objective, totals: Totals, *, temperature: float) -> None:
        self.head, self.config, self.objective, self.temperature = head, config, objective, temperature
        self.denominator = objective.denominator(tokens=totals.trained_tokens, sequences=totals.sequences)
        self.drafted_tokens = [max(1, count) for count in totals.drafted_tokens]
        """The number of tokens that each depth drafts."""
        self.draft_loss: DraftLoss = config.mtp.loss
        if config.mtp.loss == "e2e_tv" and config.greedy_drafts:
            self.draft_loss = "e2e_greedy"
        self._tokens_to_measure = MEASURED_TOKENS

    def __call__(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        states = (hidden.trunk, *hidden.mtp)
        is_finite = self._all_finite(states)
        if not is_finite:
            hidden = Hidden(torch.zeros_like(hidden.trunk), hidden.head, [torch.zeros_like(state) for state in hidden.mtp])
        if (
            self.drafted_tokens
            and self.config.mtp.loss != "ce"
            and self.head.supports_joint_loss(couples_tokens=self.objective.couples_tokens)
        ):
            total, sums = self._one_pass(micro, hidden)
        else:
            total, sums = self._separate_passes(micro, hidden)
        if self.config.parallel.cp > 1:
            # A rank without a trained token must still take part in the collectives of the backward pass.
            for state in states:
                total = total + 0.0 * state.sum()
        if not is_finite:
            # A NaN loss still runs all collectives, and its gradients make every rank skip the step.
            total = torch.nan * torch.stack([state.sum() for state in states]).sum()
            sums = {name: torch.nan * value for name, value in sums.items()}
        return total, sums | {NON_FINITE: (~torch.isfinite(total.detach())).float()}

    def is_finite(self, sums: Sums) -> bool:
        """Whether the loss of every microbatch is finite on all ranks. Collective.

        The gradient norm does not show this: a non-finite loss can have finite gradients, because a constant term has no gradient, and a
        clamp passes no gradient to a NaN.
        """
        return max_over_ranks(int(sums[NON_FINITE])) == 0

    def _one_pass(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        """The losses of the trunk and of the MTP depths, which learn from the logits computed for the trunk's loss."""
        mtp, scale, chains = self.config.mtp, 1 / self.denominator, self._new_chains(micro)
        drafts = [
            (
                rows,
                Draft(state, None, self.draft_loss, mtp.loss_mix, weight=self._scale(depth) / scale, detach_weight=mtp.mode == "isolated"),
                None if chains is None else chains.weights[depth - 1],
            )
            for depth, (state, rows) in enumerate(zip(hidden.mtp, micro.drafts, strict=True), start=1)
        ]
        candidate_losses, sums = self._candidate_loss(micro, hidden)
        loss, loss_sums, outputs = self.head.loss_with_drafts(
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
        sums |= loss_sums
        measured_tokens = self._count_measured_tokens(micro)
        for depth, output in enumerate(self._apply_chain_weights(chains, outputs), start=1):
            sums |= _depth_sums(depth, output)
        probabilities = [
            _depth_probabilities(output, draft, len(micro.labels), measured_tokens)
            for output, draft in zip(outputs, micro.drafts, strict=True)
        ]
        return sum(candidate_losses, loss), sums | acceptance_sums(micro, probabilities, measured_tokens, self.config.drafts)

    def _separate_passes(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        """The losses of the trunk and of each MTP depth, each with its own logits."""
        # MTP first, because the one-pass kernels add the LM head's gradients in this order, and the order affects rounding.
        draft_losses, sums = self._draft_losses(micro, hidden)
        candidate_losses, candidate_sums = self._candidate_loss(micro, hidden)
        loss, loss_sums = self.head.loss(
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
        return torch.stack([loss, *draft_losses, *candidate_losses]).sum(), sums | loss_sums | candidate_sums

    def _candidate_loss(self, micro: MicroBatch, hidden: Hidden) -> tuple[list[Tensor], Sums]:
        """The objective's candidate loss and the sum of its divergences; both empty if it has none."""
        term = self.objective.candidates(micro)
        if term is None:
            return [], {}
        loss, divergence = self.head.candidate_loss(
            hidden.trunk, hidden.head, micro.rows, term, self.temperature, scale=1 / self.denominator
        )
        return [loss], {"teacher_kl": divergence.sum()}

    def _scale(self, depth: int) -> float:
        """The factor of the summed loss of an MTP depth."""
        # All depths of the multi-step loss are divided by the number of chains, which is the number of tokens that depth 1 drafts.
        count = self.drafted_tokens[0 if self.config.mtp.loss == "e2e_tv" else depth - 1]
        return self.config.mtp.loss_scale / (count * len(self.drafted_tokens))

    def _new_chains(self, micro: MicroBatch) -> Chains | None:
        """The chains of the multi-step loss; None for other losses."""
        return Chains(micro.drafts, len(micro.labels)) if self.config.mtp.loss == "e2e_tv" else None

    def _apply_chain_weights(self, chains: Chains | None, outputs: list[DraftLossOut]) -> list[DraftLossOut]:
        """Compute the weights of the chains, and set each output's loss to its depth's expected number of drafts that are not accepted.

        Returns other losses unchanged.
        """
        if chains is None:
            return outputs
        losses = chains.compute_weights([output.greedy if self.config.greedy_drafts else output.overlap for output in outputs])
        return [output._replace(loss_sum=loss) for output, loss in zip(outputs, losses, strict=True)]

    def _draft_losses(self, micro: MicroBatch, hidden: Hidden) -> tuple[list[Tensor], Sums]:
        """The loss of each MTP depth, deepest first, and their metric sums."""
        if not self.drafted_tokens:
            return [], {}
        mtp, chains = self.config.mtp, self._new_chains(micro)
        losses: list[Tensor] = []
        sums: Sums = {}
        outputs: list[DraftLossOut] = []
        probabilities: list[DepthProbabilities] = []
        measured_tokens = self._count_measured_tokens(micro)
        for depth, (state, draft) in reversed(list(enumerate(zip(hidden.mtp, micro.drafts, strict=True), start=1))):
            # Rounded to fp32, like the gradient that autograd will pass, because the kernels check that the two are equal.
            scale = torch.tensor(self._scale(depth)).item()
            measured_rows = draft
            if mtp.loss == "ce":
                loss, loss_sums = self.head.loss(
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
                count = int((draft.response_indices < measured_tokens).sum())
                measured_rows = DraftRows(draft.rows[:count], draft.labels[:count], draft.response_indices[:count])
                sums |= {f"mtp/loss_{depth}": loss_sums["loss"], f"mtp/accept_{depth}": loss_sums[HITS]}
                with torch.no_grad():
                    output = self._trunk_draft_loss(micro, hidden, state, measured_rows, depth, 0.0)[1]
            else:
                row_factors = None if chains is None else chains.weights[depth - 1]
                loss, output = self._trunk_draft_loss(micro, hidden, state, draft, depth, scale, row_factors)
            losses.append(loss)
            outputs.insert(0, output)
            probabilities.insert(0, _depth_probabilities(output, measured_rows, len(micro.labels), measured_tokens))
        if mtp.loss != "ce":
            for depth, output in enumerate(self._apply_chain_weights(chains, outputs), start=1):
                sums |= _depth_sums(depth, output)
        return losses, sums | acceptance_sums(micro, probabilities, measured_tokens, self.config.drafts)

    def _trunk_draft_loss(
        self,
        micro: MicroBatch,
        hidden: Hidden,
        state: Tensor,
        draft_rows: DraftRows,
        depth: int,
        scale: float,
        row_factors: Tensor | None = None,
    ) -> tuple[Tensor, DraftLossOut]:
        mtp = self.config.mtp
        return self.head.draft_loss(
            micro.packing,
            state,
            hidden.trunk,
            hidden.head,
            draft_rows,
            micro.rows[draft_rows.response_indices],
            self.temperature,
            depth=depth,
            loss=self.draft_loss,
            loss_share=mtp.loss_mix,
            scale=scale,
            detach_weight=mtp.mode == "isolated",
            row_factors=row_factors,
        )

    def _count_measured_tokens(self, micro: MicroBatch) -> int:
        """Number of response tokens of the microbatch from which acceptance is estimated, in whole sequences."""
        tokens = 0
        for length in [] if micro.dummy else micro.response_lengths:
            if self._tokens_to_measure <= 0:
                break
            tokens, self._tokens_to_measure = tokens + length, self._tokens_to_measure - length
        return tokens

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The objective's metrics, and the loss and acceptance of each MTP depth, from sums over the whole batch."""
        values = {name: float(value) for name, value in sums.items() if name != NON_FINITE}
        metrics = self.objective.metrics({name: value for name, value in values.items() if not name.startswith("mtp/")})
        for depth, drafts in enumerate(self.drafted_tokens, start=1):
            metrics |= {name: values[name] / drafts for name in (f"mtp/loss_{depth}", f"mtp/accept_{depth}") if name in values}
        return metrics | (acceptance_metrics(values, len(self.drafted_tokens)) if self.drafted_tokens else {})

    def _all_finite(self, states: tuple[Tensor, ...]) -> bool:
        """Whether all states are finite on all ranks that share this microbatch's loss."""
        non_finite = torch.stack([~torch.isfinite(state).all() for state in states]).any().float()
        if self.config.parallel.tp * self.config.parallel.cp > 1:
            dist.all_reduce(non_finite, group=parallel_state.get_tensor_and_context_parallel_group())
        return not non_finite


def _depth_sums(depth: int, output: DraftLossOut) -> Sums:
    return {f"mtp/loss_{depth}": output.loss_sum.detach(), f"mtp/accept_{depth}": output.hit.sum()}


def _depth_probabilities(output: DraftLossOut, draft: DraftRows, num_tokens: int, measured_tokens: int) -> DepthProbabilities:
    """A depth's probabilities for the microbatch's `num_tokens` response tokens.

    They are 0 for tokens that are not drafted, and from index `measured_tokens` on.
    """
    is_measured = draft.response_indices < measured_tokens
    tokens = draft.response_indices[is_measured]

    def scatter(values: Tensor) -> Tensor:
        dense = torch.zeros(num_tokens, dtype=torch.float32, device=values.device)
        dense[tokens] = values[is_measured].detach().float()
        return dense

    accept_probs = (output.logprob - output.teacher_logprob).exp().clamp(max=1)
    return DepthProbabilities(
        measured=scatter(torch.ones_like(output.overlap)),
        accepted={"probabilistic": scatter(output.overlap), "greedy": scatter(output.greedy)},
        accept_given_token={"probabilistic": scatter(accept_probs), "greedy": scatter(output.hit)},
    )


def _negative_log_likelihood(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
    loss = -logprob.sum()
    return loss, {"loss": loss.detach()}
