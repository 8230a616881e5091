"""What a reward function may return, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mtpctl.samples import Sample

TAKEN = frozenset({"mean", "std", "unfiltered_mean", "signal_fraction", "errors", "timeouts", "dropped"})
"""Names below `reward/` that are metrics already, and that no part may have."""


class Answered(Protocol):
    """What a reward function is given as `problem`: `mtpctl.data.problems.Problem`, as far as the functions here look at it."""

    @property
    def prompt_id(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reward of one response, with the `parts` that are logged beside it.

    `error` says why there is none in one line, of the user's file and line where it raised; `timed_out`: it took longer than
    `reward.timeout_s`. `reward` is None where it failed and the response is not to be trained on. `seconds` are those of the caller,
    waiting for a free process included.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""
    timed_out: bool = False
    seconds: float = 0.0


Reward = Callable[[str, Answered, Sample], Awaitable[Outcome]]
"""Rewards one response, given as text, its problem and its sample."""


def parse(value: object) -> tuple[float, dict[str, float]]:
    """The reward and its parts, of what a function returned. Raises ValueError that says what is wrong with it."""
    if not isinstance(value, Mapping):
        return _number(value, "returned"), {}
    if "reward" not in value:
        raise ValueError(f"returned a dict without the key 'reward': {_shown(value)}")
    parts = {}
    for name, part in value.items():
        if name == "reward":
            continue
        if not isinstance(name, str) or name in TAKEN:
            raise ValueError(
                f"returned a part {_shown(name)}: " + ("reward/" + name + " is a metric already" if name in TAKEN else "no text")
            )
        parts[name] = _number(part, f"returned as {name!r}")
    return _number(value["reward"], "returned as 'reward'"), parts


def _number(value: object, what: str) -> float:
    if value is None or isinstance(value, (str, bytes)):
        raise ValueError(f"{what} {_shown(value)}, which is no number")
    try:
        number = float(value)  # type: ignore[arg-type]  # also scalars of numpy and torch, without importing them
    except OverflowError as error:
        raise ValueError(f"{what} {_shown(value)}, which is not finite as a float") from error
    except Exception as error:  # the value's own: a tensor of several elements raises RuntimeError
        raise ValueError(f"{what} {_shown(value)}, which is no number") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, which is not finite")
    return number


def _shown(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # its own `__repr__`, or an integer of too many digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
