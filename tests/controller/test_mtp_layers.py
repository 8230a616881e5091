"""Models of three MTP layers through the main job: as often accepted, position by position, as the trainer expects of its depths.

On a GPU each layer drafts the token of its depth. On a CPU vLLM has the first layer alone draft, one token a step; the others are trained
and synced there, and not served.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from tests.fakes.family_runs import command, recipe, updates
from tests.fakes.toys import TOYS

LAYERS = 3
ONE_LAYER = ("ernie4.5-moe", "nemotron-h")
FAMILIES = [
    family
    for family, config in TOYS.items()
    if "linear_conv_kernel_dim" not in config and family not in ONE_LAYER and not family.endswith(("EAGLE-3", "DFlash"))
]
"""Families whose models may have several MTP layers. Those with linear attention, and ERNIE 4.5, would share one projection between the
layers, and vLLM serves one of Nemotron-H."""
CASES = [
    *(pytest.param(family, "cpu", False, marks=pytest.mark.slow, id=f"{family}-cpu") for family in FAMILIES),
    *(pytest.param(family, "cuda", False, marks=pytest.mark.gpu, id=f"{family}-cuda") for family in FAMILIES),
    # The one drafter of these that vLLM compiles.
    pytest.param("deepseek-v3", "cuda", True, marks=pytest.mark.gpu, id="deepseek-v3-cuda-compiled"),
]
SLACK = 0.015
"""Beyond chance: the policy is updated between what was sampled and what is expected."""

pytestmark = pytest.mark.timeout(900)


def settings(family: str, device: str, root: Path, *, compiled: bool = False) -> Path:
    """Sixty supervised updates, which teach every depth something, and three of RL with 128 responses of 32 tokens at most."""
    path = recipe(family, "bf16" if device == "cuda" else "fp32", device, root)
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    # With fewer decoder layers vLLM would rename some of MiMo's MTP layers twice, from k to layers + k.
    tree["model"]["config"] |= {"num_nextn_predict_layers": LAYERS, "num_hidden_layers": LAYERS}
    # Drafts of a head that has learned the distribution of its targets are sampled from it.
    tree["mtp"] = {"loss": "soft_ce", "loss_scale": 0.3}
    tree["train"]["sft"] = {"steps": 60, "batch_size": 32, "optimizer": {"lr": 5e-3}}
    tree["train"]["rl"] |= {"steps": 3, "prompts_per_step": 16, "group_size": 8, "optimizer": {"lr": 1e-5, "mtp_lr": 1e-4}}
    tree["train"]["checkpoint_every"] = 0
    speculation = {"num_tokens": LAYERS if device == "cuda" else 1, "draft_method": "probabilistic"}
    tree["rollout"] |= {"max_tokens": 32, "max_in_flight": 32, "speculation": speculation}
    if device == "cuda":
        # Steps of up to 32 requests with their drafts as CUDA graphs.
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": [4, 8, 16, 32, 64, 128]}
        tree["rollout"]["engine_args"]["compilation_config"] = graphs if compiled else graphs | {"mode": 0}
    path.write_text(yaml.safe_dump(tree))
    return path


def weighted(rows: list[dict[str, Any]], name: str) -> float:
    """Mean of a metric over updates, each by its number of drafts."""
    drafted = [row["rollout/spec_drafted"] for row in rows]
    return float(sum(row[name] * weight for row, weight in zip(rows, drafted, strict=True)) / sum(drafted))


@pytest.mark.parametrize(("family", "device", "compiled"), CASES)
def test_acceptance_of_each_layer_matches_its_expectation(family: str, device: str, compiled: bool, tmp_path: Path) -> None:
    path = settings(family, device, tmp_path, compiled=compiled)
    command("-m", "mtpctl", "train", path, "--plain")
    rows = updates(tmp_path / "run")
    shape = shape_of(yaml.safe_load(path.read_text())["model"]["config"])
    assert {row["sync/verified"] for row in rows} == {len(tensor_shapes(shape))}, "every tensor of all layers, at every sync"
    assert all(row[f"mtp/loss_{depth}"] > 0 for row in rows for depth in range(1, LAYERS + 1))
    positions = range(1, (LAYERS if device == "cuda" else 1) + 1)
    served = [weighted(rows, f"rollout/spec_accept_rate_{position}") for position in positions]
    expected = [weighted(rows, f"mtp/expected_rate_{position}") for position in positions]
    steps = sum(row["rollout/spec_drafted"] for row in rows) / len(positions)
    for name, rates in (("served", served), ("expected", expected)):
        print(f"| {family} of {LAYERS} MTP layers on {device}, {name} | {steps:.0f} | {' | '.join(f'{rate:.1%}' for rate in rates)} |")
    for mine, theirs in zip(expected, served, strict=True):
        error = math.sqrt(mine * (1 - mine) / steps)
        assert abs(mine - theirs) < 4 * error + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize(("family", "precision"), [("qwen3.5", "bf16"), ("deepseek-v3", "fp32")])
def test_expected_acceptance_after_a_warm_start_matches_the_served_one(
    family: str, precision: str, temperature: float, tmp_path: Path
) -> None:
    """One layer drafts two tokens. The update measures the weights that sampled, so there is no slack beyond chance."""
    path = recipe(family, precision, "cpu", tmp_path)
    tree: dict[str, Any] = yaml.safe_load(path.read_text())
    tree["mtp"] = {"repeat": 2}
    tree["train"]["sft"] = {"steps": 60, "batch_size": 32, "optimizer": {"lr": 5e-3}}
    tree["train"]["rl"] |= {"steps": 1, "prompts_per_step": 32, "group_size": 8}
    tree["train"]["checkpoint_every"] = 0
    tree["rollout"] |= {"max_in_flight": 64, "temperature": temperature}
    tree["rollout"]["speculation"] = {"num_tokens": 2, "draft_method": "probabilistic"}
    del tree["logprob"]
    path.write_text(yaml.safe_dump(tree))
    command("-m", "mtpctl", "train", path, "--plain")
    (row,) = updates(tmp_path / "run")
    steps = row["rollout/spec_drafted"] / 2
    for position in (1, 2):
        served, expected = row[f"rollout/spec_accept_rate_{position}"], row[f"mtp/expected_rate_{position}"]
        print(f"{family} at {temperature}, position {position}: served {served:.1%}, expected {expected:.1%}, {steps:.0f} steps")
        assert served > 0 and abs(expected - served) < 4 * math.sqrt(expected * (1 - expected) / steps)
