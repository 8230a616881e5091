"""Answering a file of prompts with a fake engine: requests, written samples and summary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path

import pytest

from mtpctl.errors import RuntimeFailure
from mtpctl.jobs.rollout import Prompt, generate_responses, missing_responses, summary
from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.sample_file import Origin, SampleFile, Tally
from mtpctl.samples import GenerationRequest, Sample, Speculation

PROMPTS = [Prompt(0, "p:1", "1+1=", [1, 2, 3], "2"), Prompt(1, "p:2", "a fish", [4, 5], None)]
ROLLOUT = VllmConfig(temperature=0.7, top_p=0.9, top_k=5, max_tokens=8, stop=["#"], stop_ids=[4], deadline_s=30.0)


class Echo:
    """Answers in reverse order. Fails after `fail_after` samples."""

    def __init__(self, fail_after: int = 1 << 30) -> None:
        self.requests: list[GenerationRequest] = []
        self.fail_after = fail_after

    async def generate(self, requests: AsyncIterable[GenerationRequest]) -> AsyncGenerator[Sample]:
        self.requests = [request async for request in requests]
        for inputs, request in enumerate(reversed(self.requests)):
            if inputs == self.fail_after:
                raise RuntimeFailure("every rollout replica failed")
            sample = request.sample
            sample.append([50, 60], [-1.0, -2.0], 7)
            sample.finish_reason, sample.speculation = "stop", Speculation(2, 1, [1], 2)
            yield sample

    async def control_speculation(self, drafts: int | None = None) -> list[SpeculationState]:
        return []


async def reward(text: str, sample: Sample) -> float:
    return float(text == "50 60" and sample.prompt_id == "p:1")


def answer(engine: Echo, path: Path, n: int, seed: int | None = None) -> Tally:
    with SampleFile.open(path, Origin("tiny", {}), {prompt.prompt_id: prompt.text for prompt in PROMPTS}) as file:
        work = generate_responses(
            engine,
            missing_responses(PROMPTS, n, file.keys),
            file,
            ROLLOUT,
            context=10,
            end_ids=[9, 4],
            decode=lambda ids: " ".join(map(str, ids)),
            reward=reward,
            seed=seed,
        )
        asyncio.run(work)
        return file.tally


def test_requests_have_the_sampling_parameters_and_fit_the_context(tmp_path: Path) -> None:
    engine = Echo()
    answer(engine, tmp_path / "o", 2)
    assert [(r.sample.prompt_id, r.sample.index, r.max_tokens) for r in engine.requests] == [
        ("p:1", 0, 7),
        ("p:1", 1, 7),
        ("p:2", 0, 8),
        ("p:2", 1, 8),
    ]
    for request in engine.requests:
        assert (request.temperature, request.top_p, request.top_k, request.deadline_s) == (0.7, 0.9, 5, 30.0)
        assert (request.stop, request.stop_token_ids, request.seed) == (["#"], [9, 4], None)
        assert request.sample.group_id == request.sample.prompt_id, "a group shares its prompt's cache"


def test_only_prompts_with_an_answer_are_rewarded(tmp_path: Path) -> None:
    tally = answer(Echo(), tmp_path / "o", 2)
    assert (tally.samples, tally.num_rewarded, tally.reward_sum) == (4, 2, 2.0)


def test_finished_samples_survive_a_failure_and_only_the_rest_is_generated(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure):
        answer(Echo(fail_after=3), tmp_path / "o", 2)
    again = Echo()
    tally = answer(again, tmp_path / "o", 2)
    assert [(r.sample.prompt_id, r.sample.index) for r in again.requests] == [("p:1", 0)]
    assert tally.samples == 4


def test_larger_n_adds_responses_to_the_file(tmp_path: Path) -> None:
    answer(Echo(), tmp_path / "o", 1)
    more = Echo()
    assert answer(more, tmp_path / "o", 3).samples == 6
    assert [r.sample.index for r in more.requests] == [1, 2, 1, 2]


def test_request_seed_does_not_depend_on_existing_samples(tmp_path: Path) -> None:
    whole, rest = Echo(), Echo()
    answer(whole, tmp_path / "a", 3, seed=5)
    answer(Echo(), tmp_path / "b", 2, seed=5)
    answer(rest, tmp_path / "b", 3, seed=5)
    seeds = {(r.sample.prompt_id, r.sample.index): r.seed for r in whole.requests}
    assert len(set(seeds.values())) == 6 and None not in seeds.values()
    assert all(seeds[r.sample.prompt_id, r.sample.index] == r.seed for r in rest.requests)


def test_summary_means_handle_missing_counts(tmp_path: Path) -> None:
    tally = answer(Echo(), tmp_path / "o", 2)
    result = summary(tally, new_samples=4, new_tokens=8, seconds=2.0)
    assert (result["samples"], result["tokens"], result["tokens_per_s"], result["length_mean"]) == (4, 8, 4.0, 2.0)
    assert (result["accept_rate"], result["accept_length"], result["reward_mean"]) == (0.5, 1.5, 1.0)
    assert result["finish_reasons"] == {"stop": 4}
    empty = summary(Tally(), new_samples=0, new_tokens=0, seconds=0.0)
    assert [empty[name] for name in ("tokens_per_s", "length_mean", "accept_rate", "reward_mean")] == [None] * 4
