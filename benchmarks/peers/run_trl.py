"""Run work B with TRL: GRPOTrainer with colocated vLLM on one GPU, or AsyncGRPOTrainer on two.

    python3 benchmarks/peers/run_trl.py FOLDER --model MODEL --mode colocate --updates 200
    python3 benchmarks/peers/run_trl.py FOLDER --model MODEL --mode async --updates 200
    python3 benchmarks/peers/run_trl.py FOLDER --model MODEL --cfg              # only build and print the configuration

FOLDER is that of prepare.py. The log of responses is responses.jsonl in the working directory. `async` starts the vLLM server on the first
GPU and trains on the second, as TRL's guide does, because weights are sent over NCCL between two GPUs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prepare import GROUP, MINIBATCHES, PROMPTS

RESPONSE, CONTEXT = 160, 256
SAMPLES = PROMPTS // MINIBATCHES * GROUP
"""Responses of an optimizer step. TRL counts optimizer steps, of which an update has `MINIBATCHES`."""
URL = "http://localhost:8000"


def shared(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of both trainers, with the reasons for those that are not sizes."""
    return {
        "output_dir": "trl",
        "seed": options.seed,
        # The objective and the optimizer, as in prepare.recipe. TRL's default aggregation is the token mean (dapo).
        "num_generations": GROUP,
        "max_completion_length": RESPONSE,
        "temperature": 1.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "learning_rate": 3e-5,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 20,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_steps": options.updates * MINIBATCHES,
        # A micro-batch is all of an optimizer step's responses, at most 16,384 tokens. No activation recomputation: memory allows it, and
        # TRL states 20% for it.
        "per_device_train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "bf16": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def colocated(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of GRPOConfig."""
    return shared(options) | {
        # FlashAttention 2 and Liger's layers are what TRL's guide to faster training recommends. The Hub's kernels, which it prefers, need
        # a download at run time. Weights are float32 with bf16 autocast, as in the other systems: AdamW on bf16 weights loses small
        # updates.
        "model_init_kwargs": {"attn_implementation": options.attention, "dtype": "float32"},
        "use_liger_kernel": True,
        # The responses of an update are generated at once, and trained in MINIBATCHES optimizer steps.
        "steps_per_generation": MINIBATCHES,
        # For negative advantages the upper bound of the ratio is dual clip 3; others are clipped at 1.28 before.
        "delta": 3.0,
        # Old log-probs are recomputed, and vLLM's deviation from them is corrected (the default, sequences above ratio 3 masked). Turning
        # this off would not save the forward pass, because later minibatches need old log-probs.
        "vllm_importance_sampling_correction": True,
        # The engine is in the trainer's process. It has room next to the trainer, so it does not sleep, which would cost transfers.
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.gpu_memory,
        "vllm_max_model_length": CONTEXT,
        "vllm_enable_sleep_mode": False,
        # Held-out rows are sampled once at temperature 1, as mtpctl does.
        "eval_strategy": "steps",
        "eval_steps": options.eval_every * MINIBATCHES,
        "eval_on_start": True,
        "per_device_eval_batch_size": PROMPTS * GROUP,
        "num_generations_eval": 1,
    }


def asynchronous(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of AsyncGRPOConfig. It has no dual clip, no Liger kernels and no evaluation; its default weights are float32."""
    return shared(options) | {
        "vllm_server_base_url": URL,
        # Equal numbers of responses per optimizer step. With a token budget their number follows from their lengths.
        "token_budget": 0,
        # TRL's defaults: weights are sent after each optimizer step, and samples may be four steps old, which is one update of the other
        # systems. So 256 requests are in flight, as in these.
        "weight_sync_steps": 1,
        "max_staleness": 4,
    }


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Rows as TRL's data set: conversations, and the columns that the reward function needs."""
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    columns = ("answer", "split", "key", "in_training")
    return [{"prompt": [{"role": "user", "content": row["question"]}], **{name: row[name] for name in columns}} for row in lines]


def use_flash_attention_2() -> None:
    """Let the packed attention of TRL call flash-attn. By default it downloads FlashAttention 3, which takes the same arguments."""
    import flash_attn  # type: ignore[import-not-found]
    from trl.experimental.async_grpo import packing  # type: ignore[import-not-found]

    packing._flash_attn = lambda: flash_attn


def serve(model: str, gpu: str) -> subprocess.Popen[bytes]:
    """Start TRL's documented server. The trainer waits until it is ready."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--max-model-len", str(CONTEXT)]
    command += ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "nccl"}']
    return subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "VLLM_SERVER_DEV_MODE": "1"})


def train_colocated(options: argparse.Namespace, settings: Any) -> None:
    from datasets import Dataset  # type: ignore[import-untyped]
    from trl import GRPOTrainer
    from trl_callbacks import Updates
    from trl_reward import score

    GRPOTrainer(
        model=options.model,
        args=settings,
        reward_funcs=functools.partial(score, log=str(Path("responses.jsonl").resolve())),
        train_dataset=Dataset.from_list(rows(options.folder, "rows")),
        eval_dataset=Dataset.from_list(rows(options.folder, "held_out")),
        callbacks=[Updates(MINIBATCHES)],
    ).train()


def train_asynchronous(options: argparse.Namespace, settings: Any) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl_callbacks import HeldOut, Updates
    from trl_reward import score

    use_flash_attention_2()
    log = str(Path("responses.jsonl").resolve())
    trainer = AsyncGRPOTrainer(
        model=options.model,
        args=settings,
        reward_funcs=functools.partial(score, log=log),
        train_dataset=Dataset.from_list(rows(options.folder, "rows")).shuffle(seed=options.seed),
        callbacks=[Updates(MINIBATCHES)],
    )
    every = options.eval_every * MINIBATCHES
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # Added after TRL's own callbacks, so an evaluation follows the transfer of the weights.
    trainer.add_callback(
        HeldOut(rows(options.folder, "held_out"), tokenizer, URL, options.model, every=every, max_tokens=RESPONSE, log=log)
    )
    trainer.train()


def changed(text: str) -> tuple[str, Any]:
    """KEY=VALUE of --set; VALUE is JSON, or text."""
    name, _, setting = text.partition("=")
    try:
        return name, json.loads(setting)
    except json.JSONDecodeError:
        return name, setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", choices=("colocate", "async"), default="colocate")
    parser.add_argument("--attention", choices=("flash_attention_2", "sdpa"), default="flash_attention_2", help="of colocate")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="share of the GPU's memory for the colocated engine")
    parser.add_argument("--set", action="append", default=[], type=changed, metavar="KEY=VALUE", help="a further argument")
    parser.add_argument("--cfg", action="store_true", help="print the configuration")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    separate = options.mode == "async"
    # GRPOTrainer rejects several visible GPUs in one process.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[1] if separate else visible[0]
    server = serve(options.model, visible[0]) if separate and not options.cfg else None
    try:
        if separate:
            from trl.experimental.async_grpo import AsyncGRPOConfig as Config
        else:
            from trl import GRPOConfig as Config
        settings = Config(**((asynchronous if separate else colocated)(options) | dict(options.set)))
        if options.cfg:
            print(settings)
        else:
            (train_asynchronous if separate else train_colocated)(options, settings)
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
