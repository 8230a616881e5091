"""The heads of attention from the output of one linear layer: split, their norms, and their rotary position embeddings.

    mixed [t, groups, (queries + 2) d]  →  queries [t, groups · queries, d], keys and values [t, groups, d]
    with gates: (2 queries + 2) d       →  and gates as queries

A group is one key-value head and the query heads that share it. Queries and keys are divided by their root mean square and multiplied
with a scale, where a family norms heads (QK norm, arXiv 2302.05442), and then rotated (`mtpctl.kernels.rotary`). On a card one kernel does
all of that in fp32 and rounds once, and another one computes the gradients; nothing is kept for them but `mixed`, and that only where
heads are normed.

Shape legend: t tokens, d width of a head, n half the number of rotated dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtpctl.kernels.autograd import AutogradContext
from mtpctl.kernels.norm import rms_norm
from mtpctl.kernels.rotary import rotated


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How `mixed` is laid out. Each of `groups` groups is `queries` query heads, as many gate heads if `gated`, one key head and one value
    head, each `width` wide."""

    groups: int
    queries: int
    width: int
    gated: bool = False

    @property
    def sizes(self) -> list[int]:
        """Columns of a group's queries, gates, key and value."""
        of_queries = self.queries * self.width
        return [of_queries, of_queries if self.gated else 0, self.width, self.width]


class HeadNorm(NamedTuple):
    """Norms of query and key heads: x / sqrt(mean x² + eps) · (offset + weight), with a weight [d] for each of the two."""

    queries: Tensor
    keys: Tensor
    eps: float
    offset: float = 0.0


class Heads(NamedTuple):
    """queries [t, groups · queries, d], keys and values [t, groups, d], all contiguous; gates as queries, empty where there are none."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gates: Tensor


def split_heads(mixed: Tensor, layout: HeadLayout, norm: HeadNorm | None, angles: tuple[Tensor, Tensor] | None) -> Heads:
    """The heads in `mixed` [t, …], normed and rotated by the cosines and sines of each token, fp32 [t, n]. None leaves that out."""
    if not mixed.is_cuda:
        return plainly_split_heads(mixed, layout, norm, angles)
    weights = (None, None) if norm is None else (norm.queries, norm.keys)
    return Heads(*_SplitHeads.apply(mixed, *weights, layout, norm, angles))


def plainly_split_heads(mixed: Tensor, layout: HeadLayout, norm: HeadNorm | None, angles: tuple[Tensor, Tensor] | None) -> Heads:
    """`split_heads` in plain PyTorch."""
    parts = mixed.unflatten(-1, (layout.groups, sum(layout.sizes))).split(layout.sizes, dim=-1)
    # A view into the tensor of all heads, saved for a backward pass, would keep that whole tensor.
    counts = [layout.groups * size // layout.width for size in layout.sizes]
    queries, gates, keys, values = (
        part.reshape(len(mixed), count, layout.width).contiguous() for part, count in zip(parts, counts, strict=True)
    )
    if norm is not None:
        queries, keys = rms_norm(queries, norm.queries, norm.eps, norm.offset), rms_norm(keys, norm.keys, norm.eps, norm.offset)
    if angles is not None:
        queries, keys = (rotated(x, *angles) for x in (queries, keys))
    return Heads(queries, keys, values, gates)


class _Context(AutogradContext, Protocol):
    layout: HeadLayout
    constants: tuple[float, float] | None
    rotates: bool


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        layout: HeadLayout,
        norm: HeadNorm | None,
        angles: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, ...]:
        from mtpctl.kernels import heads_triton

        mixed = mixed.contiguous()
        ctx.save_for_backward(None if norm is None else mixed, query_weight, key_weight, *(angles or ()))
        ctx.layout, ctx.rotates = layout, angles is not None
        ctx.constants = None if norm is None else (norm.eps, norm.offset)
        return heads_triton.split(mixed, layout, norm, angles)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from mtpctl.kernels import heads_triton

        mixed, query_weight, key_weight, *angles = ctx.saved_tensors
        norm = None if ctx.constants is None else HeadNorm(query_weight, key_weight, *ctx.constants)
        given = (angles[0], angles[1]) if ctx.rotates else None
        return *heads_triton.joined_gradients(grads, mixed, ctx.layout, norm, given), None, None, None
