"""Implements two built-in names of recipes: the environment `calculator` and the reward function `environment`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from mtpctl.samples import Sample


class Calculator:
    """Evaluates the text between `opening` and `closing`, and replies with the result or `error`."""

    def __init__(self, problem: object, opening: str = "<calc>", closing: str = "</calc>", answer: str = "<result>{}</result>") -> None:
        self.stop = [closing]
        self._opening, self._closing, self._answer = opening, closing, answer

    async def reply(self, turn: str) -> str:
        """The result of the last expression in `turn`."""
        before = turn.rpartition(self._closing)[0]
        expression = before.rpartition(self._opening)[2] if self._opening else before
        try:
            return self._answer.format(_format_number(compute(expression)))
        except (ValueError, ArithmeticError):
            return self._answer.format("error")


MAX_EXPRESSION_LENGTH = 200
"""Maximum length of an expression in characters."""
MAX_VALUE = 10**30
"""Larger numbers are errors, because their digits would fill the response."""
_BINARY_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def compute(expression: str) -> float:
    """Evaluate numbers, `+ - * / // %` and parentheses. Raises ValueError for anything else, and ArithmeticError as Python does."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError("too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no expression") from error
    return _evaluate(tree.body)


def _evaluate(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: float = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluate(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY_OPERATORS:
        value = _BINARY_OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    else:
        raise ValueError(f"{type(node).__name__} is not arithmetic")
    if abs(value) > MAX_VALUE:
        raise ValueError("too large")
    return value


def _format_number(value: float) -> str:
    """The number as text: `6.0` as 6."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def environment_reward(response: str, problem: object, sample: Sample) -> float | dict[str, float]:
    """The environment's or agent's reward with its parts; 0 if the environment failed or timed out. Raises ValueError if it has none."""
    if sample.environment_reward is not None:
        return {"reward": sample.environment_reward, **sample.reward_parts}
    use = sample.environment
    if use is None or use.errors or use.timeouts:  # no environment: a trial before the run, without a response
        return 0.0
    raise ValueError("the environment gives no reward; have its `reward()` return a number, or name another reward.function")
