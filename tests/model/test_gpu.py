"""Attention on a GPU: flash kernel, alone and joined with later depths, against one softmax in fp32."""

from __future__ import annotations

import pytest
import torch

from mtpctl.model.core_attention import PackedAttention
from mtpctl.model.packing import EarlierDepths, Packing

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, WIDTH = 8, 2, 64
LENGTHS = [700, 33, 1, 290]


def attended(dtype: torch.dtype, later: int) -> list[torch.Tensor]:
    """Output and gradients of queries, first keys and values, and those of later depths; in fp32 without the flash kernel."""
    g = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(tokens, HEADS), *[(tokens, KV_HEADS)] * (2 + 2 * later)]
    leaves = [torch.randn(*shape, WIDTH, generator=g).to(torch.bfloat16).to("cuda", dtype).requires_grad_() for shape in shapes]
    q, k, v, *more = leaves
    keys, values = more[:later], more[later:]
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.cp_group = WIDTH**-0.5, None
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
