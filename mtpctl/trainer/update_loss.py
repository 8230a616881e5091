"""The loss of one update: the objective's on the trunk, and a next-token loss for every MTP depth that trains."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mtpctl.model.gpt import Hidden
from mtpctl.trainer.batch import MicroBatch, Sequence
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.head import HITS, Head
from mtpctl.trainer.objective import Objective, Sums


class UpdateLoss:
    """The loss of an update on `sequences`, as the `MicroBatchLoss` of a training pass. `depths`: how many MTP depths train.

    Every term is divided by a count over the whole batch, so that cutting the batch another way leaves its gradient the same.
    """

    def __init__(
        self, head: Head, config: EngineConfig, objective: Objective, sequences: list[Sequence], *, temperature: float, depths: int
    ) -> None:
        self.head, self.config, self.objective, self.temperature = head, config, objective, temperature
        self.denominator = objective.denominator(sequences)
        self.drafts = [max(1, sum(s.drafted(depth) for s in sequences)) for depth in range(1, depths + 1)]
        """For each depth, how many tokens of the batch a drafter can be asked for."""

    def __call__(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        states = (hidden.trunk, *hidden.mtp)
        finite = self._finite(states)
        if not finite:
            hidden = Hidden(torch.zeros_like(hidden.trunk), hidden.head, [torch.zeros_like(state) for state in hidden.mtp])
        # MTP first: the one-pass kernels add gradients of the head as they go, and a backward pass would add them in this order.
        parts: list[Tensor] = []
        sums: Sums = {}
        for depth, (state, draft) in reversed(list(enumerate(zip(hidden.mtp, micro.drafts, strict=True), start=1))):
            loss, found = self.head.loss(
                micro.packing,
                state,
                hidden.head,
                draft.rows,
                draft.labels,
                self.temperature,
                _negative_log_likelihood,
                # Rounded to fp32, like the gradient that autograd will pass: the kernels check that the two are equal.
                scale=torch.tensor(1 / (self.drafts[depth - 1] * len(self.drafts))).mul(self.config.mtp.loss_scale).item(),
                hit=True,
                detach_weight=self.config.mtp.mode == "isolated",
            )
            parts.append(loss)
            sums |= {f"mtp/loss_{depth}": found["loss"], f"mtp/accept_{depth}": found[HITS]}
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
        total = torch.stack([loss, *parts]).sum()
        sums |= found
        if self.config.parallel.cp > 1:
            # A rank without a supervised token still has to take part in the collectives of the other ranks' backward pass.
            for state in states:
                total = total + 0.0 * state.sum()
        if not finite:
            # A loss that is not a number passes through all collectives and makes gradients by which every rank skips the step.
            total = torch.nan * torch.stack([state.sum() for state in states]).sum()
            sums = {name: torch.nan * value for name, value in sums.items()}
        return total, sums

    def metrics(self, sums: Sums) -> dict[str, float]:
        """The objective's metrics, and loss and acceptance of each MTP depth, from sums over the whole batch."""
        values = {name: float(value) for name, value in sums.items()}
        metrics = self.objective.metrics({name: value for name, value in values.items() if not name.startswith("mtp/")})
        drafts = {name: value / self.drafts[int(name.rpartition("_")[2]) - 1] for name, value in values.items() if name.startswith("mtp/")}
        return metrics | drafts

    def _finite(self, states: tuple[Tensor, ...]) -> bool:
        """Whether all states are finite, on all ranks that share this micro-batch's loss."""
        bad = torch.stack([~torch.isfinite(state).all() for state in states]).any().float()
        if self.config.parallel.tp * self.config.parallel.cp > 1:
            dist.all_reduce(bad, group=parallel_state.get_tensor_and_context_parallel_group())
        return not bad


def _negative_log_likelihood(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
    """The loss of an MTP depth, summed over its tokens."""
    loss = -logprob.sum()
    return loss, {"loss": loss.detach()}
