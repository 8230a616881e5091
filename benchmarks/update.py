"""Time and memory of whole updates on one device, optimizer included: of all weights, of an adapter, or with offloading.

    python benchmarks/update.py --lora 16
    python benchmarks/update.py --lora 16 --offload params,optimizer,grads
    python benchmarks/update.py --model FOLDER --tokens 512        # a small model, on a CPU

Weights and samples are random. The timer covers one update: packing, forward and backward with policy and MTP loss, gradient norm and
clipping, Adam, the copy of master weights to parameters, and all moves to and from host memory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from harness import parser, print_environment, print_spread
from mtpctl.bench.train_step import create_config_folder, load_named_config, make_samples, synchronize
from mtpctl.plan.memory import GIB
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig, OffloadConfig
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken

WARMUP, STEPS = 2, 5


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="", help="model folder, or hub id whose config mtpctl knows; default: MiMo-7B, on a GPU only")
    arguments.add_argument("--tokens", type=int, default=8192, help="packed tokens of the update")
    arguments.add_argument("--samples", type=int, default=8, help="samples of equal length that fill them")
    arguments.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    arguments.add_argument("--lora", type=int, default=0, help="rank of the trained adapter; 0: all weights")
    arguments.add_argument("--offload", default="", help="kept in host memory, separated by commas: params, optimizer, grads")
    arguments.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    arguments.add_argument("--workspace-gib", type=float, default=1.0, help="kernels.workspace_bytes")
    options = arguments.parse_args()
    offloaded = [part for part in options.offload.split(",") if part]

    config = EngineConfig(
        parallel=ParallelConfig(),
        precision=options.precision,
        mtp=MtpConfig(),
        kernels=KernelsConfig(workspace_bytes=int(options.workspace_gib * GIB)),
        tokens_per_microbatch=options.tokens,
        recompute=options.recompute,
        random_seed=0,
        lora=LoraConfig(rank=options.lora, alpha=2.0 * options.lora) if options.lora else None,
        offload=OffloadConfig.model_validate(dict.fromkeys(offloaded, True)),
    )
    with tempfile.TemporaryDirectory() as scratch:
        engine = MegatronEngine(create_config_folder(load_named_config(options.model), Path(scratch)), config)
        engine.set_optimizer(OptimizerConfig())
        assert engine.optimizer is not None
        step, optimizer_ms = engine.optimizer.step, list[float]()

        def timed_step(total_steps: int, *, loss_is_finite: bool) -> object:
            synchronize(engine.device)
            began = time.perf_counter()
            result = step(total_steps, loss_is_finite=loss_is_finite)
            synchronize(engine.device)
            optimizer_ms.append(1000 * (time.perf_counter() - began))
            return result

        engine.optimizer.step = timed_step  # type: ignore[assignment, method-assign]
        batch = make_samples(engine.folder.shape.vocab, options.tokens, options.samples, prompt_share=0.25)
        update_ms = []
        for turn in range(WARMUP + STEPS):
            synchronize(engine.device)
            if engine.device.type == "cuda" and turn == WARMUP:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            loss = engine.update(batch, NextToken())["sft/loss"]
            synchronize(engine.device)
            update_ms.append(1000 * (time.perf_counter() - began))
        total, trained = engine.parameter_counts

    print_environment()
    print(f"{total:,} parameters, {trained:,} trained, loss {loss:.4f}")
    print_spread("update", update_ms[WARMUP:], "ms", ".0f")
    print(f"of it clipping, Adam and moves: {statistics.median(optimizer_ms[WARMUP:]):.0f} ms")
    if engine.device.type == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB, between updates {torch.cuda.memory_allocated() / GIB:.1f} GiB")
    engine.close()


if __name__ == "__main__":
    main()
