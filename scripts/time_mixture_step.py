"""Time forward and backward of a mixture of experts at a published shape, beside transformers with its grouped experts.

    python scripts/time_mixture_step.py Qwen/Qwen3-30B-A3B --layers 6 --profile step.json
    python scripts/time_mixture_step.py Qwen/Qwen3.5-35B-A3B --layers 8 --no-peer

Weights are random, bf16; 8 samples fill the tokens. Both compute the loss of every token; transformers materialises all logits, and adds
gradients up in bf16. `--profile` writes a trace of two of our steps, which chrome://tracing shows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from mtpctl.cli.bench_update import measured_config

WARM, STEPS = 4, 12
SAMPLES = 8


def timed(name: str, step: Callable[[], object], tokens: int, flops: float, rate: float) -> None:
    """Print the median, least and most ms of a step, its share of the matrix-product rate (TFLOP/s), and the most memory that was held."""
    took = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM + STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took.append(1000 * (time.perf_counter() - began))
    took = took[WARM:]
    middle = statistics.median(took)
    print(
        f"| {name} | {middle:.1f} ({min(took):.1f}–{max(took):.1f}) | {1000 * tokens / middle:.0f} | {flops / middle / 1e9 / rate:.1%} "
        f"| {torch.cuda.max_memory_allocated() / 2**30:.1f} |",
        flush=True,
    )


def ours(config: dict[str, Any], tokens: int, rate: float, trace: Path | None) -> float:
    """Time this package's step. Returns its operations."""
    from mtpctl.bench.train_step import samples, shape_folder
    from mtpctl.recipe.model import MtpConfig
    from mtpctl.recipe.parallel import ParallelConfig
    from mtpctl.recipe.schema import KernelsConfig
    from mtpctl.trainer.batch import update_flops
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine
    from mtpctl.trainer.objective import NextToken

    with tempfile.TemporaryDirectory() as scratch:
        folder = shape_folder(config, Path(scratch))
        settings = EngineConfig(
            parallel=ParallelConfig(),
            precision="bf16",
            mtp=MtpConfig(mode="off"),
            kernels=KernelsConfig(),
            tokens_per_microbatch=tokens,
            recompute="none",
            random_seed=0,
        )
        engine = MegatronEngine(folder, settings)
        batch = samples(folder.shape.vocab, tokens, SAMPLES, 0.02)
        flops = update_flops(folder.shape, batch, 0, isolated=False)

        def step() -> object:
            return engine.forward_backward(batch, NextToken())

        timed("mtpctl", step, tokens, flops, rate)
        if trace is not None:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                step()
                step()
                torch.cuda.synchronize()
            profiled.export_chrome_trace(str(trace))
        engine.close()
    return flops


def peer(config: dict[str, Any], tokens: int, flops: float, rate: float) -> None:
    """Time transformers' step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(config["model_type"], **{name: value for name, value in config.items() if name != "model_type"})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.set_experts_implementation("grouped_mm")
    model.train()
    drawn = np.random.default_rng(0).integers(0, made.vocab_size, (SAMPLES, tokens // SAMPLES))
    ids = torch.from_numpy(drawn).cuda()
    timed("transformers, grouped_mm", lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward(), tokens, flops, rate)


def main(
    model: str,
    layers: Annotated[int, typer.Option(min=1)],
    tokens: Annotated[int, typer.Option(min=64)] = 8192,
    with_peer: Annotated[bool, typer.Option("--peer/--no-peer")] = True,
    trace: Annotated[Path | None, typer.Option("--profile")] = None,
) -> None:
    config = measured_config(model)
    from mtpctl.bench.train_step import matmul_tflops, with_layers

    torch.set_num_threads(1)  # as Ray has it in a trainer's actor: waking more takes longer than the host's small operations
    config = with_layers(config, layers)
    rate = matmul_tflops(torch.device("cuda"), 8192)
    print(f"Large bf16 matrix product: {rate:.0f} TFLOP/s.\n")
    print("| step | ms (least–most) | tokens/s | of matmul rate | peak GiB |\n|---|---|---|---|---|")
    flops = ours(config, tokens, rate, trace)
    torch.cuda.empty_cache()
    if with_peer:
        peer(config, tokens, flops, rate)


if __name__ == "__main__":
    typer.run(main)
