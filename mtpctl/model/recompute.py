"""Recomputing the inputs of matrix products in the backward pass, where elementwise work makes them.

A linear layer keeps its input for its weight's gradient. Where that input is a norm's output or the product of SwiGLU, autograd keeps the
norm's or product's own inputs as well, and one of the two is enough: the elementwise work is repeated in the backward pass, at the speed
of memory. No matrix product or attention is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def recomputed(value: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Operations inside the block that would save `value` for their backward pass save nothing, and call `compute` in the backward pass.

    `compute` has to give the same numbers again. It runs without gradients, once for each operation that saved `value`.
    """
    place, count = value.data_ptr(), value.numel()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        whole = saved.data_ptr() == place and saved.numel() == count and saved.is_contiguous()
        return saved.shape if whole else saved

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return compute().view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
