"""The main job for every family with an MTP head, from random weights to a folder that stock vLLM serves: each a toy of odd sizes.

RL with one draft token a step, every tensor of every sync compared, old log-probs from servers; a checkpoint, a second start that
resumes, the way back to a Hugging Face folder, and a vLLM that knows nothing of this package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from tests.fakes.toys import ON_CARDS, SERVED, TOYS

# Two starts of trainer, engine and server, a conversion and one more engine: two minutes on two cores, most of it imports.
pytestmark = pytest.mark.timeout(900)
CASES = [
    *(pytest.param(family, precision, "cpu", marks=pytest.mark.slow) for family, precision in SERVED),
    *(pytest.param(family, "bf16", "cuda", marks=pytest.mark.gpu) for family in TOYS),
]
GRAPHS: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
"""vLLM's options on a card: CUDA graphs without torch.compile, which takes minutes and would change nothing that is asked here."""

APART = {"fp32": 1e-4, "bf16": 0.05}
"""Mean difference (nats) that passes between trainer and engine at equal weights: rounding, and in bf16 an expert chosen otherwise."""

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
sys.stdin.readline()
llm = LLM(
    sys.argv[1], dtype=sys.argv[2], max_num_seqs=4, max_model_len=128, enable_prefix_caching=False,
    speculative_config={"method": "mtp", "num_speculative_tokens": 1}, **json.loads(sys.argv[3]),
)
(found,) = llm.generate([{"prompt_token_ids": list(range(5, 25))}], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
print(json.dumps(list(found.outputs[0].token_ids)))
"""


def options(family: str) -> dict[str, Any]:
    """vLLM's on a card. Its own choice of a kernel for linear attention compiles for minutes on Hopper."""
    return GRAPHS | ({"additional_config": {"gdn_prefill_backend": "triton"}} if family.startswith("qwen3") else {})


def on_a_card(tree: dict[str, Any], family: str) -> None:
    """Trainer, engine and server share one card, the engine with CUDA graphs."""
    tree["train"] |= {"gpus": 0.4}
    tree["rollout"] |= {"eager": False, "gpus": 0.4, "gpu_memory": 0.05, "kv_cache_bytes": 1 << 30, "engine_args": options(family)}
    tree["logprob"] |= {"gpus": 0.2}
    tree["cluster"] = {"device": "cuda", "num_cpus": 6, "num_gpus": 1, "gpus_per_node": 1}


def recipe(family: str, precision: str, device: str, root: Path) -> Path:
    """A few updates: supervised ones that give the drafter something to be right about, then RL."""
    config = (ON_CARDS if device == "cuda" else TOYS)[family]
    tree: dict[str, Any] = {
        "name": family,
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
        on_a_card(tree, family)
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A command of this interpreter, under way."""
    pipe = subprocess.PIPE
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment})


def end(process: subprocess.Popen[str]) -> str:
    """What it has printed, once it has been told to go on and has ended; a failure is this test's."""
    with process:
        try:
            printed, told = process.communicate("\n", timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, printed[-4000:] + told[-4000:]
    return printed


def command(*arguments: object) -> str:
    """What a command of this interpreter prints."""
    return end(start(*arguments))


def updates(run_dir: Path) -> list[dict[str, Any]]:
    """RL's so far, with what the syncs after them told."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("phase") == "rl" and "actor/pg_loss" in row]


@pytest.mark.parametrize(("family", "precision", "device"), CASES)
def test_the_main_job_from_random_weights_to_a_folder_that_stock_vllm_serves(
    family: str, precision: str, device: str, tmp_path: Path
) -> None:
    made, run_dir, folder = recipe(family, precision, device, tmp_path), tmp_path / "run", tmp_path / "folder"
    command("-m", "mtpctl", "train", made, "--plain")
    # It imports vLLM on the core that the second start leaves idle at first, and is told once the folder is there.
    # vLLM by itself serves latent attention in bfloat16 alone where a CPU has AMX.
    fp32 = "bfloat16" if "kv_lora_rank" in TOYS[family] and torch.cpu._is_amx_tile_supported() else "float32"
    dtype = {"fp32": fp32, "bf16": "bfloat16"}[precision]
    eager = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    stock = eager if device == "cpu" else options(family) | {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    with start("-c", STOCK, folder, dtype, json.dumps(stock), VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0") as serving:
        try:
            resumed = command("-m", "mtpctl", "train", made, "--plain", "--set", "train.rl.steps=3")
            command("-m", "mtpctl", "convert-hf", run_dir, folder, "--verify")
            told = end(serving)
        finally:
            serving.kill()
    assert "resume: rl goes on after step 2" in resumed
    rows = updates(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3], "the second start goes on where the first one ended"
    shape = shape_of(TOYS[family])
    assert {row["sync/verified"] for row in rows} == {len(tensor_shapes(shape))}, "every tensor of the folder, target's and draft's"
    assert any(row["rollout/spec_drafted"] for row in rows) and all(row["mtp/loss_1"] > 0 for row in rows)
    assert all(("moe/replay_agreement" in row) == bool(shape.moe) for row in rows), "experts are those of the rollout"
    same = [row["rollout_corr/abs_diff_same_version"] for row in rows if "rollout_corr/abs_diff_same_version" in row]
    assert same and max(same) < APART[precision], "the server's log-probs are the engine's where both have the same weights"
    assert len(json.loads(told.splitlines()[-1])) == 16
    accepted = [row["rollout/spec_accept_rate"] for row in rows if "rollout/spec_accept_rate" in row]
    print(
        f"{family}, {precision} on {device}: {rows[-1]['sync/verified']:.0f} tensors compared at each sync, "
        f"{min(accepted):.0%} to {max(accepted):.0%} of drafts accepted, {max(same):.1e} nats"
    )
