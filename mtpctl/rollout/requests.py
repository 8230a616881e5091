"""The request for one response, with the sampling settings and budgets of a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from mtpctl.recipe.rollout import RolloutBase
from mtpctl.samples import GenerationRequest, Sample, response_limit


def request_for(
    rollout: RolloutBase, sample: Sample, *, context: int, end_ids: Sequence[int], seed: int | None = None, problem: object = None
) -> GenerationRequest:
    """The request that generates `sample`, whose prompt and response may have `context` tokens.

    `end_ids`: the run's end tokens (`mtpctl.data.end_tokens`), `rollout.stop_ids` included. `seed`: of this response alone. `problem`:
    what an environment or agent gets.
    """
    return GenerationRequest(
        sample=sample,
        max_tokens=response_limit(sample, max_tokens=rollout.max_tokens, context=context),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=seed,
        stop=rollout.stop,
        stop_token_ids=list(end_ids),
        deadline_s=rollout.deadline_s,
        problem=problem,
    )
