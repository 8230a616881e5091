"""FlashAttention 2's extension module `flash_attn_2_cuda`, implemented with the FlashAttention 2 kernels that PyTorch ships.

The Python part of the package flash-attn imports this module. The package is only published as source, and compiling it takes hours.
PyTorch contains the same kernels for the forward and the backward pass, including packed sequences. So a peer that trains with
`attn_implementation=flash_attention_2` runs its usual code. Unlike the original extension, the backward pass copies the gradients once.

Not supported, because no peer uses it in training: dropout, ALiBi, soft-capping, KV caches and deterministic gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _window(left: int, right: int) -> dict[str, int | None]:
    return {"window_size_left": None if left < 0 else left, "window_size_right": None if right < 0 else right}


def _check(dropout: float, softcap: float, unsupported: tuple[object, ...]) -> None:
    if dropout or softcap or any(each is not None for each in unsupported):
        raise NotImplementedError("this substitute of flash_attn_2_cuda has no dropout, softcap, ALiBi, paged KV cache or left padding")


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, **options: Any) -> Any:
    causal, scale, window = options["causal"], options["scale"], options["window"]
    out, lse, rng_state, _, mask = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale, **_window(*window)
    )
    return out, lse, mask, rng_state


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: object,
) -> Any:
    """Forward pass. q, k, v: [batch, length, heads, dimension]."""
    _check(dropout, softcap, (out, alibi))
    return _forward(q, k, v, None, None, q.shape[1], k.shape[1], causal=causal, scale=scale, window=(left, right))


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    used_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    scale: float,
    zero_tensors: bool,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    return_softmax: bool,
    generator: object,
) -> Any:
    """Forward pass of packed sequences. q, k, v: [tokens, heads, dimension]; cu_q, cu_k: boundaries of the sequences."""
    _check(dropout, softcap, (out, used_k, leftpad_k, block_table, alibi))
    return _forward(q, k, v, cu_q, cu_k, max_q, max_k, causal=causal, scale=scale, window=(left, right))


def _backward(
    dout: Tensor, tensors: tuple[Tensor, ...], gradients: tuple[Tensor, ...], cu: tuple[Any, Any], lengths: tuple[int, int], **options: Any
) -> Any:
    q, k, v, out, lse = tensors
    unused = torch.empty(0, device=q.device)
    results = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *cu, *lengths, 0.0, options["causal"], options["rng_state"], unused, scale=options["scale"],
        **_window(*options["window"]),
    )  # fmt: skip
    for gradient, result in zip(gradients, results, strict=True):
        gradient.copy_(result)
    return (*gradients, torch.empty_like(lse))


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    alibi: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    generator: object,
    rng_state: Tensor,
) -> Any:
    """Backward pass of `fwd`. Writes dq, dk and dv."""
    _check(dropout, softcap, (alibi,))
    lengths = q.shape[1], k.shape[1]
    options = {"causal": causal, "scale": scale, "window": (left, right), "rng_state": rng_state}
    return _backward(dout, (q, k, v, out, lse), (dq, dk, dv), (None, None), lengths, **options)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    alibi: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    scale: float,
    zero_tensors: bool,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    generator: object,
    rng_state: Tensor,
) -> Any:
    """Backward pass of `varlen_fwd`. Writes dq, dk and dv."""
    _check(dropout, softcap, (alibi,))
    options = {"causal": causal, "scale": scale, "window": (left, right), "rng_state": rng_state}
    return _backward(dout, (q, k, v, out, lse), (dq, dk, dv), (cu_q, cu_k), (max_q, max_k), **options)
