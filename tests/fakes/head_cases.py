"""Layouts of attention heads, and their results by the formulas in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.kernels.qkv import HeadLayout, HeadNorm

EPS = 1e-5


@dataclass(frozen=True)
class HeadCase:
    """`half`: half of the rotated dimensions; 0 rotates none. `value_width`: of values; 0: `width`."""

    groups: int
    queries: int
    width: int
    gated: bool = False
    normed: bool = True
    half: int = 4
    offset: float = 0.0
    tokens: int = 11
    value_width: int = 0

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(self.groups, self.queries, self.width, self.gated, self.value_width)

    def drawn(
        self, dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[Tensor, HeadLayout, HeadNorm | None, tuple[Tensor, Tensor] | None, list[Tensor]]:
        """Arguments of `split_heads`, and gradients of its results."""
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        layout, many = self.layout, self.groups * self.queries
        mixed = numbers(self.tokens, self.groups * sum(layout.sizes))
        weights = numbers(self.width), numbers(self.width)
        turn = torch.randn(self.tokens, self.half, generator=generator).to(device) * 10
        counts = (many, self.groups, self.groups, many if self.gated else 0)
        widths = (self.width, self.width, layout.sizes[-1], self.width)
        grads = [numbers(self.tokens, count, width) for count, width in zip(counts, widths, strict=True)]
        norm = HeadNorm(*weights, EPS, self.offset) if self.normed else None
        return mixed, layout, norm, (turn.cos(), turn.sin()) if self.half else None, grads

    def by_formula(self, dtype: torch.dtype = torch.float16) -> list[Tensor | None]:
        """Queries, keys, values, gates, and the gradients of mixed and of both norm weights, for inputs drawn in `dtype`."""
        mixed, layout, norm, angles, grads = self.drawn(dtype)
        leaf = mixed.double().requires_grad_()
        weights = [] if norm is None else [weight.double().requires_grad_() for weight in norm[:2]]
        grouped = leaf.view(self.tokens, self.groups, -1)
        columns = [layout.queries * self.width, layout.queries * self.width if self.gated else 0, self.width, layout.sizes[-1]]
        queries, gates, keys, values = grouped.split(columns, dim=2)
        actual = []
        for place, part in enumerate((queries, keys)):
            x = part.reshape(self.tokens, -1, self.width)
            if weights:
                x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (weights[place] + self.offset)
            if angles is not None:
                turn = torch.complex(*(angle.double() for angle in angles))[:, None]
                turned = torch.complex(x[..., : self.half], x[..., self.half : 2 * self.half]) * turn
                x = torch.cat([turned.real, turned.imag, x[..., 2 * self.half :]], dim=-1)
            actual.append(x)
        out = [*actual, values, gates.reshape(self.tokens, -1, self.width)]
        of_leaves = torch.autograd.grad(out, [leaf, *weights], [grad.double() for grad in grads])
        return [*out, *of_leaves, *([None, None] if norm is None else [])]

    def assert_close(self, actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], bound: float) -> None:
        for tensor, exact in zip(actual, expected, strict=True):
            if tensor is None or exact is None:
                assert tensor is exact
                continue
            assert tensor.shape == exact.shape
            assert (tensor.cpu().double() - exact).norm() <= bound * exact.norm()


HEAD_CASES = [
    HeadCase(2, 3, 16),
    HeadCase(1, 4, 24, half=5, gated=True, offset=1.0),
    HeadCase(3, 1, 8, normed=False),
    HeadCase(2, 2, 8, half=0),
    HeadCase(1, 1, 16, half=8, normed=False, gated=True),
    HeadCase(2, 3, 24, half=5, normed=False, value_width=10),
    HeadCase(1, 2, 16, gated=True, value_width=8),
]
