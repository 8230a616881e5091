"""The built-in environments `calculator` and `python`, and the reward function `environment`."""

from __future__ import annotations

import ast
import asyncio
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mtpctl.samples import Sample
from mtpctl.sandbox.fences import strip_fence
from mtpctl.sandbox.sandbox import Isolation, shared
from mtpctl.sandbox.session import Limits, Output


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
            return self._answer.replace("{}", _format_number(compute(expression)))
        except (ValueError, ArithmeticError):
            return self._answer.replace("{}", "error")


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


_CELL_THREADS = ThreadPoolExecutor(max_workers=64, thread_name_prefix="python-cell")
"""Threads that wait for cells. The cells themselves run in processes of the sandbox."""


class Python:
    """Runs the code that the model writes between tags in a sandbox session, and replies with its output.

    Turns share state, and the last expression of a turn is printed, as in interactive Python.

    Args:
        opening, closing: tags around code; a turn ends with `closing`.
        answer: text for the model, with `{}` for the output.
        timeout_s: wall-clock seconds of a turn.
        session_cpu_s, memory_mb: limits for all turns together.
        max_chars: maximum length of the output; the middle of longer output is left out.
        isolation: `none` allows code to run without isolation.
    """

    def __init__(
        self,
        problem: object = None,
        *,
        opening: str = "<python>",
        closing: str = "</python>",
        answer: str = "<output>\n{}</output>\n",  # ends the line, so that a code fence can follow
        timeout_s: float = 10.0,
        session_cpu_s: float = 60.0,
        memory_mb: int = 512,
        max_chars: int = 4000,
        isolation: Isolation = "required",
    ) -> None:
        self.stop: Sequence[str] = [closing]
        self._opening, self._closing, self._answer, self._max_chars = opening, closing, answer, max_chars
        self._session = shared(isolation).session(Limits(cpu_s=session_cpu_s, wall_s=timeout_s, memory_mb=memory_mb))

    async def reply(self, turn: str) -> str:
        """Run the code of this turn, and return its output."""
        before = turn.rpartition(self._closing)[0]
        code = before.rpartition(self._opening)[2] if self._opening else before
        output = await asyncio.get_running_loop().run_in_executor(_CELL_THREADS, self._session.run, strip_fence(code))
        return self._answer.replace("{}", self._format_output(output))

    def close(self) -> None:
        """End the session, even while a cell runs."""
        self._session.close()

    def _format_output(self, output: Output) -> str:
        text = shorten_middle(output.text, self._max_chars)
        notes = {
            "timed out": output.timed_out,
            "too much output": output.too_much_output,
            "the session ended, and its variables are gone": output.ended,
        }
        applying = [note for note, applies in notes.items() if applies]
        lines = [text.rstrip("\n")] if text else []
        if applying:
            lines.append(f"[{'; '.join(applying)}]")
        return "".join(f"{line}\n" for line in lines)


def shorten_middle(text: str, max_chars: int) -> str:
    """Shorten a text of more than `max_chars` characters to its beginning and end, with the number of omitted characters between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"


def environment_reward(response: str, problem: object, sample: Sample) -> float | dict[str, float]:
    """The environment's or agent's reward with its parts; 0 if there is none because of a failure or timeout.

    Raises ValueError if an environment or agent that did not fail returned no reward.
    """
    if sample.environment_reward is not None:
        return {"reward": sample.environment_reward, **sample.reward_parts}
    use = sample.environment
    if use is None or use.errors or use.timeouts:  # `use` is None in a trial before the run, which has no response
        return 0.0
    raise ValueError("the environment gives no reward; have its `reward()` return a number, or name another reward.function")
