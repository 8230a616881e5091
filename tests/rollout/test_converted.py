"""Acceptance of a converted folder's MTP head in vLLM equals the trainer's estimate."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from tests.environment import TREE, with_tree
from tests.fakes.engines import Loop, cpu_settings


def drafting(what: str, root: Path) -> str:
    """The Megatron side, in a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fakes.convert_drafting", what, str(root)]
    done = subprocess.run(command, cwd=TREE, env=with_tree(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_acceptance_is_the_trainers(start_engine: Callable[[VllmSettings], VllmEngine], run: Loop, tmp_path: Path) -> None:
    drafting("train", tmp_path)
    engine = start_engine(cpu_settings(tmp_path / "converted", k=1, max_in_flight=256))

    async def samples() -> list[Sample]:
        prompts = [[first, (first + 5 * step) % 128] for first in range(0, 128, 2) for step in (1, 3)]
        requested = [GenerationRequest(Sample(f"p{i}", "g", prompt), 24, temperature=0.0) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requested))

    result = run(samples())
    drafted, accepted = sum(s.speculation.drafted for s in result), sum(s.speculation.accepted for s in result)
    (tmp_path / "samples.json").write_text(json.dumps([[s.prompt_ids.tolist(), s.response_ids.tolist()] for s in result]))
    trainers = float(drafting("accept", tmp_path).rsplit("mtp/accept_1", 1)[1].split()[0])

    print(f"accepted {accepted} of {drafted} drafts; the trainer says {trainers}")
    assert 0.05 < accepted / drafted < 0.95 and abs(accepted / drafted - trainers) <= 0.02, (accepted / drafted, trainers)
