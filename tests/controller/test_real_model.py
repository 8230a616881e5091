"""The guide to a pretrained model, command by command: SmolLM2-135M-Instruct from the registry, through the main job to stock vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.environment import with_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "your-own-task.md").read_text()
PRETRAINED = GUIDE.partition("## 5. A pretrained model")[2].partition("\n## ")[0]
ENVIRONMENT = with_tree(NO_COLOR="1", COLUMNS="140")
SMALL = (
    *("train.rl.steps=2", "train.rl.prompts_per_step=4", "train.rl.group_size=4", "train.rl.dynamic_sampling=false"),
    *("train.eval_every=2", "train.checkpoint_every=1", "rollout.max_tokens=96"),
    *("sync.verify=always", "logprob.standalone=true", "cluster.num_cpus=4"),
)
STOCK = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20, max_num_seqs=4)
messages = [{"role": "user", "content": "What is the capital of France?"}]
print(json.dumps(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0].text))
"""


def scripts(section: str) -> dict[str, str]:
    """The files of a guide's section: blocks of code whose first line is a comment with the file's path."""
    blocks = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    return dict(blocks)


def run(folder: Path, *command: object, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_guide_to_a_pretrained_model_works_as_written(tmp_path: Path) -> None:
    mtpctl = (sys.executable, "-m", "mtpctl")
    run(tmp_path, *mtpctl, "init", "mytask")
    for path, text in {**scripts(GUIDE.partition("## 2. The reward")[0]), **scripts(PRETRAINED)}.items():
        (tmp_path / path).write_text(text)
    run(tmp_path, sys.executable, "mytask/make_rows.py")
    held_out = tmp_path / "mytask" / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:8]))
    run(tmp_path, sys.executable, "mytask/smollm2.py", "models/smollm2")
    recipe, run_dir = "mytask/smollm2.yaml", tmp_path / "runs" / "smollm2"
    sets = [part for each in SMALL for part in ("--set", each)]
    run(tmp_path, *mtpctl, "recipe", "validate", recipe)
    assert "speculation is off" in run(tmp_path, *mtpctl, "train", recipe, "--dry-run")
    run(tmp_path, *mtpctl, "train", recipe, "--plain", *sets)
    resumed = run(tmp_path, *mtpctl, "train", recipe, "--plain", *sets, "--set", "train.rl.steps=3")
    assert "resume: rl resumes after step 2" in resumed
    run(tmp_path, *mtpctl, "convert-hf", run_dir, "models/smollm2-rl", "--verify")

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row.get("phase") == "rl" and "actor/pg_loss" in row]
    assert [row["step"] for row in updates] == [1, 2, 3]
    assert all(row["sync/verified"] == 272 for row in updates), "every tensor of the tied model at every sync"
    same = [row["rollout_corr/abs_diff_same_version"] for row in updates if "rollout_corr/abs_diff_same_version" in row]
    assert same and max(same) < 1e-4, "engine and log-prob server agree in fp32 at equal weights"
    assert any(row["response/length_mean"] < 96 for row in updates), "the template's end token ends responses"
    samples = [json.loads(line) for file in sorted((run_dir / "samples").iterdir()) for line in file.read_text().splitlines()]
    # Samples show text without special tokens; the template adds its own system message.
    assert all(row["prompt"].startswith("system\nYou are a helpful AI assistant named SmolLM") for row in samples)
    assert all(row["prompt"].endswith("\nassistant\n") for row in samples) and any(row["finish_reason"] == "stop" for row in samples)

    before, after = (load_file(tmp_path / "models" / name / "model.safetensors") for name in ("smollm2", "smollm2-rl"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert "Paris" in run(tmp_path, sys.executable, "-c", STOCK, "models/smollm2-rl", VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def test_first_run_trains_with_the_settings_of_init(tmp_path: Path) -> None:
    """The commands of `scripts/quickstart --real`, with fewer updates and rows."""
    run(tmp_path, sys.executable, ROOT / "scripts" / "smollm2.py", "smollm2")
    mtpctl = (sys.executable, "-m", "mtpctl")
    printed = run(tmp_path, *mtpctl, "init", "sums", "--template", "reasoning-gym", "--model", "smollm2", CUDA_VISIBLE_DEVICES="")
    assert "train.rl.optimizer.lr: 3e-05" in printed
    held_out = tmp_path / "sums" / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:16]))
    sets = ("train.draft.steps=4", "train.draft.samples=8", "train.rl.steps=2", "train.rl.group_size=4", "cluster.num_cpus=4")
    run(tmp_path, *mtpctl, "train", "sums/recipe.yaml", "--plain", *(part for each in sets for part in ("--set", each)))
    rows = [json.loads(line) for line in (tmp_path / "runs" / "sums" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "actor/pg_loss" in row] == [1, 2]
    evaluations = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 2] and all(row["eval/problems"] == 16 for row in evaluations)
    assert all(0 < row["eval/unseen_problems"] < 16 for row in evaluations), "some held-out rows are training rows"
    assert not [row for row in rows if row.get("event") == "error"]
