"""Operations of `numerics: bitwise` on CUDA, one by one: does a row depend on the other rows of a call, and what does each cost?

    python benchmarks/bitwise_operations.py
    TRITON_INTERPRET=1 python benchmarks/bitwise_operations.py --device cpu     # toy sizes, without times

Each line has an operation, the calls in which a row's bits differ from those in a large call, and times. `same` means that every row was
equal in every call. Operations of PyTorch and vLLM are measured in the same way for comparison. `--library` only measures PyTorch's matrix
products, without split-K: cuBLASLt without workspace, as in vLLM's batch-invariant mode.

The sizes are those of MiMo-7B, and for experts those of Qwen3-30B-A3B.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from operator import itemgetter

if "--library" in sys.argv:  # read when cuBLAS starts
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import parser
from mtpctl.kernels import activations, exact, exact_experts, invariant
from mtpctl.kernels.invariant import PagedKV, Tile
from mtpctl.kernels.norm import rms_norm_by_row
from mtpctl.kernels.qkv import HeadLayout, split_heads_triton
from mtpctl.kernels.rows import expert_order

Call = Callable[[Tensor], Tensor]
AMPERE_TILES = (Tile(16, 64, 4, 6), Tile(32, 64, 4, 6))
"""Tiles of fewer than 64 rows, which Hopper computes with Ampere's instructions; `TILES` has none."""


class Sizes:
    """MiMo-7B's sizes on a GPU, toy sizes in Triton's interpreter."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.device, self.dtype = torch.device(device), torch.bfloat16 if self.cuda else torch.float16
        self.hidden, self.ffn, self.vocab = (4096, 11008, 151680) if self.cuda else (64, 112, 300)
        self.heads, self.groups, self.width = (32, 8, 128) if self.cuda else (4, 2, 32)
        self.rows = 2048 if self.cuda else 150
        self.counts = (1, 2, 4, 7, 8, 16, 63, 64, 65, 128, 200, 256, 512) if self.cuda else (1, 7, 65, 130)
        self.lengths = (1, 2, 63, 64, 65, 127, 128, 129, 200, 517, 1000, 1537) if self.cuda else (1, 64, 65, 83)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=self.device, generator=self.generator)).to(self.dtype)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each linear layer."""
        mixed = (self.heads + 2 * self.groups) * self.width
        return {
            "qkv": (mixed, self.hidden),
            "attention output": (self.hidden, self.heads * self.width),
            "gate and up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


def print_result(name: str, *parts: str) -> None:
    print(f"  {name:46} " + " | ".join(parts), flush=True)


def run_section(title: str, run: Callable[[Sizes], None], sizes: Sizes) -> None:
    """Run one section. A failure is printed, and the next section runs."""
    print(f"\n{title}", flush=True)
    try:
        run(sizes)
    except Exception as error:
        print(f"  FAILED: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}", flush=True)
        traceback.print_exc()


def describe_row_dependence(call: Call, x: Tensor, counts: tuple[int, ...]) -> str:
    """The numbers of rows for which a call on consecutive rows of x differs from the call on all of x."""
    full_result, differing_counts = call(x), []
    for count in counts:
        starts = {0, min(5, len(x) - count), len(x) - count}
        num_wrong = sum(
            int((call(x[start : start + count]) != full_result[start : start + count]).flatten(1).any(1).sum()) for start in starts
        )
        if num_wrong:
            differing_counts.append(f"{count} ({num_wrong} of {count * len(starts)})")
    return "same" if not differing_counts else "DIFFERS at rows: " + ", ".join(differing_counts)


def describe_equality(a: Tensor, b: Tensor) -> str:
    if torch.equal(a, b):
        return "equal"
    error = (a.double() - b.double()).abs()
    return f"{float((error > 0).double().mean()):.1%} of elements differ, by {float(error.max()):.1e} at most"


def median_ms(run: Callable[[], object], sizes: Sizes) -> float:
    """Median time of a call on an idle GPU; 0 in the interpreter."""
    if not sizes.cuda:
        return 0.0
    for _ in range(3):
        run()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 3)
    return sorted(times)[len(times) // 2]


def compare_times(own_run: Callable[[], object], usual_run: Callable[[], object], sizes: Sizes) -> str:
    own_ms, usual_ms = median_ms(own_run, sizes), median_ms(usual_run, sizes)
    return f"{own_ms:.3f} ms, usual {usual_ms:.3f} ms" + (f", ratio {usual_ms / own_ms:.2f}" if own_ms else "")


# ---------------------------------------------------------------------------------------------------------------- parts


def compare_products(sizes: Sizes) -> None:
    for name, (outputs, inputs) in sizes.linears.items():
        x, weight = sizes.random(sizes.rows, inputs), sizes.random(outputs, inputs, scale=inputs**-0.5)
        print_result(f"{name}, bitwise", describe_row_dependence(partial(invariant.linear, weight=weight), x, sizes.counts))
        print_result(f"{name}, cuBLAS", describe_row_dependence(partial(F.linear, weight=weight), x, sizes.counts))
        print_result(f"{name}, bitwise against cuBLAS", describe_equality(invariant.linear(x, weight), F.linear(x, weight)))
        for rows in (64, 256, sizes.rows) if sizes.cuda else ():
            part = x[:rows]
            print_result(
                f"{name}, time of {rows} rows",
                compare_times(partial(invariant.linear, part, weight), partial(F.linear, part, weight), sizes),
            )


def compare_head(sizes: Sizes) -> None:
    x, weight = sizes.random(sizes.rows, sizes.hidden), sizes.random(sizes.vocab, sizes.hidden, scale=0.05)
    print_result("logits, bitwise", describe_row_dependence(lambda rows: invariant.logits(rows, weight), x, sizes.counts))
    logits = invariant.logits(x, weight)
    print_result("log-prob, bitwise", describe_row_dependence(invariant.log_softmax, logits, sizes.counts))
    padded = F.pad(logits, (0, 37))[:, : sizes.vocab]
    print_result(
        "log-prob, padded against contiguous rows", describe_equality(invariant.log_softmax(padded), invariant.log_softmax(logits))
    )
    print_result("log-prob, torch.log_softmax", describe_row_dependence(lambda rows: rows.log_softmax(-1), logits, sizes.counts))
    tokens = torch.zeros(len(logits), 1, dtype=torch.long, device=sizes.device)
    print_result(
        f"log-prob, time of {len(logits)} rows",
        compare_times(lambda: invariant.token_logprobs(logits, tokens), lambda: logits.log_softmax(-1).gather(1, tokens), sizes),
    )
    for rows in (64, 256, sizes.rows) if sizes.cuda else ():
        part = x[:rows]
        print_result(
            f"logits, time of {rows} rows", compare_times(partial(invariant.logits, part, weight), partial(F.linear, part, weight), sizes)
        )


def compare_tiles(sizes: Sizes) -> None:
    outputs, inputs = sizes.linears["down"]
    x, weight = sizes.random(sizes.rows, inputs), sizes.random(outputs, inputs, scale=inputs**-0.5)
    reference = invariant.linear(x, weight, torch.float32, invariant.TILES[-1])
    for tile in (*invariant.TILES, *AMPERE_TILES):
        print_result(
            f"{tile.rows} x {tile.columns}, against the largest tile",
            describe_equality(invariant.linear(x, weight, torch.float32, tile), reference),
        )
    for name, (outputs, inputs) in sizes.linears.items() if sizes.cuda else ():
        x, weight = sizes.random(sizes.rows, inputs), sizes.random(outputs, inputs)
        for rows in (64, 256, sizes.rows):
            times = {
                f"{tile.rows}x{tile.columns}": median_ms(partial(invariant.linear, x[:rows], weight, tile=tile), sizes)
                for tile in (*invariant.TILES, *(AMPERE_TILES if rows == 64 else ()))
            }
            selected_tile = invariant.tile_for(rows, outputs, invariant._multiprocessors(sizes.device))
            fastest = min(times, key=times.__getitem__)
            ranked = ", ".join(f"{tile_name} {tile_ms:.3f}" for tile_name, tile_ms in sorted(times.items(), key=itemgetter(1)))
            print_result(f"{name}, {rows} rows", f"best {fastest}, chosen {selected_tile.rows}x{selected_tile.columns}", f"ms: {ranked}")


def compare_elementwise(sizes: Sizes) -> None:
    x, weight = sizes.random(sizes.rows, sizes.hidden), 1 + sizes.random(sizes.hidden, scale=0.2)
    print_result("norm, bitwise", describe_row_dependence(lambda rows: invariant.rms_norm(rows, weight, 1e-5), x, sizes.counts))
    print_result("norm, engine against trainer", describe_equality(invariant.rms_norm(x, weight, 1e-5), rms_norm_by_row(x, weight, 1e-5)))
    usual = F.rms_norm(x, (sizes.hidden,), weight, 1e-5)
    print_result("norm, bitwise against PyTorch", describe_equality(invariant.rms_norm(x, weight, 1e-5), usual))
    print_result(
        f"norm, time of {sizes.rows} rows",
        compare_times(lambda: invariant.rms_norm(x, weight, 1e-5), lambda: F.rms_norm(x, (sizes.hidden,), weight, 1e-5), sizes),
    )
    gate_up = sizes.random(sizes.rows, 2 * sizes.ffn)
    print_result("SwiGLU, bitwise", describe_row_dependence(invariant.swiglu, gate_up, sizes.counts))
    if sizes.cuda:
        print_result("SwiGLU, engine against trainer", describe_equality(invariant.swiglu(gate_up), activations.swiglu(gate_up)))
    layout = HeadLayout(sizes.groups, sizes.heads // sizes.groups, sizes.width)
    mixed = sizes.random(sizes.rows, sizes.groups * sum(layout.sizes))
    positions = torch.randint(0, 4000, (sizes.rows,), device=sizes.device, generator=sizes.generator)
    angles = torch.rand(4000, sizes.width // 2, device=sizes.device, generator=sizes.generator) * 6
    cos, sin = angles.cos(), angles.sin()
    turns = torch.arange(32768.0)[:, None] * torch.tensor([1.0, 0.37, 1e-3])
    tables = exact.cos_sin(turns.to(sizes.device)), exact.cos_sin(turns)
    print_result("cosines and sines, trainer against engine", *(describe_equality(a.cpu(), b) for a, b in zip(*tables, strict=True)))
    grouped = mixed.unflatten(1, (sizes.groups, -1, sizes.width))
    packed = torch.cat([grouped[:, :, :-2].flatten(1), grouped[:, :, -2].flatten(1), grouped[:, :, -1].flatten(1)], 1)  # as in vLLM
    queries = packed[:, : sizes.heads * sizes.width].unflatten(1, (-1, sizes.width))
    trainers = split_heads_triton(mixed, layout, None, (cos[positions], sin[positions]))[0]
    print_result("rotation, engine against trainer", describe_equality(invariant.rotate(queries, positions, cos, sin), trainers))


def compare_attention(sizes: Sizes) -> None:
    scale, mixed_heads = sizes.width**-0.5, sizes.heads + 2 * sizes.groups
    wholes = [sizes.random(length, mixed_heads, sizes.width) for length in sizes.lengths]
    single_results = []
    for whole in wholes:
        query, key, value = (part.contiguous() for part in whole.split([sizes.heads, sizes.groups, sizes.groups], 1))
        starts = torch.tensor([0, len(whole)], dtype=torch.int32, device=sizes.device)
        single_results.append(invariant.attention(query, key, value, starts, len(whole), scale, lse=True)[0])
    concatenated = torch.cat(wholes)
    starts = torch.tensor([0, *sizes.lengths], device=sizes.device).cumsum(0).int()
    query, key, value = (part.contiguous() for part in concatenated.split([sizes.heads, sizes.groups, sizes.groups], 1))
    packed, _ = invariant.attention(query, key, value, starts, max(sizes.lengths), scale, lse=True)
    print_result("packed samples against single samples", describe_equality(packed, torch.cat(single_results)))
    pages = make_paged_cache(sizes, wholes)
    for count in (1, 2, 3, 4, 16, max(sizes.lengths)):
        counts = [min(count, length) for length in sizes.lengths]
        ends = torch.tensor([0, *counts], device=sizes.device).cumsum(0).int()
        queries = torch.cat([whole[len(whole) - n :, : sizes.heads] for whole, n in zip(wholes, counts, strict=True)])
        out = torch.empty_like(queries)
        invariant.paged_attention(queries, pages, ends, max(counts), scale, out)
        expected = torch.cat([rows[len(rows) - n :] for rows, n in zip(single_results, counts, strict=True)])
        print_result(f"engine, {count} queries a request, against trainer", describe_equality(out, expected))
    if sizes.cuda:
        compare_flash(sizes, query, key, value, starts)


def make_paged_cache(sizes: Sizes, wholes: list[Tensor], size: int = 16) -> PagedKV:
    """The keys and values of these requests in a cache whose free slots are NaN, with pages in random order."""
    num_pages = [-(-len(whole) // size) for whole in wholes]
    order = (torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    cache = torch.full((sum(num_pages) + 1, sizes.groups, size, 2 * sizes.width), float("nan"), dtype=sizes.dtype, device=sizes.device)
    table = torch.zeros(len(wholes), max(num_pages), dtype=torch.int32)
    for request, whole in enumerate(wholes):
        keys_and_values = torch.cat(whole[:, sizes.heads :].split(sizes.groups, 1), -1)
        for page in range(num_pages[request]):
            table[request, page] = slot = order.pop()
            rows = keys_and_values[page * size : (page + 1) * size]
            cache[slot, :, : len(rows)] = rows.transpose(0, 1)
    lengths = torch.tensor([len(whole) for whole in wholes], dtype=torch.int32, device=sizes.device)
    return PagedKV(cache[..., : sizes.width], cache[..., sizes.width :], table.to(sizes.device), lengths)


def compare_flash(sizes: Sizes, query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> None:
    """Output and gradients against PyTorch's flash kernel, and times of a pass and of a decode step."""
    from mtpctl.model.core_attention import flash_arguments, flash_attention, invariant_attention
    from mtpctl.model.packing import Packing

    class Starts:
        cu_seqlens_q = cu_seqlens_kv = starts
        max_seqlen_q = max_seqlen_kv = int(starts.diff().max())

    packing: Packing = Starts()  # type: ignore[assignment]
    scale, grad = sizes.width**-0.5, torch.randn_like(query)
    results = []

    def flash(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
        return flash_attention(q, k, v, flash_arguments(packing), scale)[0]

    for run in (invariant_attention, flash):
        q, k, v = (x.detach().clone().requires_grad_() for x in (query, key, value))
        out = run(q, k, v, packing, scale)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
    for name, own_result, flash_result in zip(("output", "query", "key", "value"), *results, strict=True):
        error = float((own_result.double() - flash_result.double()).norm() / flash_result.double().norm())
        print_result("relative difference from flash: " + ("output" if name == "output" else f"gradient of {name}"), f"{error:.1e}")
    with torch.no_grad():
        print_result(
            f"time of {len(query)} packed tokens",
            compare_times(
                lambda: invariant_attention(query, key, value, packing, scale),
                lambda: flash_attention(query, key, value, flash_arguments(packing), scale),
                sizes,
            ),
        )
    pages = make_paged_cache(sizes, [sizes.random(1000, sizes.heads + 2 * sizes.groups, sizes.width)] * 64)
    for count in (1, 2, 4):
        queries, ends = sizes.random(64 * count, sizes.heads, sizes.width), torch.arange(65, device=sizes.device).int() * count
        run_ours = partial(invariant.paged_attention, queries, pages, ends, count, scale, torch.empty_like(queries))
        print_result(
            f"time of 64 requests, 1000 keys, {count} queries",
            f"{median_ms(run_ours, sizes):.3f} ms",
            *time_flash_3(sizes, queries, pages, ends, count),
        )


def time_flash_3(sizes: Sizes, queries: Tensor, pages: PagedKV, ends: Tensor, count: int) -> list[str]:
    """Times of vLLM's kernel with any number of splits, and with one."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError as error:
        return [f"vLLM's FlashAttention is not available: {error}"]
    keys, values = (x.transpose(1, 2) for x in pages[:2])
    run = partial(
        flash_attn_varlen_func, queries, keys, values, max_seqlen_q=count, cu_seqlens_q=ends, max_seqlen_k=1000,
        block_table=pages.block_table, seqused_k=pages.lengths, causal=True, fa_version=3,
    )  # fmt: skip
    return [f"FlashAttention 3, {splits} splits: {median_ms(partial(run, num_splits=splits), sizes):.3f} ms" for splits in (0, 1)]


def compare_experts(sizes: Sizes) -> None:
    """Qwen3-30B-A3B's sizes. A call's rows are tokens; each has several experts."""
    count, k, hidden, width = (128, 8, 2048, 768) if sizes.cuda else (6, 2, 64, 48)
    x, router = sizes.random(sizes.rows, hidden), sizes.random(count, hidden, scale=hidden**-0.5)
    gate_up = sizes.random(count, 2 * width, hidden, scale=hidden**-0.5)
    down = sizes.random(count, hidden, width, scale=width**-0.5)
    logits = invariant.logits(x, router)
    chosen = exact_experts.top_experts(logits, k)
    routes = exact_experts.route_mask(chosen, count)
    order = expert_order(routes, k, 1)
    ends, rows = order.ends, x.index_select(0, order.token_of)
    product = exact_experts.grouped_linear_triton(rows, ends, gate_up, reverse=True)
    parts = zip(rows.tensor_split(ends[:-1].cpu().long()), gate_up.flip(0), strict=True)
    print_result(
        "experts, grouped against separate products", describe_equality(product, torch.cat([invariant.linear(*part) for part in parts]))
    )
    print_result("router logits, bitwise", describe_row_dependence(partial(invariant.logits, weight=router), x, sizes.counts))
    print_result(
        "probs against softmax",
        describe_equality(exact_experts.chosen_probs_triton(logits, routes, over_all=True), logits.softmax(-1) * routes),
    )

    def run(states: Tensor) -> Tensor:
        own = invariant.logits(states, router)
        return exact_experts.run_experts(states, own, exact_experts.top_experts(own, k), gate_up, down, over_all=False)

    if not sizes.cuda:  # the interpreter runs single kernels only
        return
    print_result("mixture of experts, bitwise", describe_row_dependence(run, x, sizes.counts))
    for tokens in (64, 256, sizes.rows):
        part = order if tokens == sizes.rows else expert_order(routes[:tokens].contiguous(), k, 1)
        selected_rows, bounds = x[:tokens].index_select(0, part.token_of), part.ends
        ours = partial(exact_experts.grouped_linear, selected_rows, bounds, gate_up, reverse=True)
        print_result(
            f"experts, time of {tokens} tokens", compare_times(ours, partial(F.grouped_mm, selected_rows, gate_up.mT, offs=bounds), sizes)
        )


def compare_library(sizes: Sizes) -> None:
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for name, (outputs, inputs) in sizes.linears.items():
        x, weight = sizes.random(sizes.rows, inputs), sizes.random(outputs, inputs, scale=inputs**-0.5)
        print_result(f"{name}, cuBLASLt", describe_row_dependence(partial(F.linear, weight=weight), x, sizes.counts))
        print_result(f"{name}, against bitwise", describe_equality(F.linear(x, weight), invariant.linear(x, weight)))
        times = [f"{rows} rows {median_ms(partial(F.linear, x[:rows], weight), sizes):.3f} ms" for rows in (64, 256, sizes.rows)]
        print_result(f"{name}, time", *times)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--library", action="store_true", help="only PyTorch's products, without split-K")
    options = arguments.parse_args()
    sizes = Sizes(options.device)
    began = time.monotonic()
    if options.library:
        run_section("cuBLASLt without workspace", compare_library, sizes)
    else:
        sections = (
            ("Attention", compare_attention),
            ("Products", compare_products),
            ("LM head and log-prob", compare_head),
            ("Norm, activation, rotation", compare_elementwise),
            ("Tiles of products", compare_tiles),
            ("Experts", compare_experts),
        )
        for title, run in sections:
            run_section(title, run, sizes)
    print(f"\n{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
