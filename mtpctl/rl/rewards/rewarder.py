"""The recipe's reward as one async call: `async with Rewarder(recipe.reward) as reward: outcome = await reward(text, problem, sample)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.reward import RewardConfig, reference_of
from mtpctl.rl.rewards.outcome import Answered, Outcome
from mtpctl.rl.rewards.pool import Pool
from mtpctl.samples import Sample

_MEANS = {"zero": "the response counts as 0", "drop": "its group is left out"}


class Rewarder:
    """Rewards responses by the function that the recipe names, in processes of its own, many at once.

    `tell` is given one line for each place in the function that fails, the first time; metrics count them all. `log`: a file for what the
    function prints.
    """

    def __init__(self, config: RewardConfig, *, tell: Callable[[str], None] = lambda line: None, log: Path | None = None) -> None:
        self.config, self._tell = config, tell
        self._told: set[str] = set()
        self._pool = Pool(reference_of(config.function), config.args, workers=config.workers, timeout_s=config.timeout_s, log=log)

    async def __aenter__(self) -> Rewarder:
        """Load the function. Raises UserError where it cannot be loaded, or not be called with the recipe's arguments."""
        try:
            await self._pool.start()
        except BaseException:
            await self._pool.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pool.close()

    async def attempt(self, response: str, problem: Answered, sample: Sample) -> Outcome:
        """What the function makes of one response, whatever `reward.on_error` says of a failure."""
        return await self._pool.ask(response, problem, sample)

    async def __call__(self, response: str, problem: Answered, sample: Sample) -> Outcome:
        """Reward one response. A failure becomes what `reward.on_error` says: reward 0, no reward, or RuntimeFailure."""
        outcome = await self.attempt(response, problem, sample)
        if not outcome.error:
            return outcome
        told = f"{outcome.error} ({problem.prompt_id})"
        if self.config.on_error == "stop":
            raise RuntimeFailure(f"reward.function: {told}; fix it, or set reward.on_error: zero or drop")
        if (place := outcome.error.partition(": ")[0]) not in self._told:
            self._told.add(place)
            means = _MEANS[self.config.on_error]
            self._tell(f"{told}: {means} (reward.on_error: {self.config.on_error}); the next ones are counted, in reward/errors")
        return outcome if self.config.on_error == "drop" else replace(outcome, reward=0.0)
