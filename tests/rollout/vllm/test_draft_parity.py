"""What the trainer trains is what the engine drafts: logits of depths 1 to 3, against the engine's own at each step of a response."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtpctl.families.reading import shape_of
from mtpctl.routes import Routes
from tests.fakes.draft_depths import depth_logits
from tests.fakes.engine_drafts import DRAFTS, Drafting, response
from tests.fakes.toys import NARROW_VALUES, ON_GPUS, SERVED, TOYS, toy_folder

LARGEST = 1e-5
"""Difference of any logit in fp32."""
ROUNDING = 1.5
"""In bf16, in which vLLM's linear attention runs on a CPU: how far the engine may be from the trainer in fp32, in times of how far the
trainer in bf16 is. Rounding alone makes several percent of the logits' norm over a few layers of linear attention."""
CASES = [
    pytest.param(family, precision, marks=[] if (family, precision) == ("mimo", "fp32") else pytest.mark.slow)
    for family, precision in SERVED
]


def program(name: str, *arguments: object, gpus: str | None = None) -> None:
    """Run a module of tests.fakes. gpus: CUDA_VISIBLE_DEVICES, "" for none; None: all."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.fakes.{name}", *map(str, arguments)]
    observed = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    subprocess.run(command, check=True, timeout=200, env=os.environ | observed)


def trained(
    folder: Path, ids: list[int], draftings: list[Drafting], precision: str, scratch: Path, routes: Routes | None = None
) -> torch.Tensor:
    """The trainer's logits [draftings, depths, vocabulary], had the engine's drafts been the tokens that follow. routes: to replay."""
    samples = [([*ids[: each.position + 1], each.token, *each.drafts[:-1]], each.position) for each in draftings]
    if not torch.cuda.is_available():
        return depth_logits(folder, precision, samples, routes)
    file, out = scratch / "samples.json", scratch / "logits.pt"
    file.write_text(json.dumps({"samples": samples, "routes": None if routes is None else routes.tolist()}))
    program("draft_depths", folder, precision, file, out, gpus="")
    result: torch.Tensor = torch.load(out)
    return result


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_depths_are_the_drafts_of_the_engine(family: str, precision: str, tmp_path: Path) -> None:
    folder = toy_folder(TOYS[family] | {"initializer_range": 0.1}, tmp_path / "model", 0, precision)
    ids, draftings, routes = asyncio.run(response(folder, precision))
    assert len(draftings) > 5
    for each in draftings:
        assert ids[each.position + 1] == each.token
    # In bf16 rounding may select another expert for a token. All later drafts attend to it, and differ by several times the rounding error,
    # so the trainer replays the engine's experts of the decoder.
    routes = routes if precision == "bf16" else None
    exact = trained(folder, ids, draftings, "fp32", tmp_path, routes)
    served = [torch.stack([each.logits[depth] for each in draftings]).float() for depth in range(DRAFTS)]
    if precision == "fp32":
        off = [float((mine - theirs).abs().max()) for mine, theirs in shared(exact, served)]
        assert max(off) <= LARGEST, off
        return
    # Experts of MTP layers are not replayed. If fp32 has shown that all drafts are equal, the median leaves out those of other experts.
    distance = median_distance if (family, "fp32") in SERVED else norm_distance
    off = [distance(mine, theirs) for mine, theirs in shared(exact, served)]
    rounded = trained(folder, ids, draftings, precision, tmp_path, routes)
    own = [distance(mine, theirs) for mine, theirs in shared(exact, list(rounded.unbind(1)))]
    print(family, "engine", [f"{each:.1%}" for each in off], "trainer", [f"{each:.1%}" for each in own])
    assert all(mine <= ROUNDING * theirs for mine, theirs in zip(off, own, strict=True)), (off, own)


@pytest.mark.slow
def test_depths_with_narrow_values_are_the_drafts_of_the_engine(tmp_path: Path) -> None:
    """MiMo-V2-Flash as published, with padded values in vLLM."""
    folder = toy_folder(TOYS["mimo-v2-flash"] | NARROW_VALUES | {"initializer_range": 0.1}, tmp_path / "model", 0, "fp32")
    ids, draftings, _ = asyncio.run(response(folder, "fp32"))
    assert len(draftings) > 5
    exact = trained(folder, ids, draftings, "fp32", tmp_path)
    served = [torch.stack([each.logits[depth] for each in draftings]).float() for depth in range(DRAFTS)]
    off = [float((mine - theirs).abs().max()) for mine, theirs in shared(exact, served)]
    assert max(off) <= LARGEST, off


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mimo", "deepseek-v3", "glm4-moe", "glm4-moe-lite", "mimo-v2-flash"])
def test_each_of_several_layers_drafts_its_depth_on_a_gpu(family: str, tmp_path: Path) -> None:
    """Trainer and rounding as above; vLLM serves several layers at their depths on a GPU alone, and its attention there is not in fp32."""
    sizes = {"initializer_range": 0.1, "num_nextn_predict_layers": DRAFTS, "num_hidden_layers": DRAFTS}
    folder = toy_folder(ON_GPUS[family] | sizes, tmp_path / "model", 0, "bf16")
    program("gpu_drafts", folder, tmp_path / "drafts.pt")
    result = torch.load(tmp_path / "drafts.pt")
    ids, draftings = result["ids"], [Drafting(**each) for each in result["draftings"]]
    assert len(draftings) > 5
    for each in draftings:
        assert ids[each.position + 1] == each.token
    exact, rounded = (trained(folder, ids, draftings, precision, tmp_path) for precision in ("fp32", "bf16"))
    served = [torch.stack([each.logits[depth] for each in draftings]) for depth in range(DRAFTS)]
    # Rounding may select another expert for a token; the median leaves these drafts out.
    distance = median_distance if shape_of(ON_GPUS[family]).moe else norm_distance
    off, own = ([distance(mine, theirs) for mine, theirs in shared(exact, others)] for others in (served, list(rounded.unbind(1))))
    print(family, "engine", [f"{each:.1%}" for each in off], "trainer", [f"{each:.1%}" for each in own])
    assert all(mine <= ROUNDING * theirs for mine, theirs in zip(off, own, strict=True)), (off, own)


def norm_distance(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the norm of all logits."""
    return float((exact - other).norm() / exact.norm())


def median_distance(exact: torch.Tensor, other: torch.Tensor) -> float:
    """The median over draftings, each relative to the norm of its logits."""
    return float(((exact - other).norm(dim=1) / exact.norm(dim=1)).median())


def shared(exact: torch.Tensor, others: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each depth the exact logits and the others, over the part of the vocabulary that both have, padded or not."""
    return [(mine[:, : theirs.shape[1]], theirs[:, : mine.shape[1]]) for mine, theirs in zip(exact.unbind(1), others, strict=True)]
