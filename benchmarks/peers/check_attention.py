"""Compare the replacement of flash_attn_2_cuda with attention in float64, and time it. Runs on the GPU host, with the bundle in PYTHONPATH.

    python3 benchmarks/peers/check_attention.py

Checks the output and the gradients of packed sequences with grouped-query attention, and flash-attn's cross-entropy. Exit code 1: an error
of attention is more than twice that of PyTorch's attention in bf16, or one of the cross-entropy is 0.01 or larger.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss  # type: ignore[import-not-found]
from torch import Tensor
from torch.nn import functional

LENGTHS = (1, 63, 64, 65, 228, 500, 128)
HEADS, KV_HEADS, WIDTH = 9, 3, 64


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of each sequence separately, in the precision of the arguments."""
    rows = []
    for sample_tensors in zip(*(tensor.split(LENGTHS) for tensor in (q, k, v)), strict=True):
        query, key, value = (part.transpose(0, 1)[None] for part in sample_tensors)
        rows.append(functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(rows)


def results(attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    out.backward(weight.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def main() -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    inputs = [torch.randn(total, heads, WIDTH, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    weight = torch.randn(total, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(q, k, v, ends, ends, max(LENGTHS), max(LENGTHS), causal=True)
        return out

    exact = results(reference, [value.double() for value in inputs], weight)
    failed = False
    for name, packed_result, torch_result, true in zip(
        ["out", "dq", "dk", "dv"], results(packed, inputs, weight), results(reference, inputs, weight), exact, strict=True
    ):
        error, bound = ((value.double() - true).norm().item() / true.norm().item() for value in (packed_result, torch_result))
        failed |= not error <= 2 * bound
        print(f"{name}: relative error {error:.2e}, of scaled_dot_product_attention {bound:.2e}")
    logits = torch.randn(4096, 49152, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(49152, (4096,), device="cuda")
    loss = cross_entropy_loss(logits.clone(), labels)[0]
    error = (loss - functional.cross_entropy(logits.float(), labels, reduction="none")).abs().max().item()
    failed |= not error < 1e-2
    print(f"cross-entropy: largest error {error:.1e}")
    for name, attention in (("packed", packed), ("per sequence", reference)):
        results(attention, inputs, weight)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            results(attention, inputs, weight)
        torch.cuda.synchronize()
        print(f"{name}: {(time.perf_counter() - start) / 20 * 1e3:.2f} ms forward and backward of {total} tokens")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
