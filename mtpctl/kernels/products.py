"""Matrix products of the LM head, accumulated in fp32.

On CUDA, half-precision operands use the library's mixed product (half in, fp32 out). CPUs have none, so operands are converted to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
ALIGNED = 8  # elements per row, for fast products


def _mixed(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n, H] x [c, H] -> [n, c] in fp32 (fp64 from fp64)."""
    if _mixed(hidden):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return _wide(hidden) @ _wide(weight).T


def hidden_grad(total: Tensor | None, logit_grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """logit_grad [n, c] x weight [c, H] -> [n, H] in `dtype`, or added to `total`, which is fp32 (fp64)."""
    if not _mixed(weight):
        if total is None:
            return (_wide(logit_grad) @ _wide(weight)).to(dtype)
        return total.addmm_(_wide(logit_grad), _wide(weight))
    logit_grad = logit_grad.to(weight.dtype)
    aligned = logit_grad.shape[1] // ALIGNED * ALIGNED
    if 0 < aligned < logit_grad.shape[1]:  # The library is several times slower if the length is not aligned: split off the rest.
        total = hidden_grad(total, logit_grad[:, :aligned], weight[:aligned], torch.float32)
        logit_grad, weight = logit_grad[:, aligned:], weight[aligned:]
    if total is not None:
        return torch.addmm(total, logit_grad, weight, out_dtype=total.dtype, out=total)
    return torch.mm(logit_grad, weight) if dtype == weight.dtype else torch.mm(logit_grad, weight, out_dtype=dtype)


def weight_grad(logit_grad: Tensor, hidden: Tensor, out: Tensor, add: bool) -> None:
    """Write logit_gradᵀ x hidden to `out` [c, H], or `add` it. logit_grad [n, c], hidden [n, H]; `out` is fp32 or of hidden's dtype."""
    if not _mixed(hidden):
        wide = _wide(logit_grad).T @ _wide(hidden)
        if add and out.dtype == wide.dtype:
            out.add_(wide)
        else:
            out.copy_(out + wide if add else wide)
        return
    logit_grad = logit_grad.to(hidden.dtype)
    if out.dtype == hidden.dtype:
        torch.addmm(out, logit_grad.T, hidden, out=out) if add else torch.mm(logit_grad.T, hidden, out=out)
    elif add:
        torch.addmm(out, logit_grad.T, hidden, out_dtype=out.dtype, out=out)
    else:
        torch.mm(logit_grad.T, hidden, out_dtype=out.dtype, out=out)
