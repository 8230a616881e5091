"""One checksum for both ends of a weight transfer, on CPU and GPU alike.

A tensor's elements are read as integers `w_0 … w_{n-1}` of their own width, and two sums are kept modulo 2^64:
`sum w_i` and `sum (i + 1) w_i` (Fletcher's checksum without its reduction). Changed bits alter the first sum, swapped
elements the second; no byte leaves the device.
"""

from __future__ import annotations

import torch

_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_MASK = (1 << 64) - 1


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """32 hex digits that depend on the tensor's bytes, their order, and its element count.

    Raises ValueError for an element width that is not 1, 2, 4 or 8 bytes.
    """
    if tensor.element_size() not in _WIDTHS:
        raise ValueError(f"no checksum for dtype {tensor.dtype}")
    words = tensor.detach().reshape(-1).view(_WIDTHS[tensor.element_size()])
    plain = weighted = words.numel()
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
        plain += int(chunk.sum())
        weighted += int((chunk * place).sum())
    return f"{plain & _MASK:016x}{weighted & _MASK:016x}"
