"""Environments that answer the model between the turns of a response, such as tools.

A response is one list of tokens, the model's turns and the environment's answers in order. The environment's tokens have a loss mask
of 0 and a log-prob of 0, so per-token lists stay aligned and no loss, correction or entropy includes them. `max_tokens`, the context and
the deadline include them.
"""

from __future__ import annotations

import ast
import asyncio
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from mtpctl.recipe.rollout import RolloutBase
from mtpctl.samples import Sample


class Environment(Protocol):
    """Answers a turn of the model. `stop`: strings that end a turn. An end token ends the whole response."""

    stop: Sequence[str]

    def reply(self, turn: str) -> str | None:
        """The text to append after the model's turn `turn`, which ends with one of `stop`. None, or an empty text, ends the response.

        Called in threads, for many responses at once; must not raise for anything that a model may write.
        """
        ...


class Text(Protocol):
    """Converts text to token ids and back; a part of `mtpctl.data.tokenizers.Tokenizer`."""

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Calculator:
    """Computes what the model writes between `opening` and `closing`, and answers with the result, or with `error`."""

    def __init__(self, opening: str = "<calc>", closing: str = "</calc>", answer: str = "<result>{}</result>") -> None:
        self.stop: Sequence[str] = (closing,)
        self._opening, self._closing, self._answer = opening, closing, answer

    def reply(self, turn: str) -> str | None:
        """The result of the last expression in `turn`."""
        before = turn.rpartition(self._closing)[0]
        expression = before.rpartition(self._opening)[2] if self._opening else before
        try:
            return self._answer.format(_formatted(compute(expression)))
        except (ValueError, ArithmeticError):
            return self._answer.format("error")


LONGEST = 200
"""Characters that an expression may have."""
LARGEST = 10**30
"""A number beyond this is an error: the model's next tokens would be its digits."""
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def compute(expression: str) -> float:
    """The value of numbers, `+ - * / // %` and parentheses. Raises ValueError for anything else, ArithmeticError as Python does."""
    if len(expression) > LONGEST:
        raise ValueError("too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: float = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError(f"{type(node).__name__} is not arithmetic")
    if abs(value) > LARGEST:
        raise ValueError("too large")
    return value


def _formatted(value: float) -> str:
    """The number as text: `6.0` as 6."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"calculator": Calculator}
"""By the value of `rollout.environment`; `single` is no environment."""


def environment_of(rollout: RolloutBase) -> Environment | None:
    """The recipe's environment, None where a response is a single turn."""
    return None if rollout.environment == "single" else ENVIRONMENTS[rollout.environment]()


class Turns:
    """Appends the environment's answers to responses of at most `limit` turns of the model."""

    def __init__(self, environment: Environment, text: Text, limit: int) -> None:
        self.environment, self._text, self._limit = environment, text, limit

    @property
    def stop(self) -> list[str]:
        """Strings at which a turn ends."""
        return list(self.environment.stop)

    async def go_on(self, sample: Sample) -> bool:
        """Append the environment's answer to a turn that has just stopped; False where the response ends here."""
        start = last_turn(sample)
        length = length_to_stop(self._text.decode, sample.response_ids[start:], self.environment.stop)
        if length is None or turns(sample) >= self._limit:
            return False
        # Tokens behind the stop string come from drafts that were accepted in the same step.
        sample.cut(start + length)
        reply = await asyncio.to_thread(self.environment.reply, self._text.decode(sample.response_ids[start:]))
        tokens = self._text.encode(reply) if reply else []
        if not tokens:
            # Nothing would separate the next turn from this one, and the old stop string would end it at once, again and again.
            return False
        sample.append(tokens, [0.0] * len(tokens), sample.version_spans[-1].version, trained=False)
        sample.finish_reason = None
        return True


def length_to_stop(read: Callable[[list[int]], str], tokens: list[int], stop: Sequence[str]) -> int | None:
    """Length of the shortest prefix of `tokens` whose text, by `read`, has a stop string in it; None where no prefix has."""

    def stopped(length: int) -> bool:
        text = read(tokens[:length])
        return any(each in text for each in stop)

    if not stopped(len(tokens)):
        return None
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle + 1, high)
    return low


def last_turn(sample: Sample) -> int:
    """Where the model's last turn begins in the response."""
    mask = sample.loss_mask
    return next((place + 1 for place in reversed(range(len(mask))) if not mask[place]), 0)


def turns(sample: Sample) -> int:
    """Turns of the model in the response."""
    mask = [0, *sample.loss_mask]
    return sum(after and not before for before, after in pairwise(mask))
