"""Time causal attention alone: torch's FlashAttention 2, forward and backward, for one long sample and for short ones of as many tokens.

It is subtracted from the steps of `mtpctl bench train-step`, which compute the forward pass twice with `--recompute full`. Needs a GPU.

    python benchmarks/attention_alone.py --layers 6 --gpus 2
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from harness import parser, print_environment

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
"""Of MiMo-7B."""


def time_of(run: Callable[[], object], rounds: int = 3) -> float:
    """Median seconds of `run` on the GPU, after one call for warm-up."""
    run()
    seconds = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


@torch.no_grad()
def measure(count: int, length: int, *, layers: int, gpus: int) -> None:
    """Print a row for `count` samples of `length` tokens."""
    q = torch.randn(count * length, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(count * length, KEY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ends = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    packing, scale = (ends, ends, length, length, 0.0, True), HEAD_DIM**-0.5
    forward = torch.ops.aten._flash_attention_forward.default
    out, lse, seed, offset, _ = forward(q, k, v, *packing, False, scale=scale)
    grad = torch.randn_like(out)
    forward_s = time_of(lambda: forward(q, k, v, *packing, False, scale=scale))
    backward_s = time_of(
        lambda: torch.ops.aten._flash_attention_backward.default(grad, q, k, v, out, lse, *packing, seed, offset, scale=scale)
    )
    flops = 2 * count * length**2 * HEADS * HEAD_DIM  # two products, of which causal masking needs half
    step_s = layers * (2 * forward_s + backward_s) / gpus
    print(
        f"| {count} of {length:,} tokens | {forward_s:.4f} s ({flops / forward_s / 1e12:.0f} TFLOP/s) "
        f"| {backward_s:.4f} s ({2.5 * flops / backward_s / 1e12:.0f} TFLOP/s) | {step_s:.3f} s |",
        flush=True,
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=131072)
    options.add_argument("--short", type=int, default=8192, help="tokens of a short sample")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--gpus", type=int, default=2, help="GPUs that share the attention of a step")
    arguments = options.parse_args()
    print_environment()
    print(f"| samples | forward | backward | {arguments.layers} layers, {arguments.gpus} GPU(s), two forward passes |\n|---|---|---|---|")
    for length in (arguments.short, arguments.tokens):
        measure(arguments.tokens // length, length, layers=arguments.layers, gpus=arguments.gpus)


if __name__ == "__main__":
    main()
