"""What the trainer trains is what the engine drafts: logits of depths 1 to 3, against the engine's own at each step of a response.

vLLM lays out its groups of experts once a process, so a slow case is run alone: `-m slow -k glm4-moe-fp32`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings, engine_settings
from mtpctl.samples import GenerationRequest, Sample
from tests.families.toys import SERVED, TOYS, toy_folder
from tests.rollout.conftest import Loop

DRAFTS = 3
PROMPT = [7, 3, 11, 42, 5]
BOUND = {"fp32": 1e-5, "bf16": 0.05}
"""Of the largest logit's difference in fp32. In bf16, in which vLLM's linear attention runs on a CPU, of the difference's norm to the
logits', which rounding alone makes some percent of over a few layers."""
CASES = [pytest.param(family, precision, marks=[] if family == "mimo" else pytest.mark.slow) for family, precision in SERVED]


@dataclass
class Drafting:
    """One step of the engine's drafter: the last position with a known state, the token behind it, and logits and choice of each draft."""

    position: int
    token: int
    logits: list[torch.Tensor] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Drafting]:
    """Every drafting of an engine in this process, for one request at a time."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    found: list[Drafting] = []
    propose = SpecDecodeBaseProposer.propose

    def recording(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        positions, place = kwargs["target_positions"], kwargs["token_indices_to_sample"]
        last = len(positions) - 1 if place is None else int(place[0])
        found.append(Drafting(int(positions[last]), int(kwargs["next_token_ids"][0])))
        drafts = propose(self, *args, **kwargs)
        found[-1].drafts = drafts[0].tolist()
        return drafts

    def greedy(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.model.compute_logits(hidden_states)
        found[-1].logits.append(logits[0].float().clone())
        return logits.argmax(dim=-1)

    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", recording)
    monkeypatch.setattr(SpecDecodeBaseProposer, "_greedy_sample", greedy)
    return found


def trained(folder: Path, ids: list[int], draftings: list[Drafting], precision: str, scratch: Path) -> torch.Tensor:
    """The trainer's logits [draftings, depths, vocabulary], had the engine's drafts been the tokens that follow."""
    samples = [([*ids[: each.position + 1], each.token, *each.drafts[:-1]], each.position) for each in draftings]
    file, out = scratch / "samples.json", scratch / "logits.pt"
    file.write_text(json.dumps(samples))
    command = [sys.executable, "-W", "ignore", "-m", "tests.rollout.vllm.draft_depths", folder, precision, file, out]
    subprocess.run(list(map(str, command)), check=True, timeout=200)
    found: torch.Tensor = torch.load(out)
    return found


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_depths_are_the_drafts_of_the_engine(
    family: str,
    precision: str,
    tmp_path: Path,
    start_engine: Callable[[VllmSettings], VllmEngine],
    run: Loop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = toy_folder(TOYS[family] | {"initializer_range": 0.1}, tmp_path / "model", 0, precision)
    options = VllmConfig(max_in_flight=4, context=128, threads=1, kv_cache_bytes=64 << 20, speculation=SpeculationConfig(num_tokens=DRAFTS))
    served = start_engine(engine_settings(options, model=str(folder), precision=precision, device="cpu", seed=0))  # type: ignore[arg-type]
    draftings = recorded(monkeypatch)
    sample = run(served.generate(GenerationRequest(Sample("p", "g", list(PROMPT)), 24, temperature=1.0, seed=1)))
    draftings = [each for each in draftings if len(each.logits) == DRAFTS and each.position >= len(PROMPT) - 1]
    assert len(draftings) > 5
    ids = [*PROMPT, *sample.response_ids]
    for each in draftings[:-1]:
        assert ids[each.position + 1] == each.token
    found = trained(folder, ids, draftings[:-1], precision, tmp_path)
    worst = [0.0] * DRAFTS
    for each, depths in zip(draftings[:-1], found, strict=True):
        for depth, (mine, theirs) in enumerate(zip(depths, each.logits, strict=True)):
            difference = mine[: len(theirs)] - theirs[: len(mine)]
            off = difference.abs().max() if precision == "fp32" else difference.norm() / theirs.norm()
            worst[depth] = max(worst[depth], float(off))
    assert max(worst) <= BOUND[precision], worst
