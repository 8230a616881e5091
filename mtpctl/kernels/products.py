"""The three matrix products, each accumulated in fp32 whatever the operands' dtype, on CPU and CUDA.

On CUDA, half operands go to the library's mixed product (half in, fp32 out). On CPU there is none, so operands are widened, a chunk at
a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
ALIGNED = 8  # elements


def _mixed(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n, H] x [c, H] -> [n, c], fp32 (fp64 from fp64)."""
    if _mixed(hidden):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return _wide(hidden) @ _wide(weight).T


def hidden_grad(so_far: Tensor | None, logit_grad: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """logit_grad [n, c] x weight [c, H] -> [n, H] in `dtype`, or added to `so_far`, which is fp32 (fp64)."""
    if not _mixed(weight):
        if so_far is None:
            return (_wide(logit_grad) @ _wide(weight)).to(dtype)
        return so_far.addmm_(_wide(logit_grad), _wide(weight))
    logit_grad = logit_grad.to(weight.dtype)
    whole = logit_grad.shape[1] // ALIGNED * ALIGNED
    if 0 < whole < logit_grad.shape[1]:  # the library is several times slower at a length that is not aligned; so only the rest is not
        so_far = hidden_grad(so_far, logit_grad[:, :whole], weight[:whole], torch.float32)
        logit_grad, weight = logit_grad[:, whole:], weight[whole:]
    if so_far is not None:
        return torch.addmm(so_far, logit_grad, weight, out_dtype=so_far.dtype, out=so_far)
    return torch.mm(logit_grad, weight) if dtype == weight.dtype else torch.mm(logit_grad, weight, out_dtype=dtype)


def weight_grad(logit_grad: Tensor, hidden: Tensor, out: Tensor, add: bool) -> None:
    """logit_grad [n, c] and hidden [n, H] -> out [c, H], written or added, in the dtype of `out` (the operands' or fp32)."""
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
