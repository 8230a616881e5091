"""Generation without training: n responses to every prompt, written to a file, and a summary of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from mtpctl.environments.environment import Failures
from mtpctl.recipe.rollout import RolloutBase
from mtpctl.rollout.protocol import Generator
from mtpctl.rollout.requests import request_for
from mtpctl.rollout.sample_file import SampleFile, Tally
from mtpctl.samples import GenerationRequest, Sample, ids_of

Reward = Callable[[str, Sample], Awaitable[float | None]]
"""Rewards one response, given as text and with its sample; None where the reward function failed on it."""
Progress = Callable[[int, int, Tally], None]
"""Called after every sample with the number of samples in the file, the number there will be, and their sums."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as text and as token ids; `number` is its position, `answer` the reference that the reward needs, or None.

    `problem` is what an environment is made with.
    """

    number: int
    prompt_id: str
    text: str
    ids: list[int]
    answer: str | None = None
    problem: object = None


def wanted(prompts: Iterable[Prompt], n: int, done: set[tuple[str, int]]) -> list[tuple[Prompt, int]]:
    """The responses that are still missing, as prompt and number of the response, in the prompts' order."""
    return [(prompt, index) for prompt in prompts for index in range(n) if (prompt.prompt_id, index) not in done]


async def answer_all(
    generator: Generator,
    missing: list[tuple[Prompt, int]],
    out: SampleFile,
    rollout: RolloutBase,
    *,
    context: int,
    end_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    reward: Reward,
    seed: int | None = None,
    progress: Progress = lambda done, total, tally: None,
    tell: Callable[[str], None] = lambda line: None,
) -> float:
    """Generate the `missing` responses with the sampling settings of `rollout`, and write each when it is finished. Returns seconds.

    `seed` gives every request a seed of its own, so that a response is the same whatever else is generated. `tell` takes what fails in
    the user's environment. An error or an interrupt leaves the finished samples in the file.
    """
    prompts = {prompt.prompt_id: prompt for prompt, _ in missing}
    failures = Failures()
    total, began = len(out.done) + len(missing), time.perf_counter()

    async def requests() -> AsyncIterator[GenerationRequest]:
        for prompt, index in missing:
            sample = Sample(prompt.prompt_id, prompt.prompt_id, ids_of(prompt.ids), index=index)
            own = None if seed is None else (seed * 1_000_003 + prompt.number) * 65_537 + index
            yield request_for(rollout, sample, context=context, end_ids=end_ids, seed=own, problem=prompt.problem)

    async def keep(sample: Sample) -> None:
        prompt, text = prompts[sample.prompt_id], decode(sample.response_ids)
        if prompt.answer is not None:
            sample.reward = await reward(text, sample)
        out.append(sample, prompt.text, text)
        progress(len(out.done), total, out.tally)

    keeping: list[asyncio.Task[None]] = []
    try:
        async with contextlib.aclosing(generator.generate(requests())) as samples:
            async for sample in samples:
                if (failure := failures.first(sample)) is not None:
                    tell(failure)
                keeping.append(asyncio.create_task(keep(sample)))
    finally:
        # Also after an error or an interrupt: what is finished is worth its reward.
        await asyncio.gather(*keeping)
    return time.perf_counter() - began


def summary(tally: Tally, *, made: int, tokens: int, seconds: float) -> dict[str, object]:
    """The JSON summary of a rollout: over the whole file, but `made`, `tokens_per_s` and `seconds` over this call alone.

    `tokens` are those generated in `seconds`. A mean over nothing is None.
    """
    speculation = tally.speculation
    return {
        "samples": tally.samples,
        "made": made,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "tokens": tally.tokens,
        "length_mean": tally.tokens / tally.samples if tally.samples else None,
        "reward_mean": tally.reward / tally.rewards if tally.rewards else None,
        "rewarded": tally.rewards,
        "drafted": speculation.drafted,
        "accepted": speculation.accepted,
        "accept_rate": speculation.accept_rate if speculation.drafted else None,
        "accept_length": speculation.accept_length if speculation.drafted else None,
        "finish_reasons": dict(sorted(tally.finish_reasons.items())),
    }
