"""Parses numbers in answers exactly, and records whether they are fully evaluated.

The grammar covers numerals in LaTeX or plain text: integers, decimals, repeating decimals, scientific notation, fractions, mixed numbers,
pi, and roots, powers, sums and products of these. Other expressions are left to math-verify (`mtpctl.rl.rewards.math`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<mixed>\d+\s+\d+\s*/\s*\d+)
  | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:\\overline\{\d+\}|\\dot\{?\d\}?|[eE][-+]?\d{1,4}(?![\d.]))?)
  | (?P<command>\\(?:frac|sqrt|times|cdot|div|pi|ast))(?![A-Za-z])
  | (?P<sign>[-+*/^(){}!\[\]×·÷π√])
    )""",
    re.VERBOSE,
)
_LITERAL = re.compile(r"(\d*)(?:\.(\d*))?(?:\\(?:overline|dot)\{?(\d+)\}?)?(?:[eE]([-+]?\d+))?")
_MAX_BITS = 20_000
"""Maximum size of a computed power, in bits."""


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric expression.

    Attributes:
        value: exact, or None if irrational or too large to compute.
        approximation: as a float, NaN if unknown.
        decimal: whether it contains a decimal fraction, which may be rounded.
        evaluated: whether it contains no sum, product or power of numerals that could be computed.
        numeral: whether it is a single numeral, possibly a fraction.
        is_power_of_ten: whether it is written as a power of ten.
    """

    value: Fraction | None
    approximation: float
    decimal: bool = False
    evaluated: bool = True
    numeral: bool = False
    is_power_of_ten: bool = False


def read_number(text: str) -> Number | None:
    """Parse a text that is one numeric expression; None for any other text."""
    tokens, end = [], 0
    text = text.strip()
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            return None
        tokens.append((match.lastgroup or "", match[match.lastgroup or 0].strip()))
        end = match.end()
    reader = _Parser(tokens)
    try:
        number = reader.sum()
    except (_NotNumeric, ZeroDivisionError, OverflowError):
        return None
    return number if reader.at_end else None


def same_number(one: Number, other: Number) -> bool | None:
    """Whether two numbers are equal; None if this needs algebra.

    Exact numbers must be equal. If one has a decimal fraction, they may differ by at most 5e-7 and by at most a relative 1e-5.
    """
    if one.value is not None and other.value is not None:
        if not (one.decimal or other.decimal):
            return one.value == other.value
        difference = abs(one.value - other.value)
        # Half a unit of the sixth decimal. The relative bound alone would accept 5.00001 for 5.
        return difference <= Fraction(1, 2_000_000) and difference <= Fraction(1, 100_000) * max(abs(one.value), abs(other.value))
    if math.isnan(one.approximation) or math.isnan(other.approximation):
        return None
    distance, size = abs(one.approximation - other.approximation), max(abs(one.approximation), abs(other.approximation))
    if one.decimal or other.decimal:
        return distance <= 5e-7 and distance <= 1e-5 * size
    return None if distance <= 1e-9 * size else False


class _NotNumeric(Exception):
    """The text is not a numeric expression."""


class _Parser:
    """Recursive-descent parser of the tokens of `read_number`."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._next = tokens, 0

    @property
    def at_end(self) -> bool:
        return self._next == len(self._tokens)

    def _peek(self) -> tuple[str, str]:
        return ("", "") if self.at_end else self._tokens[self._next]

    def _consume(self, *texts: str) -> str:
        """Consume the next token if it is one of these texts; otherwise return an empty string."""
        text = self._peek()[1]
        if text and text in texts:
            self._next += 1
            return text
        return ""

    def sum(self) -> Number:
        terms = [self._product()]
        while sign := self._consume("+", "-"):
            term = self._product()
            terms.append(_negate(term) if sign == "-" else term)
        if len(terms) == 1:
            return terms[0]
        value: Fraction | None = Fraction(0)
        for term in terms:
            value = None if value is None or term.value is None else value + term.value
        computable = sum(term.numeral for term in terms) > 1
        return _combine(value, math.fsum(term.approximation for term in terms), terms, computable)

    def _product(self) -> Number:
        factors, divisors, computable = [self._factor()], list[Number](), False
        while True:
            if self._consume("*", r"\times", r"\cdot", r"\ast", "×", "·"):
                factors.append(self._factor())
            elif sign := self._consume("/", r"\div", "÷"):
                divisors.append(self._factor())
                computable |= sign != "/"
            elif self._peek()[1] in ("(", r"\frac", r"\sqrt", "√", r"\pi", "π", "{") or self._is_factor():
                factors.append(self._power())
            else:
                break
        if len(factors) == 1 and not divisors:
            return factors[0]
        product: Number = factors[0]
        if (
            len(factors) == 2 and factors[0].numeral and not factors[0].is_power_of_ten and factors[1].is_power_of_ten
        ):  # scientific notation
            product = replace(_multiply(factors[0], factors[1]), numeral=True)
        else:
            for factor in factors[1:]:
                product = _multiply(product, factor)
            computable |= sum(factor.numeral for factor in factors) > 1
        for divisor in divisors:
            product = _divide(product, divisor)
        return replace(product, evaluated=product.evaluated and not computable, numeral=product.numeral and not computable)

    def _is_factor(self) -> bool:
        """Whether the next token is a number and the previous token is not."""
        return self._peek()[0] == "number" and self._tokens[self._next - 1][0] != "number"

    def _factor(self) -> Number:
        if sign := self._consume("-", "+"):
            number = self._factor()
            return _negate(number) if sign == "-" else number
        return self._power()

    def _power(self) -> Number:
        base = self._atom()
        if self._consume("^"):
            base = _raise_to(base, self._factor() if self._peek()[1] != "{" else self._atom())
        while self._consume("!"):
            base = Number(None, math.nan, base.decimal, evaluated=False, numeral=True)
        return base

    def _atom(self) -> Number:
        kind, text = self._peek()
        self._next += 1
        if kind == "mixed":
            whole, numerator, denominator = (int(digits) for digits in re.findall(r"\d+", text))
            return _exact_number(whole + Fraction(numerator, denominator))
        if kind == "number":
            number = _parse_literal(text)
            if text.isdigit() and self._peek()[1] == r"\frac":  # a mixed number, if whole numbers follow
                start, self._next = self._next, self._next + 1
                upper, lower = self._argument(), self._argument()
                if upper.numeral and lower.numeral and not (upper.decimal or lower.decimal) and _is_proper(upper.value, lower.value):
                    assert number.value is not None and upper.value is not None and lower.value is not None
                    return _exact_number(number.value + upper.value / lower.value)
                self._next = start
            return number
        if text in ("(", "{", "["):
            inner = self.sum()
            if not self._consume({"(": ")", "{": "}", "[": "]"}[text]):
                raise _NotNumeric
            return inner
        if text == r"\frac":
            return _divide(self._argument(), self._argument())
        if text in (r"\sqrt", "√"):
            index = Fraction(2)
            if self._consume("["):
                exact = self.sum().value
                if exact is None or not self._consume("]"):
                    raise _NotNumeric
                index = exact
            return _raise_to(self._argument(), _exact_number(1 / index))
        if text in (r"\pi", "π"):
            return Number(None, math.pi)
        raise _NotNumeric

    def _argument(self) -> Number:
        """The argument of a LaTeX command: a group, or one digit of the next numeral."""
        kind, text = self._peek()
        if kind != "number" or len(text) == 1:
            return self._atom()
        if not text.isdigit():
            raise _NotNumeric
        self._tokens[self._next] = (kind, text[1:])
        return _parse_literal(text[0])


def _exact_number(value: Fraction) -> Number:
    return Number(value, _float(value), numeral=True)


def _parse_literal(text: str) -> Number:
    match = _LITERAL.fullmatch(text)
    if match is None or len(text) > 4000:
        raise _NotNumeric
    whole, decimals, repeating, exponent = match.groups()
    value = Fraction(int((whole or "") + (decimals or "") or "0"), 10 ** len(decimals or ""))
    if repeating:
        value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10 ** len(decimals or ""))
    if exponent:
        value *= Fraction(10) ** int(exponent)
    return replace(_exact_number(value), decimal=bool(decimals and decimals.strip("0")) and not repeating)


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _is_proper(upper: Fraction | None, lower: Fraction | None) -> bool:
    return upper is not None and lower is not None and 0 < upper < lower and upper.denominator == lower.denominator == 1


def _negate(number: Number) -> Number:
    return replace(number, value=None if number.value is None else -number.value, approximation=-number.approximation)


def _combine(value: Fraction | None, approximation: float, parts: list[Number], computable: bool) -> Number:
    return Number(
        value,
        approximation if value is None else _float(value),
        decimal=any(part.decimal for part in parts),
        evaluated=not computable and all(part.evaluated for part in parts),
        numeral=all(part.numeral for part in parts),
    )


def _multiply(one: Number, other: Number) -> Number:
    value = None if one.value is None or other.value is None else one.value * other.value
    return _combine(value, one.approximation * other.approximation, [one, other], computable=False)


def _divide(upper: Number, lower: Number) -> Number:
    value = None if upper.value is None or lower.value is None else upper.value / lower.value
    approximation = upper.approximation / lower.approximation if lower.approximation else math.nan
    return _combine(value, approximation, [upper, lower], computable=False)


def _raise_to(base: Number, exponent: Number) -> Number:
    power = exponent.value
    if power is None or base.value is None:
        approximation = base.approximation**exponent.approximation if base.approximation > 0 else math.nan
        return Number(None, approximation, base.decimal, base.evaluated and exponent.evaluated)
    if power.denominator == 1:
        is_power_of_ten = base.value == 10 and not base.decimal
        bits = max(base.value.numerator.bit_length(), base.value.denominator.bit_length()) * abs(power.numerator)
        value = base.value**power.numerator if bits <= _MAX_BITS else None
        computable = not is_power_of_ten and power != -1
        number = _combine(value, math.nan, [base, exponent], computable)
        return replace(number, numeral=True, is_power_of_ten=is_power_of_ten and base.evaluated and exponent.evaluated)
    root = _exact_root(base.value, power.denominator)
    value = None if root is None or abs(power.numerator) > 64 else root**power.numerator
    approximation = _float(base.value) ** float(power) if base.value > 0 else math.nan
    return replace(_combine(value, approximation, [base, exponent], computable=False), numeral=False)


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """The exact root; None if irrational, complex or too large."""
    if index < 2 or index > 64 or (value < 0 and index % 2 == 0):
        return None
    parts = [_integer_root(abs(value.numerator), index), _integer_root(value.denominator, index)]
    if parts[0] is None or parts[1] is None:
        return None
    return Fraction(parts[0] if value >= 0 else -parts[0], parts[1])


def _integer_root(value: int, index: int) -> int | None:
    if value.bit_length() > 4096:
        return None
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= value else (low, middle - 1)
    return low if low**index == value else None
