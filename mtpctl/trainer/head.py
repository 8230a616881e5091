"""The LM head over the hidden states of a micro-batch: log-probs of response tokens, and losses of them.

A loss in which every token's term looks at that token alone is made in one pass: logits, loss and the gradients of states and head,
some rows after another, in three matrix products (`linear_policy_loss`). A loss that couples tokens needs all log-probs first, and its
backward pass makes most of the logits a second time: four products, less what the workspace could keep.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mtpctl.families.shape import ModelShape
from mtpctl.kernels.choice import ONE_PASS
from mtpctl.kernels.logprob import LogProbOut, linear_logprob
from mtpctl.kernels.policy import TokenLoss, linear_policy_loss
from mtpctl.model.packing import Packing
from mtpctl.recipe.kernels import KernelsConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.trainer.objective import Sums
from mtpctl.trainer.spread import over_ranks

HITS = "hits"
"""Among a loss's sums: tokens that no other entry of the vocabulary is likelier than."""


class Head:
    """What both ways need to know beside a micro-batch. Results are the same on all tp and cp ranks."""

    def __init__(self, kernels: KernelsConfig, shape: ModelShape, parallel: ParallelConfig, *, sequence_parallel: bool) -> None:
        self.kernels, self.shape, self.parallel, self.sequence_parallel = kernels, shape, parallel, sequence_parallel

    def logprob(
        self, packing: Packing, state: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, temperature: Any, **options: Any
    ) -> LogProbOut:
        """Of `labels` [R] under the states at `rows` [R] of the whole micro-batch. `options` are those of `linear_logprob`."""
        state = self._whole(state)

        def scored(rows: Tensor, labels: Tensor, temperature: Any) -> LogProbOut:
            return linear_logprob(state[rows], weight, labels, temperature=temperature, **self._settings(weight), **options)

        if self.parallel.cp == 1:
            return scored(rows, labels, temperature)
        return over_ranks(scored, rows, labels, temperature, here=packing.here, group=parallel_state.get_context_parallel_group())

    def loss(
        self,
        packing: Packing,
        state: Tensor,
        weight: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperature: Any,
        token_loss: TokenLoss,
        *,
        scale: float,
        couples_tokens: bool = False,
        entropy: bool = False,
        hit: bool = False,
        detach_weight: bool = False,
    ) -> tuple[Tensor, Sums]:
        """The sum of `token_loss` over the tokens, times `scale`, to be differentiated as it is; and its sums, with `HITS` where asked for.

        The value is this rank's part of the loss where cp ranks share the tokens; the sums are the whole micro-batch's.
        """
        if couples_tokens or self.kernels.linear_logprob not in ONE_PASS:
            out = self.logprob(packing, state, weight, rows, labels, temperature, entropy=entropy, hit=hit, detach_weight=detach_weight)
            loss, sums = token_loss(out.logprob, out.entropy, torch.arange(len(labels), device=labels.device))
            return loss * scale, sums if out.hit is None else sums | {HITS: out.hit.sum()}
        state = self._whole(state)
        places: Tensor | None = None
        if self.parallel.cp > 1:
            own = packing.here[rows]
            places = torch.nonzero(own >= 0).squeeze(1)
            rows, labels = own[places], labels[places]
            temperature = temperature[places] if isinstance(temperature, Tensor) else temperature
        one = linear_policy_loss(
            state[rows],
            weight,
            labels,
            token_loss if places is None else lambda logprob, entropy, rows: token_loss(logprob, entropy, places[rows]),
            grad_scale=scale,
            temperature=temperature,
            entropy=entropy,
            hit=hit,
            detach_weight=detach_weight,
            **self._settings(weight),
        )
        sums = one.sums if one.hit is None else one.sums | {HITS: one.hit.sum()}
        if places is not None:
            flat = torch.stack([sums[name].float() for name in sums])
            dist.all_reduce(flat, group=parallel_state.get_context_parallel_group())
            sums = dict(zip(sums, flat, strict=True))
        return one.loss_sum * scale, sums

    def _whole(self, state: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return state
        return gather_from_sequence_parallel_region(state, tensor_parallel_output_grad=False)

    def _settings(self, weight: Tensor) -> dict[str, Any]:
        return {
            "group": parallel_state.get_tensor_model_parallel_group() if self.parallel.tp > 1 else None,
            "valid_vocab": self.shape.vocab,
            "workspace_bytes": self.kernels.workspace_bytes,
            "implementation": self.kernels.linear_logprob,
            # A tied head's gradient has another part, the embedding's, which autograd brings: it is added where Megatron says that it is
            # awaited (`zero_out_wgrad`, on one pipeline stage). Elsewhere autograd brings both, and every slice costs a half-precision
            # gradient one more rounding.
            "main_grad": not self.shape.tied or getattr(weight, "zero_out_wgrad", False),
        }
