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

LARGEST = 1e-5
"""Difference of any logit in fp32."""
ROUNDING = 1.5
"""In bf16, in which vLLM's linear attention runs on a CPU: how far the engine may be from the trainer in fp32, in times of how far the
trainer in bf16 is. Rounding alone makes several percent of the logits' norm over a few layers of linear attention."""
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
    exact = trained(folder, ids, draftings, "fp32", tmp_path)
    served = [torch.stack([each.logits[depth] for each in draftings]).float() for depth in range(DRAFTS)]
    if precision == "fp32":
        off = [float((mine - theirs).abs().max()) for mine, theirs in shared(exact, served)]
        assert max(off) <= LARGEST, off
        return
    off = [float((mine - theirs).norm() / mine.norm()) for mine, theirs in shared(exact, served)]
    rounded = trained(folder, ids, draftings, precision, tmp_path)
    own = [float((mine - theirs).norm() / mine.norm()) for mine, theirs in shared(exact, list(rounded.unbind(1)))]
    print(family, "engine", [f"{each:.1%}" for each in off], "trainer", [f"{each:.1%}" for each in own])
    assert all(mine <= ROUNDING * theirs for mine, theirs in zip(off, own, strict=True)), (off, own)


def shared(exact: torch.Tensor, others: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each depth the exact logits and the others, over the part of the vocabulary that both have, padded or not."""
    return [(mine[:, : theirs.shape[1]], theirs[:, : mine.shape[1]]) for mine, theirs in zip(exact.unbind(1), others, strict=True)]
