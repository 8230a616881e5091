"""Runs whose engines have FP8 weights, with drafts, a log-prob server in bf16, and every tensor of every sync compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpctl.families.quantization import select_fp8_names
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from tests.fakes.family_runs import command, recipe, updates
from tests.fakes.fp8_models import ATTENTION, EXPERTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES: dict[str, dict[str, Any]] = {"mimo": ATTENTION | {"hidden_size": 256}, "glm4-moe": ATTENTION | EXPERTS}


@pytest.mark.parametrize("family", SIZES)
def test_run_completes_and_resumes(family: str, tmp_path: Path) -> None:
    path = recipe(family, "bf16", "cpu", tmp_path)
    tree = yaml.safe_load(path.read_text())
    tree["model"]["config"] |= {name: value for name, value in SIZES[family].items() if name in tree["model"]["config"]}
    same = {}
    for quantization in ("fp8", "none"):
        tree["rollout"]["quantization"], tree["run_dir"] = quantization, str(tmp_path / quantization)
        # The same correction, so that the runs differ in the engine's weights alone.
        tree["train"]["rl"]["correction"] = {"mode": "truncate"}
        path.write_text(yaml.safe_dump(tree))
        command("-m", "mtpctl", "train", path, "--plain")
        rows = updates(tmp_path / quantization)
        same[quantization] = max(row.get("rollout_corr/abs_diff_same_version", 0.0) for row in rows)
    resumed = command(
        "-m",
        "mtpctl",
        "train",
        path,
        "--plain",
        "--set",
        "train.rl.steps=3",
        "--set",
        "rollout.quantization=fp8",
        "--set",
        f"run_dir={tmp_path / 'fp8'}",
    )
    assert "resume: rl resumes after step 2" in resumed
    rows = updates(tmp_path / "fp8")
    shape = shape_of(tree["model"]["config"])
    names = select_fp8_names(shape)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {row["sync/verified"] for row in rows} == {len(tensor_shapes(shape)) + len(names)}, "values and scales"
    assert any(row["rollout/spec_drafted"] for row in rows)
    # The server scores with unquantized weights, so the difference contains the quantization's.
    assert 0 < same["none"] < same["fp8"]
    print(f"{family}: mean |Δ log-prob| at equal weights {same['none']:.4f} nats in bf16, {same['fp8']:.4f} in FP8")
