"""Losses and gradients of an update with MTP by definition."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from mtpctl.trainer.objective import NextToken
from tests.fakes import mimo_reference


def sampled(sequence, start, end):
    """Whether tokens `start` to `end` are sampled tokens of the response."""
    return start >= sequence.prompt_length and all(sequence.loss_mask[start - sequence.prompt_length : end - sequence.prompt_length])


def reference(folder, batch, *, depths, isolated, loss_scale, dtype=torch.float64):
    """Losses by definition, token by token: depth k at position i predicts token i + 1 + k.

    Supervised are response tokens that were sampled, and of them, at depth k, those after the first k of their turn: the drafter
    begins at the last token that was read and not sampled. Each loss is a mean over all such tokens of the batch.
    """
    weights = {name: value.to(dtype).requires_grad_() for name, value in load_file(folder.path / "model.safetensors").items()}
    sums, counts = [0.0] * (depths + 1), [0] * (depths + 1)
    for sequence in batch:
        logits, drafts = mimo_reference.forward(weights, folder.config, sequence.token_ids, depths, isolated=isolated)
        for target in range(sequence.prompt_length, len(sequence.token_ids)):
            for depth, scores in enumerate((logits, *drafts)):
                position = target - 1 - depth
                if sampled(sequence, position + 1, target + 1):
                    sums[depth] = sums[depth] - scores[position].log_softmax(-1)[sequence.token_ids[target]]
                    counts[depth] += 1
    means = [total / max(1, count) for total, count in zip(sums, counts, strict=True)]
    (means[0] + loss_scale * sum(means[1:]) / max(1, depths)).backward()
    grads = {name: value.grad if value.grad is not None else torch.zeros_like(value) for name, value in weights.items()}
    return [float(torch.as_tensor(mean).detach()) for mean in means], grads


class Nothing(NextToken):
    """A main loss of weight 0, so all gradients come from MTP."""

    def token_loss(self, micro):
        loss = super().token_loss(micro)

        def nothing(*tokens):
            value, sums = loss(*tokens)
            return value * 0.0, sums

        return nothing
