"""The cost of returning expert routes: tokens/s of two engines of one model, one of which returns them.

    python benchmarks/returned_routes.py Qwen/Qwen3-30B-A3B --layers 24
    python benchmarks/returned_routes.py --toy --batch 8              # on a CPU

Weights are random. Both engines are loaded at the same time, and the same workload is sent to each in turn, through mtpctl's pool.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from argparse import Namespace
from pathlib import Path

from harness import parser, print_environment
from mtpctl.bench.rollout_engines import make_workload, send_workload
from mtpctl.cluster.local import cluster
from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.start import start_pool
from mtpctl.routes import RouteShape

PROMPT = 128
TOY = hub_config("Qwen/Qwen3-30B-A3B") | {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
}


def recipe_of(config: dict[str, object], folder: Path, options: Namespace) -> Recipe:
    """The recipe of each of the two engines."""
    toy, max_batch = options.toy, max(options.batch)
    kv_bytes = kv_bytes_per_token(shape_of(config), 1, 4 if toy else 2, drafting=False)
    rollout: dict[str, object] = {
        "engine": "vllm",
        "max_in_flight": max_batch,
        "max_tokens": options.tokens,
        "speculation": {"num_tokens": 0},
        "eager": toy,
        "threads": 1 if toy else 0,
        "kv_cache_bytes": max_batch * (PROMPT + options.tokens + 32) * kv_bytes,
        "engine_args": {"load_format": "dummy"},
    }
    if not toy:
        rollout["gpu_memory"] = options.share
    return Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "train": {"precision": "fp32" if toy else "bf16"},
            "rollout": rollout,
            "sync": {"transport": "shm"},
            "cluster": {"device": "cpu" if toy else "cuda"},
        }
    )


async def measure(config: dict[str, object], folder: Path, recipe: Recipe, options: Namespace) -> None:
    """Print tokens/s without and with routes for each batch size, as medians over the rounds after a warm-up round."""
    shape = shape_of(config)
    routes = RouteShape.of(shape)
    assert routes is not None, "not a mixture of experts"
    actor = Actor("rollout", 0, 0, 0, 1.0, 0.0 if options.toy else 0.5)
    placement, context = Placement("cpu" if options.toy else "cuda", (actor,), 1), PROMPT + options.tokens + 32
    plain, returning = await asyncio.gather(
        *(start_pool(recipe, model=str(folder), context=context, placement=placement, routes=layers) for layers in ((), routes.layers))
    )
    print("| requests | tokens/s without | with routes | with / without |\n|---|---|---|---|")
    try:
        for batch in options.batch:
            workload = make_workload(
                f"batch {batch}", batch, batch, prompt_length=PROMPT, mean_answer_length=options.tokens, spread=0.0, vocab=shape.vocab
            )
            rates: tuple[list[float], list[float]] = ([], [])
            for number in range(-1, options.rounds):
                for pool, of_pool in zip((plain, returning), rates, strict=True):
                    run = await send_workload(pool, workload, shape.vocab)
                    if number >= 0:
                        of_pool.append(run.tokens_per_s)
            without, with_routes = map(statistics.median, rates)
            print(f"| {batch} | {without:,.0f} | {with_routes:,.0f} | {with_routes / without:.3f} |", flush=True)
    finally:
        await asyncio.gather(plain.close(), returning.close())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", nargs="?", default="Qwen/Qwen3-30B-A3B", help="a mixture of experts whose shape mtpctl knows")
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--batch", type=int, action="append", help="concurrent requests; may be repeated; default: 64, 256")
    arguments.add_argument("--tokens", type=int, default=256, help="response tokens")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--share", type=float, default=0.45, help="share of the GPU for each engine")
    arguments.add_argument("--toy", action="store_true", help="a small model, on a CPU")
    options = arguments.parse_args()
    options.batch = options.batch or [64, 256]
    config = TOY if options.toy else hub_config(options.model) | {"num_hidden_layers": options.layers}
    print_environment()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        recipe = recipe_of(config, Path(scratch), options)
        with cluster(recipe.cluster, cpus=2, gpus=0 if options.toy else 1):
            asyncio.run(measure(config, Path(scratch), recipe, options))


if __name__ == "__main__":
    main()
