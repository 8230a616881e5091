"""Short runs of the toy of a family, and commands as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.toys import ON_GPUS, TOYS

GRAPHS: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
"""vLLM's options on a GPU: CUDA graphs without torch.compile, which takes minutes and would change nothing that is asked here."""


def options(family: str) -> dict[str, Any]:
    """vLLM's on a GPU. Its own choice of a kernel for linear attention compiles for minutes on Hopper."""
    return GRAPHS | ({"additional_config": {"gdn_prefill_backend": "triton"}} if family.startswith("qwen3") else {})


def on_a_gpu(tree: dict[str, Any], family: str) -> None:
    """Trainer, engine and server share one GPU, the engine with CUDA graphs."""
    tree["train"] |= {"gpus": 0.4}
    tree["rollout"] |= {"eager": False, "gpus": 0.4, "gpu_memory": 0.05, "kv_cache_bytes": 1 << 30, "engine_args": options(family)}
    tree["logprob"] |= {"gpus": 0.2}
    tree["cluster"] = {"device": "cuda", "num_cpus": 6, "num_gpus": 1, "gpus_per_node": 1}


def recipe(family: str, precision: str, device: str, root: Path) -> Path:
    """A few updates: supervised ones that give the drafter something to be right about, then RL."""
    config = (ON_GPUS if device == "cuda" else TOYS)[family]
    tree: dict[str, Any] = {
        "name": family.replace(" ", "-"),
        "run_dir": str(root / "run"),
        "model": {"init": "random", "tokenizer": "bytes", "config": config},
        "data": {"task": {"name": "addition", "max_digits": 1, "train_size": 90, "eval_size": 4}},
        "train": {
            "stages": ["sft", "rl"],
            "precision": precision,
            "threads": 1,
            "tokens_per_microbatch": 1024,
            "checkpoint_every": 1,
            "sft": {"steps": 12, "batch_size": 16, "optimizer": {"lr": 5e-3}},
            "rl": {"steps": 2, "prompts_per_step": 4, "group_size": 2, "dynamic_sampling": False, "overlong": {"enabled": False}},
        },
        "rollout": {
            "engine": "vllm",
            "eager": True,
            "max_tokens": 24,
            "context": 64,
            "kv_cache_bytes": 64 << 20,
            "max_in_flight": 8,
            "threads": 1,
            "speculation": {"num_tokens": 1},
        },
        "logprob": {"standalone": True, "tokens_per_batch": 1024},
        "sync": {"transport": "shm", "verify": "always"},
        "cluster": {"device": "cpu", "num_cpus": 4},
    }
    if device == "cuda":
        on_a_gpu(tree, family)
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A command of this interpreter, under way."""
    pipe = subprocess.PIPE
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment})


def end(process: subprocess.Popen[str]) -> str:
    """Let the command continue, wait for its end, and return its output; its failure fails the test."""
    with process:
        try:
            printed, message = process.communicate("\n", timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, printed[-4000:] + message[-4000:]
    return printed


def command(*arguments: object) -> str:
    """What a command of this interpreter prints."""
    return end(start(*arguments))


def updates(run_dir: Path) -> list[dict[str, Any]]:
    """The RL updates so far, with the reports of the following syncs."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("phase") == "rl" and "actor/pg_loss" in row]
