"""Drafts sampled from the drafter's distribution: never visible in what is sampled, and accepted as often as the two distributions overlap.

One engine with three draft tokens a step, and the toy of `test_speculation`: logits that depend on the last token alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtpctl.recipe.rollout import SpeculationConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.trainer.acceptance import StepEstimate
from tests.fakes.engine_checkpoints import write_checkpoint
from tests.fakes.engines import Loop, cpu_settings
from tests.fakes.speculation import CASES, CONFIG, check_distribution, exact, requests, unlike_tensors

DRAFTS = 3
Generate = Callable[[list[GenerationRequest]], list[Sample]]


@pytest.fixture(scope="module")
def generate(start_engine: Callable[[VllmSettings], VllmEngine], run: Loop, tmp_path_factory: pytest.TempPathFactory) -> Generate:
    tensors, _, _ = unlike_tensors()
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG | {"model_type": "mimo"}, tensors)
    drafts = SpeculationConfig(num_tokens=DRAFTS, draft_method="probabilistic")
    engine = start_engine(cpu_settings(folder, speculation=drafts, max_in_flight=256))

    async def all_of(requested: list[GenerationRequest]) -> list[Sample]:
        return await asyncio.gather(*(engine.generate(request) for request in requested))

    return lambda requested: run(all_of(requested))


def check_acceptance(samples: list[Sample], target: torch.Tensor, draft: torch.Tensor, case: dict[str, Any]) -> None:
    """Accepted drafts by position, against what the two distributions and the sampled tokens say."""
    p = torch.stack([exact(target[token], **case) for token in range(len(target))])
    q = (draft.double() / case["temperature"]).softmax(1)
    overlap = torch.minimum(p, q).sum(1)
    walk, counted, steps = StepEstimate(), [0] * DRAFTS, 0
    for sample in samples:
        before, here = torch.tensor([3, *sample.response_ids[:-1]]), torch.tensor(sample.response_ids)
        retained = (q[before, here] / p[before, here]).clamp(max=1).tolist()
        walk.add([overlap[before].tolist()] * DRAFTS, [retained] * DRAFTS, len(here))
        steps += sample.speculation.steps
        counted = [a + b for a, b in zip(counted, sample.speculation.accepted_by_position, strict=True)]
    for expected, result in zip(walk.accepted, counted, strict=True):
        share = expected / walk.steps
        assert 0.02 < share < 0.98
        assert abs(result / steps - share) < 6 * (share * (1 - share) / steps) ** 0.5


@pytest.mark.parametrize("case", ["T=1.0", "top-p"])
def test_sampled_drafts_do_not_change_the_distribution(generate: Generate, case: str) -> None:
    _, logits, draft = unlike_tensors()
    samples = generate(requests(32, 125, **CASES[case]))
    check_distribution(samples, logits, CASES[case])
    check_acceptance(samples, logits, draft, CASES[case])


def test_routes_are_right_next_to_greedy_requests(generate: Generate) -> None:
    """A batch of both kinds: greedy requests take the target's first choice, the others follow their distribution."""
    _, logits, _ = unlike_tensors()
    greedy = requests(8, 60, temperature=0.0)
    samples = generate(requests(16, 125, temperature=1.0) + greedy)
    check_distribution(samples[:16], logits, {"temperature": 1.0})
    for sample in samples[16:]:
        for last, token in zip([3, *sample.response_ids], sample.response_ids, strict=False):
            assert token == int(logits[last].argmax())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_forty_thousand_tokens_follow_the_distribution(generate: Generate, case: str) -> None:
    _, logits, draft = unlike_tensors()
    samples = generate(requests(320, 125, **CASES[case]))
    check_distribution(samples, logits, CASES[case])
    check_acceptance(samples, logits, draft, CASES[case])
