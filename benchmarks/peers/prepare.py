"""Prepare the comparison with peers: rows for both systems, mtpctl's recipes, and random weights.

    python benchmarks/peers/prepare.py sums FOLDER --model MODEL                     # work B: rows, and mtpctl's recipe
    python benchmarks/peers/prepare.py system FOLDER --tokenizer MODEL --shape 0.5b  # work A: rows, recipes, models without weights
    python benchmarks/peers/prepare.py weights FOLDER                                # on the GPU host: weights of these models

Rows are JSON lines for mtpctl and Parquet for verl, with the same prompts. Both systems apply the tokenizer's chat template.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

from peer_reward import COIN

SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960},
}
"""Qwen2.5's shapes. The vocabulary is the tokenizer's. The head is not tied, because a tied random model repeats its last token."""
RESPONSE = {"fixed": 512, "tail": 2048}
"""Maximum response tokens. `fixed`: with one end token, so 1% of the responses are shorter. `tail`: lengths are exponential."""
MEAN_OF_TAIL = 512
"""Mean length of `tail` before it is cut at the maximum."""
PROMPT_WORDS = 128
GROUP, PROMPTS, MINIBATCHES = 8, 32, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "": {"train": 0.5, "rollout": "  replicas: 2\n  gpus: 0.25\n"},
    "_split": {"train": 1.0, "rollout": "  replicas: 2\n  gpus: 0.5\n"},
    "_both": {"train": 0.4, "rollout": "  replicas: 3\n  on_trainer_gpus: 1\n  gpus: 0.5\n"},
}
"""Suffix of a recipe, its `train.gpus` and its engines: on one GPU, of which the engines get half as in `run_verl.py`; on two GPUs, of
which one trains and one generates; the same with an engine on the trainer's GPU too. Two engines per GPU, because an engine of a small
model is limited by its CPU core. Two processes on a GPU need the transport `ipc`."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")

Row = dict[str, Any]


def write_rows(folder: Path, train: list[Row], held_out: list[Row]) -> None:
    """Write rows.jsonl and held_out.jsonl for mtpctl, train.parquet and held_out.parquet for verl."""
    import pyarrow
    import pyarrow.parquet

    prompts = {row["question"] for row in train}
    for name, parquet, split, rows in (("rows", "train", "train", train), ("held_out", "held_out", "held_out", held_out)):
        rows = [
            {"question": row["question"], "answer": row["answer"], "split": split, "key": f"{split}/{index}"}
            | {"in_training": row["question"] in prompts}
            for index, row in enumerate(rows)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        table = [
            {
                "data_source": split,
                "prompt": [{"role": "user", "content": row["question"]}],
                "reward_model": {"style": "rule", "ground_truth": row["answer"]},
                "extra_info": {"index": index, "split": split, "key": row["key"], "in_training": row["in_training"]},
            }
            for index, row in enumerate(rows)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"{parquet}.parquet")


def sums(folder: Path, model: str) -> None:
    """Write the rows and the recipe of work B. The rows are those of `mtpctl init --template reasoning-gym` for a machine with a GPU."""
    import mtpctl
    from mtpctl.jobs.first_recipe import Machine, first_task

    templates = Path(mtpctl.__file__).parent / "templates" / "reasoning_gym"
    texts = first_task("sums", model, "chain_sum", Machine(cores=16, gpus=1, gpu_gib=80), templates).texts
    rows, held_out = ([json.loads(line) for line in texts[name].splitlines()] for name in ("rows.jsonl", "held_out.jsonl"))
    write_rows(folder, rows, held_out)
    shutil.copy(Path(__file__).with_name("peer_reward.py"), folder / "reward.py")
    for layout in LAYOUTS:
        text = recipe("sums", model, layout, response=160, context=256, rate=3e-5, warmup=20, eval_every=20)
        (folder / f"recipe{layout}.yaml").write_text(text, encoding="utf-8")


def system(folder: Path, tokenizer: Path, shape: str) -> None:
    """Write the rows of work A, and a model folder and a recipe for each distribution of lengths. Prompts are random digits."""
    rng = random.Random(0)
    rows = [{"question": " ".join(str(rng.randrange(10)) for _ in range(PROMPT_WORDS)), "answer": COIN} for _ in range(4096)]
    write_rows(folder, rows, rows[:8])
    shutil.copy(Path(__file__).with_name("peer_reward.py"), folder / "reward.py")
    tokens = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = max(max(tokens["model"]["vocab"].values()), *(token["id"] for token in tokens["added_tokens"])) + 1
    for name, limit in RESPONSE.items():
        # A random model samples an end token with probability len(ends) / vocabulary, so lengths are exponential in every engine.
        ends = (
            [vocabulary - 1]
            if name == "fixed"
            else sorted(random.Random(1).sample(range(1000, vocabulary), round(vocabulary / MEAN_OF_TAIL)))
        )
        target = folder / f"model_{name}"
        target.mkdir(exist_ok=True)
        for file in TOKENIZER_FILES:
            if (tokenizer / file).exists():
                shutil.copy(tokenizer / file, target)
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": vocabulary,
            "bos_token_id": ends[0],
            "eos_token_id": ends,
            **SHAPES[shape],
        }
        (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        (target / "generation_config.json").write_text(json.dumps({"bos_token_id": ends[0], "eos_token_id": ends}), encoding="utf-8")
        for layout in LAYOUTS:
            text = recipe(f"system_{name}", target.name, layout, response=limit, context=limit + 512, rate=1e-6, warmup=0, eval_every=0)
            text = text.replace("rollout:\n", f"rollout:\n  end_ids: {ends}\n")
            (folder / f"recipe_{name}{layout}.yaml").write_text(text, encoding="utf-8")


def weights(folder: Path) -> None:
    """Write random weights to each model folder. Both systems load the same files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for target in sorted(folder.glob("model_*")):
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(target)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Keep only the weights: save_pretrained also writes a config that depends on the version of transformers.
        model.save_pretrained(target / "saved", max_shard_size="50GB")
        (target / "saved" / "model.safetensors").replace(target / "model.safetensors")
        shutil.rmtree(target / "saved")
        print(f"{target}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f}M parameters", flush=True)


def recipe(name: str, model: str, layout: str, *, response: int, context: int, rate: float, warmup: int, eval_every: int) -> str:
    """mtpctl's recipe. Sizes and objective are those of run_verl.py; the rest is what `mtpctl init` sets for a small model."""
    placement = LAYOUTS[layout]
    held_out = "  eval_path: held_out.jsonl\n" if eval_every else ""
    return f"""\
name: {name}
run_dir: run_{name}
model: {{path: {model}}}
data:
  path: rows.jsonl
{held_out}\
  columns: {{prompt: question, answer: answer}}
  chat_template: true
reward: {{function: "reward.py:score", args: {{log: responses.jsonl}}}}
mtp: {{mode: "off"}}
train:
  stages: [rl]
  eval_every: {eval_every}
  gpus: {placement["train"]}
  tokens_per_microbatch: 16384
  keep_checkpoints: 0
  rl:
    # GRPO with token mean and clip-higher; groups without signal are kept, so both systems train on equal numbers of responses
    loss: ppo
    advantage: grpo
    aggregate: token
    dynamic_sampling: false
    kl_coef: 0.0
    clip_low: 0.2
    clip_high: 0.28
    clip_dual: 3.0
    minibatches: {MINIBATCHES}
    group_size: {GROUP}
    prompts_per_step: {PROMPTS}
    steps: 200
    optimizer: {{lr: {rate:g}, warmup_steps: {warmup}, betas: [0.9, 0.95], weight_decay: 0.0, clip_grad: 1.0}}
rollout:
  engine: vllm
  temperature: 1.0
  max_tokens: {response}
  context: {context}
{placement["rollout"]}\
  max_in_flight: 256
async: {{staleness_threshold: 2.0}}
evaluation: {{wait: true}}
sync: {{transport: ipc}}
cluster: {{device: cuda}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sums", "system", "weights"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="work B: the model's folder, as the runs see it")
    parser.add_argument("--tokenizer", type=Path, help="work A: a folder with a tokenizer")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.5b")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "weights":
        weights(options.folder)
    elif options.what == "sums":
        if options.model is None:
            parser.error("sums needs --model")
        sums(options.folder, options.model)
    else:
        if options.tokenizer is None:
            parser.error("system needs --tokenizer")
        system(options.folder, options.tokenizer, options.shape)


if __name__ == "__main__":
    main()
