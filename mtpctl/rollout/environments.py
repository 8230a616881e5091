"""What happens between the turns of a response: tools and other environments that answer the model.

A response is one list of tokens, the model's turns and the environment's answers in order. The environment's tokens carry a loss mask
of 0 and a log-prob of 0, so per-token lists stay aligned and no loss, correction or entropy sees them; `max_tokens`, the context and the
deadline count them with the rest.
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
    """Answers a turn of the model. `stop` are the strings at which the model hands over; an end token ends the response as ever."""

    stop: Sequence[str]

    def reply(self, turn: str) -> str | None:
        """Text to go on behind the model's turn `turn`, which ends with one of `stop`; None, or none: the response ends here.

        Called in a thread of its own, for many responses at once; must not raise for anything that a model may write.
        """
        ...


class Text(Protocol):
    """Text to ids and back, as `mtpctl.data.tokenizers.Tokenizer` does."""

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Calculator:
    """Computes what the model writes between `opening` and `closing`, and answers with the result, or with `error`."""

    def __init__(self, opening: str = "<calc>", closing: str = "</calc>", answer: str = "<result>{}</result>") -> None:
        self.stop: Sequence[str] = (closing,)
        self._opening, self._closing, self._answer = opening, closing, answer

    def reply(self, turn: str) -> str | None:
        """See `Environment`."""
        asked = turn.rpartition(self._closing)[0]
        expression = asked.rpartition(self._opening)[2] if self._opening else asked
        try:
            return self._answer.format(_told(compute(expression)))
        except (ValueError, ArithmeticError):
            return self._answer.format("error")


LONGEST = 200
"""Characters of an expression, at most."""
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


def _told(value: float) -> str:
    """`6.0` is told as 6."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"calculator": Calculator}
"""By the name that `rollout.environment` has; `single` has none."""


def environment_of(rollout: RolloutBase) -> Environment | None:
    """The recipe's environment, None where a response is a single turn."""
    return None if rollout.environment == "single" else ENVIRONMENTS[rollout.environment]()


class Turns:
    """Plays the environment's part in responses: at most `limit` turns of the model each."""

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
        # Drafts accepted in the step that completed the stop string were written behind it.
        sample.cut(start + length)
        reply = await asyncio.to_thread(self.environment.reply, self._text.decode(sample.response_ids[start:]))
        tokens = self._text.encode(reply) if reply else []
        if not tokens:
            # Nothing would part the next turn from this one, which would be stopped at its stop string again and again.
            return False
        sample.append(tokens, [0.0] * len(tokens), sample.version_spans[-1].version, trained=False)
        sample.finish_reason = None
        return True


def length_to_stop(read: Callable[[list[int]], str], tokens: list[int], stop: Sequence[str]) -> int | None:
    """The fewest of `tokens` whose text, by `read`, holds a stop string; None where the text of all of them holds none."""

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
