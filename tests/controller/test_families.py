"""The main job for every family with an MTP head, from random weights to a folder that stock vLLM serves: each a toy of odd sizes.

RL with one draft token a step, every tensor of every sync compared, old log-probs from servers; a checkpoint, a second start that
resumes, the way back to a Hugging Face folder, and a vLLM that knows nothing of this package.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from tests.fakes.family_runs import command, end, options, recipe, start, updates
from tests.fakes.toys import SERVED, TOYS

# Two starts of trainer, engine and server, a conversion and one more engine: two minutes on two cores, most of it imports.
pytestmark = pytest.mark.timeout(900)
CASES = [
    *(pytest.param(family, precision, "cpu", marks=pytest.mark.slow) for family, precision in SERVED),
    *(pytest.param(family, "bf16", "cuda", marks=pytest.mark.gpu) for family in TOYS),
]

APART = {"fp32": 1e-4, "bf16": 0.05}
"""Mean difference (nats) that passes between trainer and engine at equal weights: rounding, and in bf16 an expert chosen otherwise."""

PATCHED_ON_CPU = ("nemotron-h",)
"""Families that stock vLLM does not serve on a CPU: there, vLLM with this package's patches serves the folder."""

STOCK = """
import json, os, sys
from vllm import LLM, SamplingParams
sys.stdin.readline()
drafter = os.path.join(sys.argv[1], "drafter")
method = {"method": sys.argv[4]} | ({"model": drafter} if os.path.isdir(drafter) else {})
llm = LLM(
    sys.argv[1], dtype=sys.argv[2], max_num_seqs=4, max_model_len=128, enable_prefix_caching=False,
    speculative_config=method | {"num_speculative_tokens": 1}, **json.loads(sys.argv[3]),
)
(found,) = llm.generate([{"prompt_token_ids": list(range(5, 25))}], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
print(json.dumps(list(found.outputs[0].token_ids)))
"""


@pytest.mark.parametrize(("family", "precision", "device"), CASES)
def test_family_trains_end_to_end_and_is_served_by_stock_vllm(family: str, precision: str, device: str, tmp_path: Path) -> None:
    created, run_dir, folder = recipe(family, precision, device, tmp_path), tmp_path / "run", tmp_path / "folder"
    command("-m", "mtpctl", "train", created, "--plain")
    # It imports vLLM on the core that the second start leaves idle at first, and gets the folder's name once it exists.
    # vLLM by itself serves latent attention in bfloat16 alone where a CPU has AMX.
    fp32 = "bfloat16" if "kv_lora_rank" in TOYS[family] and torch.cpu._is_amx_tile_supported() else "float32"
    dtype = {"fp32": fp32, "bf16": "bfloat16"}[precision]
    eager = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    stock = eager if device == "cpu" else options(family) | {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    shape = shape_of(TOYS[family])
    method = "eagle3" if shape.eagle3 else "dflash" if shape.dflash else "mtp"
    plugins = {"MTPCTL_VLLM": "1"} if device == "cpu" and family in PATCHED_ON_CPU else {"VLLM_PLUGINS": ""}
    with start("-c", STOCK, folder, dtype, json.dumps(stock), method, **plugins, VLLM_ENABLE_V1_MULTIPROCESSING="0") as serving:
        try:
            resumed = command("-m", "mtpctl", "train", created, "--plain", "--set", "train.rl.steps=3")
            command("-m", "mtpctl", "convert-hf", run_dir, folder, "--verify")
            message = end(serving)
        finally:
            serving.kill()
    assert "resume: rl resumes after step 2" in resumed
    rows = updates(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3], "the second start goes on where the first one ended"
    assert {row["sync/verified"] for row in rows} == {len(tensor_shapes(shape))}, "every tensor of the folder, target's and draft's"
    assert any(row["rollout/spec_drafted"] for row in rows) and all(row["mtp/loss_1"] > 0 for row in rows)
    assert all(("moe/replay_agreement" in row) == bool(shape.moe) for row in rows), "experts are those of the rollout"
    same = [row["rollout_corr/abs_diff_same_version"] for row in rows if "rollout_corr/abs_diff_same_version" in row]
    assert same and max(same) < APART[precision], "the server's log-probs are the engine's where both have the same weights"
    assert len(json.loads(message.splitlines()[-1])) == 16
    accepted = [row["rollout/spec_accept_rate"] for row in rows if "rollout/spec_accept_rate" in row]
    print(
        f"{family}, {precision} on {device}: {rows[-1]['sync/verified']:.0f} tensors compared at each sync, "
        f"{min(accepted):.0%} to {max(accepted):.0%} of drafts accepted, {max(same):.1e} nats"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets", "section"),
    [
        ("glm4-moe-lite", ["linear_q_up_proj", "linear_proj"], "adapter"),
        # vLLM on a CPU has no adapters for experts, and none for MiMo-V2-Flash.
        *(
            (family, ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "target")
            for family in ("ernie4.5-moe", "mimo-v2-flash", "nemotron-h")
        ),
        ("mistral with EAGLE-3", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "adapter"),
    ],
)
def test_family_trains_an_adapter_with_its_drafter(family: str, targets: list[str], section: str, tmp_path: Path) -> None:
    """RL and a resumed run; the adapter is synced by itself or merged into the target."""
    created, run_dir = recipe(family, "fp32", "cpu", tmp_path), tmp_path / "run"
    lora = json.dumps({"rank": 4, "alpha": 8, "targets": targets})
    options = ("--plain", "--set", f"train.lora={lora}", "--set", f"sync.sections=[{section}, draft]")
    command("-m", "mtpctl", "train", created, *options)
    resumed = command("-m", "mtpctl", "train", created, *options, "--set", "train.rl.steps=3")
    assert "resume: rl resumes after step 2" in resumed
    rows = updates(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["sync/verified"] > 0 for row in rows)
    assert any(row["rollout/spec_accepted"] for row in rows)
    assert all(("moe/replay_agreement" in row) == bool(shape_of(TOYS[family]).moe) for row in rows)
    same = [row["rollout_corr/abs_diff_same_version"] for row in rows if "rollout_corr/abs_diff_same_version" in row]
    assert same and max(same) < APART["fp32"], same
    print(f"{family}: {rows[-1]['sync/verified']:.0f} tensors compared at each sync, {max(same):.1e} nats")
