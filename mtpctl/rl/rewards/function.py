"""Loads a reward function by its reference and calls it. Every return value or exception becomes a `Result`."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Protocol

from mtpctl.errors import MtpctlError, UserError
from mtpctl.samples import Sample
from mtpctl.user_code import check_call, describe_error, from_environment, load

RESERVED_PARTS = frozenset({"mean", "std", "unfiltered_mean", "signal_fraction", "errors", "timeouts", "dropped"})
"""Names of metrics below `reward/`. A part must not have one of these names."""
ARGUMENTS = ("response", "problem", "sample")
"""Positional arguments of every reward function. `reward.args` are passed by keyword."""
CORRECT_PART = "correct"
"""Part of a reward that evaluations count instead of the reward, so that a reward with partial credit still reports accuracy."""
Result = tuple[float | None, dict[str, float], str]
"""Reward, parts and error of one call, as sent between processes."""


class Answered(Protocol):
    """A problem with the fields of `mtpctl.data.problems.Problem` that rewards use."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reward of one response.

    Attributes:
        reward: None if the call failed, unless `reward.on_error: zero` replaced it; also None if an agent returned no reward.
        parts: additional values to log.
        error: one line with file and line of the user's code; empty if the call succeeded.
        timed_out: whether the call exceeded `reward.timeout_s`.
        seconds: duration of the call, including the wait for a free process.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    timed_out: bool = False
    seconds: float = 0.0


Reward = Callable[[str, Answered, Sample], Awaitable[Outcome]]
"""Rewards the text of a response, with its problem and its sample."""


def parse(value: object) -> tuple[float, dict[str, float]]:
    """Reward and parts from the return value of a function. Raises ValueError if it is invalid."""
    if not isinstance(value, Mapping):
        return _number(value, "returned"), {}
    if "reward" not in value:
        raise ValueError(f"returned a dict without the key 'reward': {_quote_value(value)}")
    parts = {}
    for name, part in value.items():
        if name == "reward":
            continue
        if not isinstance(name, str):
            raise ValueError(f"returned a part {_quote_value(name)}: not a text")
        if name in RESERVED_PARTS:
            raise ValueError(f"returned a part {_quote_value(name)}: reward/{name} is already a metric")
        parts[name] = _number(part, f"returned as {name!r}")
    return _number(value["reward"], "returned as 'reward'"), parts


def _number(value: object, description: str) -> float:
    if value is None or isinstance(value, (str, bytes)):
        raise ValueError(f"{description} {_quote_value(value)}, which is not a number")
    try:
        number = float(value)  # type: ignore[arg-type]  # also scalars of numpy and torch, without importing them
    except OverflowError as error:
        raise ValueError(f"{description} {_quote_value(value)}, which is not finite as a float") from error
    except Exception as error:  # of any type: for example, a tensor of several elements raises RuntimeError
        raise ValueError(f"{description} {_quote_value(value)}, which is not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{description} {number}, which is not finite")
    return number


def _quote_value(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # from a custom `__repr__`, or for an integer of too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class Role:
    """The purpose of a user-defined function.

    Attributes:
        function: recipe key with the reference of the function.
        args: recipe key with its keyword arguments.
        seconds: recipe key with its time limit.
        arguments: names of its positional arguments, selected from those that a call provides.
        needs_reward: whether it must return a reward.
    """

    function: str
    args: str
    seconds: str
    arguments: tuple[str, ...] = ARGUMENTS
    needs_reward: bool = True

    @classmethod
    def reward(cls, section: str = "reward") -> Role:
        """A reward in this section of the recipe."""
        return cls(f"{section}.function", f"{section}.args", f"{section}.timeout_s")


AGENT = Role("rollout.agent", "rollout.agent_args", "rollout.deadline_s", ("problem", "base_url"), needs_reward=False)
"""An agent. A call passes the base URL in place of the response."""

EPISODE = Role("rollout.environment", "rollout.environment_args", "rollout.deadline_s", AGENT.arguments, needs_reward=False)
"""An adapter that plays an environment of another package as an agent."""


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function with its keyword arguments. `coroutine`: whether `call` returns a coroutine, which must be awaited."""

    reference: str
    call: Callable[..., object]
    args: Mapping[str, object]
    coroutine: bool
    role: Role = field(default_factory=Role.reward)

    def run(self, response: str, problem: Answered, sample: Sample) -> Result:
        """Call the function in this thread."""
        try:
            value = self._call(response, problem, sample)
            if inspect.isawaitable(value):
                value = asyncio.run(_await_value(value))
        except BaseException as error:  # including sys.exit(), which must not end the process
            return self._failure(error)
        return self._result(value)

    async def run_async(self, response: str, problem: Answered, sample: Sample) -> Result:
        """Call and await a coroutine function. Propagates cancellation."""
        try:
            value = self._call(response, problem, sample)
            assert inspect.isawaitable(value), "an async function"
            value = await value
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._failure(error)
        return self._result(value)

    def _call(self, response: str, problem: Answered, sample: Sample) -> object:
        values: dict[str, object] = {"response": response, "base_url": response, "problem": problem, "sample": sample}
        return self.call(*(values[name] for name in self.role.arguments), **self.args)

    def _failure(self, error: BaseException) -> Result:
        return None, {}, str(error) if isinstance(error, MtpctlError) else describe_error(error, self.reference)

    def _result(self, value: object) -> Result:
        if value is None and not self.role.needs_reward:
            return None, {}, ""
        try:
            reward, parts = parse(value)
        except ValueError as error:
            code, name = self._code(), self.reference.rpartition(":")[2]
            location = f"{Path(code.co_filename).name}:{code.co_firstlineno}: " if code is not None else ""
            return None, {}, f"{location}{name} {error}"
        return reward, parts, ""

    @property
    def file(self) -> str | None:
        """The source file of the function; None if it is unknown."""
        code = self._code()
        return None if code is None else code.co_filename

    def _code(self) -> CodeType | None:
        return getattr(inspect.unwrap(self.call), "__code__", None)


def load_function(reference: str, args: Mapping[str, object], role: Role | None = None) -> RewardFunction:
    """Load the function and check its signature. The default role is the run's reward. Raises UserError with the role's recipe key."""
    role = Role.reward() if role is None else role
    function = load(reference, role.function)
    if not callable(function):
        raise UserError(f"{role.function}: {reference} is {type(function).__name__}, not a function")
    if inspect.isclass(function):
        raise UserError(f"{role.function}: {reference} is a class; name a function of {', '.join(role.arguments)}")
    check_call(function, role.arguments, {}, role.function, partly=True)
    check_call(function, role.arguments, args, role.args)
    coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return RewardFunction(reference, function, from_environment(args, role.args), coroutine, role)


async def _await_value(value: Awaitable[object]) -> object:
    return await value
