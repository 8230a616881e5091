"""Load a reward function by its reference, and call it so that whatever it raises or returns becomes a result."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from mtpctl.errors import MtpctlError, UserError
from mtpctl.rl.rewards.outcome import Answered, parse
from mtpctl.samples import Sample
from mtpctl.user_code import check_call, describe_error, from_environment, load

GIVEN = ("response", "problem", "sample")
"""What every reward function is given, in this order, before the recipe's `reward.args` by name."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a function of the user's own is for: the keys of the recipe that hold it, its arguments and its seconds, and what it is given.

    `needs_reward`: it has to return a number. Every role is called with a response, a problem and a sample, and takes of them by name.
    """

    function: str
    args: str
    seconds: str
    given: tuple[str, ...] = GIVEN
    needs_reward: bool = True

    @classmethod
    def reward(cls, section: str = "reward") -> Role:
        """A reward of this section of the recipe."""
        return cls(f"{section}.function", f"{section}.args", f"{section}.timeout_s")


AGENT = Role("rollout.agent", "rollout.agent_args", "rollout.deadline_s", ("problem", "base_url"), needs_reward=False)
"""An agent. The address that it asks stands in the place of the response."""

EPISODE = Role("rollout.environment", "rollout.environment_args", "rollout.deadline_s", AGENT.given, needs_reward=False)
"""What plays an environment of another package as an agent does."""

Result = tuple[float | None, dict[str, float], str]
"""Reward, parts and error of one call, as they are sent from process to process."""


@dataclass(frozen=True)
class RewardFunction:
    """The function that `reference` names, with its arguments. `coroutine`: its calls are awaited."""

    reference: str
    call: Callable[..., object]
    args: Mapping[str, object]
    coroutine: bool
    role: Role = field(default_factory=Role.reward)

    def run(self, response: str, problem: Answered, sample: Sample) -> Result:
        """Call the function here and now."""
        try:
            value = self.call(*self._given(response, problem, sample), **self.args)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
        except BaseException as error:  # sys.exit() in a reward ends the call and not the process
            return self._raised(error)
        return self._returned(value)

    async def wait(self, response: str, problem: Answered, sample: Sample) -> Result:
        """The same for a coroutine. Lets cancellation through."""
        try:
            value = self.call(*self._given(response, problem, sample), **self.args)
            assert inspect.isawaitable(value), "an async function"
            value = await value
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._raised(error)
        return self._returned(value)

    def _given(self, response: str, problem: Answered, sample: Sample) -> list[object]:
        known: dict[str, object] = {"response": response, "base_url": response, "problem": problem, "sample": sample}
        return [known[name] for name in self.role.given]

    def _raised(self, error: BaseException) -> Result:
        return None, {}, str(error) if isinstance(error, MtpctlError) else describe_error(error, self.reference)

    def _returned(self, value: object) -> Result:
        if value is None and not self.role.needs_reward:
            return None, {}, ""
        try:
            reward, parts = parse(value)
        except ValueError as error:
            return None, {}, f"{self._place()} {error}"
        return reward, parts, ""

    def _place(self) -> str:
        """`judge.py:12: score`: where the function begins, for a mistake in what it returns."""
        name = self.reference.rpartition(":")[2]
        code = self._code()
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}: {name}" if code is not None else name

    @property
    def file(self) -> str | None:
        """The file that the function is written in; None where Python does not know it."""
        code = self._code()
        return None if code is None else code.co_filename

    def _code(self) -> CodeType | None:
        return getattr(inspect.unwrap(self.call), "__code__", None)


def load_function(reference: str, args: Mapping[str, object], role: Role | None = None) -> RewardFunction:
    """Load the function and check its signature; without `role` it is the run's reward. Raises UserError, under the role's key."""
    role = Role.reward() if role is None else role
    found = load(reference, role.function)
    if not callable(found):
        raise UserError(f"{role.function}: {reference} is no function but {type(found).__name__}")
    if inspect.isclass(found):
        raise UserError(f"{role.function}: {reference} is a class; name a function of {', '.join(role.given)}")
    check_call(found, role.given, {}, role.function, partly=True)
    check_call(found, role.given, args, role.args)
    awaited = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
    return RewardFunction(reference, found, from_environment(args, role.args), awaited, role)


async def _awaited(value: Awaitable[object]) -> object:
    return await value
