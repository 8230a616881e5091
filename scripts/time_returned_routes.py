"""Time what returning the routes of experts costs an engine: tokens/s of two engines of one model, one of which returns them.

    python scripts/time_returned_routes.py Qwen/Qwen3-30B-A3B --layers 24
    python scripts/time_returned_routes.py --toy --batch 8         # on a CPU

Weights are random. Both engines are loaded at the same time, and the same load goes to each in turn, through mtpctl's pool.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mtpctl.bench.rollout_engines import START_S
from mtpctl.bench.rollout_load import make_load, send
from mtpctl.cluster.local import cluster
from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.plan.memory import kv_bytes_per_token
from mtpctl.plan.placement import Actor, Placement
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.start import start_pool
from mtpctl.routes import RouteShape

PROMPT = 128
TOY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def recipe(config: dict[str, object], folder: Path, most: int, tokens: int, share: float, toy: bool) -> Recipe:
    """One of two engines on the card, which takes this share of it."""
    rollout: dict[str, object] = {
        "engine": "vllm",
        "max_in_flight": most,
        "max_tokens": tokens,
        "speculation": {"num_tokens": 0},
        "eager": toy,
        "threads": 1 if toy else 0,
        "kv_cache_bytes": most * (PROMPT + tokens + 32) * kv_bytes_per_token(shape_of(config), 1, 4 if toy else 2, drafting=False),
        "engine_args": {"load_format": "dummy"},
    }
    if not toy:
        rollout["gpu_memory"] = share
    return Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "train": {"precision": "fp32" if toy else "bf16"},
            "rollout": rollout,
            "sync": {"transport": "shm"},
            "cluster": {"device": "cpu" if toy else "cuda", "actor_deadline_s": START_S},
        }
    )


async def measure(config: dict[str, object], batches: list[int], tokens: int, rounds: int, share: float, toy: bool) -> None:
    """Print a table: tokens/s without and with routes by requests at once, the median of `rounds` rounds after one that warms up."""
    shape = shape_of(config)
    routed = RouteShape.of(shape)
    assert routed is not None, "a mixture of experts"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(config))
        made = recipe(config, folder, max(batches), tokens, share, toy)
        placement = Placement(made.cluster.device, (Actor("rollout", 0, 0, 0, 1.0, 0.0 if toy else 0.5),), 1)
        starting = [
            start_pool(made, model=str(folder), context=PROMPT + tokens + 32, placement=placement, routes=layers)
            for layers in ((), routed.layers)
        ]
        plain, returning = await asyncio.gather(*starting)
        print("| requests | tokens/s without | with routes | with / without |\n|---|---|---|---|")
        try:
            for batch in batches:
                load = make_load(f"batch {batch}", batch, batch, prompt=PROMPT, tokens=tokens, spread=0.0, vocab=shape.vocab)
                speeds: tuple[list[float], list[float]] = ([], [])
                for round_ in range(rounds + 1):
                    for pool, into in zip((plain, returning), speeds, strict=True):
                        run = await send(pool, load, shape.vocab)
                        if round_:
                            into.append(run.tokens_per_s)
                without, withal = map(statistics.median, speeds)
                print(f"| {batch} | {without:,.0f} | {withal:,.0f} | {withal / without:.3f} |", flush=True)
        finally:
            await asyncio.gather(plain.close(), returning.close())


def main(
    model: Annotated[str, typer.Argument(help="A mixture of experts that mtpctl knows the shape of.")] = "Qwen/Qwen3-30B-A3B",
    layers: Annotated[int, typer.Option(help="How many of its layers.")] = 24,
    batch: Annotated[list[int] | None, typer.Option(help="Requests at once.")] = None,
    tokens: Annotated[int, typer.Option(help="Response tokens.")] = 256,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 3,
    share: Annotated[float, typer.Option(help="Share of the card for each engine.")] = 0.45,
    toy: Annotated[bool, typer.Option("--toy", help="A small model, on a CPU.")] = False,
) -> None:
    config = dict(TOY) if toy else hub_config(model) | {"num_hidden_layers": layers}
    made = Recipe.model_validate({"model": {"path": "."}, "cluster": {"device": "cpu" if toy else "cuda"}})
    with cluster(made.cluster, cpus=2, gpus=0 if toy else 1):
        asyncio.run(measure(config, batch or [64, 256], tokens, rounds, share, toy))


if __name__ == "__main__":
    typer.run(main)
