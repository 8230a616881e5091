"""Attention on a GPU: the flash kernel, with and without later depths and sinks, against one softmax in fp32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mtpctl.model.core_attention import PackedAttention
from mtpctl.model.packing import EarlierDepths, Packing

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, WIDTH = 8, 2, 64
LENGTHS = [700, 33, 1, 290]


def attended(
    dtype: torch.dtype, later: int, window: int | None = None, *, sinks: bool = False, values_width: int = WIDTH
) -> list[torch.Tensor]:
    """Output and gradients of queries, first keys and values, those of later depths, and sinks; in fp32 without the flash kernel."""
    g = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(tokens, HEADS), *[(tokens, KV_HEADS)] * (2 + 2 * later)]
    widths = [WIDTH, WIDTH, values_width, *[WIDTH] * later, *[values_width] * later]
    drawn = [torch.randn(*shape, width, generator=g) for shape, width in zip(shapes, widths, strict=True)]
    drawn += [torch.randn(HEADS, generator=g)] if sinks else []
    leaves = [x.to(torch.bfloat16).to("cuda", dtype).requires_grad_() for x in drawn]
    q, k, v, *more = leaves
    keys, values = more[:later], more[later : 2 * later]
    module = PackedAttention(SimpleNamespace(context_parallel_size=1), softmax_scale=WIDTH**-0.5, window=window)  # type: ignore[arg-type]
    if sinks:
        del module.softmax_offset
        module.softmax_offset = more[-1]  # type: ignore[assignment]
    packing = Packing.of(LENGTHS, "cuda")
    if later:
        packing = packing.at_depth(packing.position_ids + later, None, EarlierDepths([k, *keys[:-1]], [v, *values[:-1]]))
    out = module(q, [k, *keys][-1], [v, *values][-1], None, packed_seq_params=packing)
    weights = torch.randn(out.shape, generator=g).to("cuda", dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("later", [0, 1, 2])
def test_flash_attention_with_later_depths_matches_one_softmax(later: int) -> None:
    for half, exact in zip(attended(torch.bfloat16, later), attended(torch.float32, later), strict=True):
        assert (half.float() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("later", [0, 2])
@pytest.mark.parametrize("window", [None, 127, 128, 129])
def test_windows_and_sinks_of_the_flash_kernel_match_one_softmax(later: int, window: int | None) -> None:
    """Values are narrower than keys, as in MiMo-V2-Flash. The kernel agrees with its own window and with no other."""
    half = attended(torch.bfloat16, later, window, sinks=True, values_width=40)
    for mine, exact in zip(half, attended(torch.float32, later, window, sinks=True, values_width=40), strict=True):
        assert (mine.float() - exact).norm() <= 0.02 * exact.norm()
    if window is not None:
        other = attended(torch.float32, later, window + 1, sinks=True, values_width=40)[0]
        assert (half[0].float() - other).norm() > 0.02 * other.norm()
