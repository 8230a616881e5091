# mypy: disallow-untyped-defs=False
# (what is inside a Triton kernel has no Python types)
"""A Triton kernel that rotates queries or keys; a program takes some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.kernels.triton_backend import on_device_of

ELEMENTS = 2048
"""Pairs that one program rotates, at most."""


@triton.jit
def rotate(
    x_ptr,  # [t, heads, d]
    cos_ptr,  # fp32 [t, n]
    sin_ptr,  # fp32 [t, n]
    out_ptr,  # [t, heads, d], contiguous
    x_token,
    x_head,
    heads,
    width,
    half,
    direction,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + token * half + column, mask=column < half, other=0.0)
    sin = tl.load(sin_ptr + token * half + column, mask=column < half, other=0.0) * direction
    inside = (head < heads) & (column < half)
    source = x_ptr + token * x_token + head * x_head
    place = out_ptr + (token * heads + head) * width
    a = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(place + column, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(place + half + column, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=inside)
    if REST:
        left = 2 * half + tl.arange(0, REST)[None, :]
        beyond = (head < heads) & (left < width)
        tl.store(place + left, tl.load(source + left, mask=beyond, other=0.0), mask=beyond)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x [t, heads, d] rotated by fp32 cos and sin [t, n], or rotated `back`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, width = x.shape
    half = cos.shape[-1]
    columns = triton.next_power_of_2(half)
    group = min(triton.next_power_of_2(heads), max(1, ELEMENTS // columns))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    with on_device_of(x):
        rotate[(tokens, triton.cdiv(heads, group))](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            x.stride(0),
            x.stride(1),
            heads,
            width,
            half,
            -1.0 if back else 1.0,
            HEADS=group,
            HALF=columns,
            REST=triton.next_power_of_2(width - 2 * half) if width > 2 * half else 0,
        )
    return out
