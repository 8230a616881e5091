"""Forward and backward of a mixture of experts at a published shape, against transformers with its grouped experts; on a GPU.

    python benchmarks/moe_step.py Qwen/Qwen3-30B-A3B --layers 6 --profile step.json
    python benchmarks/moe_step.py Qwen/Qwen3.5-35B-A3B --layers 8 --no-peer
    python benchmarks/moe_step.py XiaomiMiMo/MiMo-V2-Flash --layers 6 --experts 32 --no-peer

Weights are random, bf16; 8 samples fill the tokens. Both compute the loss of every token. transformers materialises all logits and
accumulates gradients in bf16. `--experts` reduces the number of experts, for example to those of one rank; a token still goes to as many.
`--profile` writes a trace of two steps for chrome://tracing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness import parser, print_environment
from mtpctl.bench.report import format_spread
from mtpctl.bench.train_step import create_config_folder, load_named_config, make_samples, measure_matmul_tflops, truncate_layers
from mtpctl.families.reading import EXPERT_COUNTS
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer.batch import update_flops
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken

WARMUP, STEPS = 4, 12
SAMPLES = 8


def time_steps(step: Callable[[], object]) -> list[float]:
    """Time steps after a warm-up. Returns milliseconds."""
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARMUP + STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return times[WARMUP:]


def time_mtpctl(config: dict[str, Any], tokens: int, trace: Path | None) -> tuple[list[float], float]:
    """Milliseconds of mtpctl's steps, and the number of floating-point operations of a step."""
    settings = EngineConfig(
        parallel=ParallelConfig(),
        precision="bf16",
        mtp=MtpConfig(mode="off"),
        kernels=KernelsConfig(),
        tokens_per_microbatch=tokens,
        recompute="none",
        random_seed=0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = create_config_folder(config, Path(scratch))
        engine = MegatronEngine(folder, settings)
    batch = make_samples(folder.shape.vocab, tokens, SAMPLES, 0.02)
    times = time_steps(lambda: engine.forward_backward(batch, NextToken()))
    if trace is not None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(2):
                engine.forward_backward(batch, NextToken())
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
    engine.close()
    return times, update_flops(folder.shape, batch, 0, isolated=False)


def time_transformers(config: dict[str, Any], tokens: int) -> list[float]:
    """Milliseconds of transformers' steps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.for_model(config["model_type"], **{name: value for name, value in config.items() if name != "model_type"})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.set_experts_implementation("grouped_mm")
    model.train()
    ids = torch.randint(model_config.vocab_size, (SAMPLES, tokens // SAMPLES), device="cuda")
    return time_steps(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model")
    arguments.add_argument("--layers", type=int, required=True)
    arguments.add_argument("--experts", type=int, help="number of routed experts, if not the model's")
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--peer", action=BooleanOptionalAction, default=True, help="measure transformers as well")
    arguments.add_argument("--profile", type=Path, metavar="FILE")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        arguments.error("needs a GPU")
    torch.set_num_threads(1)  # As Ray sets it for trainers: small host operations are slower with more threads.
    config = truncate_layers(load_named_config(options.model), options.layers)
    if options.experts:
        config |= {key: options.experts for key in EXPERT_COUNTS if key in config}
    rate = measure_matmul_tflops(torch.device("cuda"), 8192)
    print_environment()
    print(f"Large bf16 matrix product: {rate:.0f} TFLOP/s.\n")
    print("| step | ms (least–most) | tokens/s | of matmul rate | peak GiB |\n|---|---|---|---|---|")

    def print_row(name: str, times: list[float]) -> None:
        median, peak = statistics.median(times), torch.cuda.max_memory_allocated() / GIB
        tokens_per_s, share = 1000 * options.tokens / median, flops / median / 1e9 / rate
        print(f"| {name} | {format_spread(times, '.1f')} | {tokens_per_s:.0f} | {share:.1%} | {peak:.1f} |", flush=True)

    times, flops = time_mtpctl(config, options.tokens, options.profile)
    print_row("mtpctl", times)
    torch.cuda.empty_cache()
    if options.peer:
        print_row("transformers, grouped_mm", time_transformers(config, options.tokens))


if __name__ == "__main__":
    main()
