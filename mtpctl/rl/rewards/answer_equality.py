"""Whether two answers are equal: numbers exactly or within rounding, several values as a whole, and expressions by math-verify."""

from __future__ import annotations

import re
from functools import lru_cache

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from mtpctl.rl.rewards.answer_value import Value
from mtpctl.rl.rewards.numerals import Number, read_number, same_number

_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
_QUANTITY = re.compile(r"\\?[A-Za-z]+(?:_(?:\{[^{}]*\}|\w))?'*(?:\([^()]*\))?")
_ROUNDED = 0.01
"""Maximum relative difference between the sides of an approximate equation."""


def equal(gold: Value, answer: Value) -> bool:
    """Whether the answer states exactly the values of the gold answer."""
    if gold.kind == "list" and answer.kind == "list":
        return _equal_lists(gold, answer)
    if gold.kind == "set" or answer.kind == "set":
        return _equal_sets(gold, answer)
    if gold.kind == "list" or answer.kind == "list":
        brackets = answer if gold.kind == "list" else gold
        whole = brackets.kind == "bracket" and (brackets.marks == "()" or (brackets.marks == "[]" and len(brackets.items) > 2))
        return whole and _in_order(gold.items, answer.items)
    if gold.kind == "range" or answer.kind == "range":
        return gold.kind in ("range", "bracket") and answer.kind in ("range", "bracket") and _in_order(gold.items, answer.items)
    if gold.kind == "bracket" and answer.kind == "bracket":
        same = gold.marks == answer.marks or (len(gold.items) > 2 and {gold.marks, answer.marks} <= {"()", "[]"})
        return same and _names_agree(gold, answer) and _in_order(gold.items, answer.items)
    if gold.kind == "text" or answer.kind == "text":
        return _letters(gold) == _letters(answer) != ""
    return _equal_values(gold, answer)


def _in_order(gold: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
    return len(gold) == len(answer) and all(equal(one, other) for one, other in zip(gold, answer, strict=True))


def _equal_lists(gold: Value, answer: Value) -> bool:
    names = [{item.name for item in value.items} for value in (gold, answer)]
    if {""} in names and max(map(len, names)) > 1:  # `x = 1, y = 2` against `1, 2`
        return _in_order(gold.items, answer.items)
    return _matched(_distinct(gold.items), _distinct(answer.items))


def _equal_sets(gold: Value, answer: Value) -> bool:
    if {gold.kind, answer.kind} <= {"set", "list"}:
        return _matched(_distinct(gold.items), _distinct(answer.items))
    if len(gold.items or (gold,)) == len(answer.items or (answer,)) == 1:  # {5} and 5
        return equal((gold.items or (gold,))[0], (answer.items or (answer,))[0])
    return False


def _distinct(items: tuple[Value, ...]) -> tuple[Value, ...]:
    distinct: list[Value] = []
    for item in items:
        if not any(equal(other, item) for other in distinct):
            distinct.append(item)
    return tuple(distinct)


def _matched(gold: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
    """Whether the items are equal one to one, in any order."""
    left = list(answer)
    if len(left) != len(gold):
        return False
    for item in gold:
        place = next((place for place, other in enumerate(left) if equal(item, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _names_agree(gold: Value, answer: Value) -> bool:
    """Whether two assignments have the same name. A value without a name matches any."""
    names = [value.name for value in (gold, answer) if re.fullmatch(_QUANTITY, value.name)]
    return len(names) < 2 or _plain(names[0]) == _plain(names[1])


def _letters(value: Value) -> str:
    return re.sub(r"[\s\x02{}]+|\\text", "", value.source).lower()


def _equal_values(gold: Value, answer: Value) -> bool:
    if not _holds(answer):
        return False
    if gold.sides and answer.sides:
        if re.fullmatch(_QUANTITY, gold.name) and re.fullmatch(_QUANTITY, answer.name):
            return _plain(gold.name) == _plain(answer.name) and (_same(gold, answer) or _by_library(gold.equation, answer.equation))
        return (_plain(gold.sides[0]) == _plain(answer.sides[0]) and _same(gold, answer)) or _by_library(gold.equation, answer.equation)
    if (gold.name and not _is_quantity(gold.name)) or (gold.sides and not gold.name and gold.number is None):  # the equation of a curve
        return False
    if answer.name and gold.number is not None and not _is_quantity(answer.name, sums=True):  # 2x = 42 does not state 42
        return False
    return _same(gold, answer)


def _plain(text: str) -> str:
    return re.sub(r"[\s{}\x02]", "", text)


def _is_quantity(side: str, sums: bool = False) -> bool:
    """Whether a side of an equation names a quantity: letters, f(2), |AB|, S:V, with `sums` also x + y, but not 2x or x + 1."""
    bare = re.sub(r"_(?:\{[^{}]*\}|\w)|\^(?:\{\d+\}|\d)|\([^()]*\)|\\(?:frac|sqrt)", "", side)
    return re.search(r"\d" if sums else r"\d|[-+]", bare) is None


def _holds(answer: Value) -> bool:
    """Whether the sides of an equation that are numbers are equal."""
    numbers = [number for number in map(read_number, answer.sides) if number is not None]
    if len(numbers) < 2:
        return True
    if r"\approx" not in answer.equation:
        return all(same_number(numbers[0], number) is not False for number in numbers[1:])
    return all(abs(number.approximation - numbers[0].approximation) <= _ROUNDED * abs(numbers[0].approximation) for number in numbers[1:])


def _same(gold: Value, answer: Value) -> bool:
    expected, number = gold.number, answer.number
    if expected is None or number is None:
        if gold.source == answer.source:
            return True
        if expected is not None and expected.value is not None:
            return False  # an unevaluated function of numbers, or not a number
        return _by_library(gold.source, answer.source)
    if expected.evaluated and not number.evaluated:
        return _plain(gold.source) == _plain(answer.source)
    factors = [(1, 1)] if gold.percent == answer.percent else [(1, 1), (1, 100) if answer.percent else (100, 1)]
    for over, under in factors:
        verdict = same_number(_scaled(expected, over), _scaled(number, under))
        if verdict or (verdict is None and _by_library(gold.source, answer.source)):
            return True
    return False


def _scaled(number: Number, divisor: int) -> Number:
    value = None if number.value is None else number.value / divisor
    return Number(value, number.approximation / divisor, number.decimal, number.evaluated, number.numeral)


def _by_library(gold: str, answer: str) -> bool:
    left, right = _expression(gold), _expression(answer)
    return bool(verify(left, right, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))


@lru_cache(maxsize=256)
def _expression(text: str) -> object:
    latex = normalize_latex(text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").replace("\x02", ""), config=_NORMALIZATION)
    return latex2sympy(latex, is_real=not should_treat_as_complex(latex), convert_degrees=False, normalization_config=None)
