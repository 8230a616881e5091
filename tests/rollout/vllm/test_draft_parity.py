"""What the trainer trains is what the engine drafts: logits of depths 1 to 3, against the engine's own at each step of a response."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.families.toys import SERVED, TOYS, toy_folder
from tests.rollout.vllm.engine_drafts import DRAFTS, Drafting

BOUND = {"fp32": 1e-5, "bf16": 0.1}
"""Of the largest logit's difference in fp32. In bf16, in which vLLM's linear attention runs on a CPU, of the difference's norm to the
logits', which rounding alone makes some percent of over a few layers."""
CASES = [
    pytest.param(family, precision, marks=[] if (family, precision) == ("mimo", "fp32") else pytest.mark.slow)
    for family, precision in SERVED
]


def program(name: str, *arguments: object) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.rollout.vllm.{name}", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=200)


def drafted(folder: Path, precision: str, scratch: Path) -> tuple[list[int], list[Drafting]]:
    """The tokens of a response of the engine, and its draftings."""
    program("engine_drafts", folder, precision, scratch / "drafts.pt")
    found = torch.load(scratch / "drafts.pt")
    return found["ids"], [Drafting(**each) for each in found["draftings"]]


def trained(folder: Path, ids: list[int], draftings: list[Drafting], precision: str, scratch: Path) -> torch.Tensor:
    """The trainer's logits [draftings, depths, vocabulary], had the engine's drafts been the tokens that follow."""
    samples = [([*ids[: each.position + 1], each.token, *each.drafts[:-1]], each.position) for each in draftings]
    file, out = scratch / "samples.json", scratch / "logits.pt"
    file.write_text(json.dumps(samples))
    program("draft_depths", folder, precision, file, out)
    found: torch.Tensor = torch.load(out)
    return found


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_depths_are_the_drafts_of_the_engine(family: str, precision: str, tmp_path: Path) -> None:
    folder = toy_folder(TOYS[family] | {"initializer_range": 0.1}, tmp_path / "model", 0, precision)
    ids, draftings = drafted(folder, precision, tmp_path)
    assert len(draftings) > 5
    for each in draftings:
        assert ids[each.position + 1] == each.token
    found = trained(folder, ids, draftings, precision, tmp_path)
    worst = [0.0] * DRAFTS
    for each, depths in zip(draftings, found, strict=True):
        for depth, (mine, theirs) in enumerate(zip(depths, each.logits, strict=True)):
            difference = mine[: len(theirs)] - theirs[: len(mine)]
            off = difference.abs().max() if precision == "fp32" else difference.norm() / theirs.norm()
            worst[depth] = max(worst[depth], float(off))
    print(family, precision, [f"{each:.2g}" for each in worst])
    assert max(worst) <= BOUND[precision], worst
