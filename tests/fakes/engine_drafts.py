"""An engine's drafts with the logits behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import build_engine_settings
from mtpctl.routes import Routes, RouteShape
from mtpctl.samples import GenerationRequest, Sample

DRAFTS = 3
PROMPT = [7, 3, 11, 42, 5]


@dataclass
class Drafting:
    """One step of the engine's drafter: the last position with a known state, the token behind it, and logits and choice of each draft."""

    position: int
    token: int
    logits: list[torch.Tensor] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


@contextmanager
def recording() -> Iterator[list[Drafting]]:
    """Every drafting of this process's engine, for one request at a time."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    result: list[Drafting] = []
    propose = SpecDecodeBaseProposer.propose

    def record(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        positions, place = kwargs["target_positions"], kwargs["token_indices_to_sample"]
        last = len(positions) - 1 if place is None else int(place[0])
        result.append(Drafting(int(positions[last]), int(kwargs["next_token_ids"][0])))
        drafts = propose(self, *args, **kwargs)
        result[-1].drafts = drafts[0].tolist()
        return drafts

    def greedy(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.model.compute_logits(hidden_states)
        result[-1].logits += logits.float().clone()  # A block drafter computes all drafts at once.
        return logits.argmax(dim=-1)

    with patch.multiple(SpecDecodeBaseProposer, propose=record, _greedy_sample=greedy):
        yield result


async def response(folder: Path, precision: str) -> tuple[list[int], list[Drafting], Routes | None]:
    """The tokens of a prompt and its response, one `Drafting` for each step of the drafter within the response, and the tokens' routes."""
    routes = RouteShape.of(HfFolder.open(folder).shape)
    options = VllmConfig(max_in_flight=4, context=128, threads=1, kv_cache_bytes=64 << 20, speculation=SpeculationConfig(num_tokens=DRAFTS))
    settings = build_engine_settings(
        options,
        model=str(folder),
        precision=precision,  # type: ignore[arg-type]
        device="cpu",
        routes=routes.layers if routes else (),
    )
    engine = await VllmEngine.start(settings)
    try:
        with recording() as draftings:
            sample = await engine.generate(GenerationRequest(Sample("p", "g", list(PROMPT)), 24, temperature=1.0, seed=1))
    finally:
        await engine.shutdown()
    whole = [each for each in draftings if len(each.logits) == DRAFTS and each.position >= len(PROMPT) - 1]
    return [*PROMPT, *sample.response_ids], whole[:-1], sample.routes
