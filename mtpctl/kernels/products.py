"""The three matrix products, each accumulated in fp32 whatever the operands' dtype, on CPU and CUDA.

On CUDA, half operands go to the library's mixed product (half in, fp32 out). On CPU there is none, so operands are widened, a chunk at
a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def _mixed(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n, H] x [c, H] -> [n, c], fp32 (fp64 from fp64)."""
    if _mixed(hidden):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return _wide(hidden) @ _wide(weight).T


def add_hidden_grad(out: Tensor, logit_grad: Tensor, weight: Tensor) -> None:
    """out [n, H] += logit_grad [n, c] x weight [c, H]; `out` is fp32 (fp64)."""
    if _mixed(weight):
        torch.addmm(out, logit_grad.to(weight.dtype), weight, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(_wide(logit_grad), _wide(weight))


def weight_grad(logit_grad: Tensor, hidden: Tensor, out: Tensor | None, add_to: Tensor | None) -> None:
    """logit_grad [n, c] and hidden [n, H] -> [c, H], written to `out` in the weight's dtype, or added to the fp32 `add_to`."""
    if _mixed(hidden):
        logit_grad = logit_grad.to(hidden.dtype)
        if add_to is not None:
            torch.addmm(add_to, logit_grad.T, hidden, out_dtype=add_to.dtype, out=add_to)
        elif out is not None:
            torch.mm(logit_grad.T, hidden, out=out)
        return
    wide = _wide(logit_grad).T @ _wide(hidden)
    if add_to is not None:
        add_to += wide
    elif out is not None:
        out.copy_(wide)
