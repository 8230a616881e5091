"""Verifiable tasks, generated from a seed: arithmetic on written digits, and two on strings.

Every problem has a worked solution in the same format: one short step per digit (or character), separated by a blank, then `#` and the
answer, which the reward `exact` compares:

    addition         123+989=    3+9+0=12 2+8+1=11 1+9+1=11 #1112     from the right: digit + digit + carry = next carry, digit
    subtraction      523-189=    3-9-0=14 2-8-1=13 5-1-1=03 #334      the same with borrows; the first operand is not smaller
    multiplication   12*34=      4*12=48 3*12=36 #408                 one partial product per digit of the second operand
    reverse          word=       d r o w #drow
    sort             3921=       1 2 3 9 #1239

The format determines most tokens of a response, and arithmetic the others (sums, carries). So some draft tokens are easy and some are hard.
The answer is correct only if every step is, so the supervised stage leaves room for RL to improve.

Problems of length n have operands (or strings) of exactly n characters. Each length has `length_decay` times as many problems as the
previous length, or equally many if it is 1. Decreasing numbers resemble the response lengths of reasoning models. If a length has too few
distinct problems, all of them are used, and other lengths get more. Held-out problems are disjoint from the training problems, with the
same distribution over lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtpctl.data.problems import Problem
from mtpctl.errors import UserError
from mtpctl.recipe.data import GeneratedTask

ANSWER_MARK = "#"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class _Example:
    prompt: str
    steps: list[str]
    answer: str


@dataclass(frozen=True, slots=True)
class _Task:
    """`size(n)` problems of length n; `make(n, i)` is the i-th of them."""

    size: Callable[[int], int]
    make: Callable[[int, int], _Example]


def _smallest_number(n: int) -> int:
    """Smallest number of n digits; a single digit may be zero."""
    return 0 if n == 1 else 10 ** (n - 1)


def _count_numbers(n: int) -> int:
    return 10**n - _smallest_number(n)


def _operands(n: int, i: int) -> tuple[int, int]:
    a, b = divmod(i, _count_numbers(n))
    return _smallest_number(n) + a, _smallest_number(n) + b


def _ordered_operands(n: int, i: int) -> tuple[int, int]:
    """The i-th pair with a >= b, in the order (0,0), (1,0), (1,1), (2,0), …"""
    a = _triangle_root(i)
    return _smallest_number(n) + a, _smallest_number(n) + i - a * (a + 1) // 2


def _triangle_root(i: int) -> int:
    """Largest a with a(a+1)/2 <= i, by bisection on exact integers."""
    low, high = 0, 1
    while high * (high + 1) // 2 <= i:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle * (middle + 1) // 2 <= i else (low, middle)
    return low


def _digits(value: int, n: int) -> list[int]:
    """The n lowest decimal digits, lowest first."""
    return [value // 10**k % 10 for k in range(n)]


def _addition(n: int, i: int) -> _Example:
    a, b = _operands(n, i)
    carry, steps = 0, []
    for x, y in zip(_digits(a, n), _digits(b, n), strict=True):
        steps.append(f"{x}+{y}+{carry}={x + y + carry:02d}")
        carry = (x + y + carry) // 10
    return _Example(f"{a}+{b}=", steps, str(a + b))


def _subtraction(n: int, i: int) -> _Example:
    a, b = _ordered_operands(n, i)
    borrow, steps = 0, []
    for x, y in zip(_digits(a, n), _digits(b, n), strict=True):
        next_borrow = int(x - y - borrow < 0)
        steps.append(f"{x}-{y}-{borrow}={next_borrow}{x - y - borrow + 10 * next_borrow}")
        borrow = next_borrow
    return _Example(f"{a}-{b}=", steps, str(a - b))


def _multiplication(n: int, i: int) -> _Example:
    a, b = _operands(n, i)
    return _Example(f"{a}*{b}=", [f"{y}*{a}={y * a}" for y in _digits(b, n)], str(a * b))


def _nth_string(alphabet: str, n: int, i: int) -> str:
    return "".join(alphabet[i // len(alphabet) ** k % len(alphabet)] for k in range(n))


def _reverse(n: int, i: int) -> _Example:
    text = _nth_string(_LETTERS, n, i)
    return _Example(f"{text}=", list(text[::-1]), text[::-1])


def _sort(n: int, i: int) -> _Example:
    text = _nth_string("0123456789", n, i)
    return _Example(f"{text}=", sorted(text), "".join(sorted(text)))


_TASKS: dict[str, _Task] = {
    "addition": _Task(lambda n: _count_numbers(n) ** 2, _addition),
    "subtraction": _Task(lambda n: _count_numbers(n) * (_count_numbers(n) + 1) // 2, _subtraction),
    "multiplication": _Task(lambda n: _count_numbers(n) ** 2, _multiplication),
    "reverse": _Task(lambda n: len(_LETTERS) ** n, _reverse),
    "sort": _Task(lambda n: 10**n, _sort),
}


def generate(task: GeneratedTask, seed: int, field: str = "data.task") -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems: disjoint, in order of increasing length, and equal for equal seeds.

    `field`: the task's recipe key. Raises UserError if the minimum length exceeds the maximum, or if there are fewer distinct problems than
    requested.
    """
    if task.min_digits > task.max_digits:
        raise UserError(f"{field}.min_digits: {task.min_digits} is above max_digits {task.max_digits}; lower it")
    generator = _TASKS[task.name]
    lengths = range(task.min_digits, task.max_digits + 1)
    total = task.train_size + task.eval_size
    quotas = _distribute(total, task.length_decay, [generator.size(n) for n in lengths])
    if sum(quotas) < total:
        raise UserError(
            f"{field}.train_size: {task.name} of {task.min_digits} to {task.max_digits} digits has {sum(quotas)} distinct problems, "
            f"but train_size + eval_size is {total}; lower them or raise max_digits"
        )
    eval_quotas = _distribute(
        task.eval_size, task.length_decay, [round(task.eval_size * quota / total) for quota in quotas], capacity=quotas
    )
    rng = random.Random(f"{task.name}/{seed}")
    train: list[Problem] = []
    evaluation: list[Problem] = []
    for n, quota, eval_quota in zip(lengths, quotas, eval_quotas, strict=True):
        for position, index in enumerate(_sample_distinct(rng, generator.size(n), quota)):
            example = generator.make(n, index)
            split, split_name = (evaluation, "eval") if position < eval_quota else (train, "train")
            solution = " ".join([*example.steps, ANSWER_MARK + example.answer])
            split.append(Problem(f"{task.name}/{split_name}/{len(split)}", example.prompt, example.answer, solution))
    return train, evaluation


def _distribute(total: int, decay: float, caps: Sequence[int], capacity: Sequence[int] | None = None) -> list[int]:
    """Split `total` over the lengths, at most `caps[i]` for length i, each `decay` times the share of the previous length.

    Remainders go to the longest lengths. capacity: higher limits, used for the part of `total` that exceeds the sum of `caps`.
    """
    shares = [0] * len(caps)
    for limits in [caps] if capacity is None else [caps, capacity]:
        while (remaining := total - sum(shares)) > 0:
            below_bound = [i for i, limit in enumerate(limits) if shares[i] < limit]
            if not below_bound:
                break
            # Relative to the shortest of these lengths, so the weights are never all 0.
            weights = [decay ** (i - below_bound[0]) for i in below_bound]
            additions = [math.floor(remaining * weight / sum(weights)) for weight in weights]
            remainder = remaining - sum(additions)
            for rank, i in enumerate(reversed(below_bound)):
                shares[i] = min(limits[i], shares[i] + additions[-1 - rank] + int(rank < remainder))
    return shares


def _sample_distinct(rng: random.Random, size: int, count: int) -> list[int]:
    """`count` distinct numbers below `size`, in random order; `size` may exceed the limit of `random.sample`."""
    if count * 3 > size:
        return rng.sample(range(size), count)
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen[rng.randrange(size)] = None
    return list(chosen)
