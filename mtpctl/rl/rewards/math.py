"""The reward `math`: whether the answer stated in a response equals the answer of its row.

The text of the answer is extracted from the response and parsed (`mtpctl.rl.rewards.answers`). Answers are equal if any of their readings
are: numbers exactly or within rounding, several values as a whole, and other expressions by the library math-verify.

If the response has a box, the text of the answer is its last box, together with the boxes that form a list with it. Otherwise it is the
first of these candidates that states a value: the text after `#` in the last line, or after the last `####` that begins a line; the text
after "the answer is"; the text after a verb such as "is" in the last sentence; a response that is only an answer; the last value in the
text, together with the values that form a list or range with it. If none states a value, the first candidate is compared as text.

math-verify limits wall-clock time, so its verdict depends on the load of the machine. Here CPU time is limited, and wall-clock time to
four times that. Python handles signals in the main thread only, so workers run reward functions there. If sympy hangs in C code, which
Python signals do not interrupt, `reward.timeout_s` ends the worker.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from collections.abc import Iterator
from functools import lru_cache

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.errors import TimeoutException
from math_verify.grader import should_treat_as_complex

from mtpctl.compat import sympy_names
from mtpctl.rl.rewards.answers import Value, parse_answer
from mtpctl.rl.rewards.function import Answered
from mtpctl.rl.rewards.numerals import Number, read_number, same_number
from mtpctl.samples import Sample

sympy_names.install()
# The library warns if no time limit is passed.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_WARM_UP_S = 60.0
_WALL_CLOCK_FACTOR = 4
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
_QUANTITY = re.compile(r"\\?[A-Za-z]+(?:_(?:\{[^{}]*\}|\w))?'*(?:\([^()]*\))?")
_ROUNDED = 0.01
"""Maximum relative difference between the sides of an approximate equation."""
MAX_CHARACTERS = 20_000
"""Maximum number of characters to search, from the end of a response. Earlier reasoning does not state the final answer."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{])(\S+?)(?=[\s$]|[.,;](?!\d)|$))")
_BLANK = re.compile(r"[\s$]|\\[()\[\], ]|\\q?quad(?![A-Za-z])")
_WORD_JOIN = re.compile(r"(?:[A-Za-z]+\s+)?(?:,\s*)?(?:and|or)|,|;|\\text\s*\{[^{}]*(?:\b(?:and|or)\b|,)\s*\}")
_NAMED = re.compile(r"[A-Za-z](?:_(?:\{\w+\}|\w))?\s*=\s*$")
_AFTER_BOX = re.compile(r"[\s$]*(?:\\\)|\\\])?\s*(\\?%|(?:percent|pct|hundred|thousand|million|billion|trillion)\b)", re.IGNORECASE)
_MARK = re.compile(r"(?:(?<!\w)#|##)[ \t]*([^#\n]*[^#\s])\s*$")
_MARKED_LINE = re.compile(r"^####[ \t]*(.*[^\s#])[ \t]*$", re.MULTILINE)
_ANSWER = re.compile(r"\banswer\b\W{0,4}(?:(?:is|are|equals|would be|should be)\b:?|:|=)[\s*:]*", re.IGNORECASE)
_COPULA = re.compile(
    r"^.*\b(?:is|are|equals?|be|gives?|yields?|get|have|has|obtain|makes?)\b:?\s+"
    r"(?P<rest>(?:[\d$\\(\[{+\-\u2212.]|[A-Za-z]\s*=|(?:between|from|either|both|at|more|less|not)\b).*)$",
    re.IGNORECASE,
)
_CALCULATION = re.compile(r"\d\s*[-+*/\u00d7\u00f7]\s*\d.*=")
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$|\*)|\n|\*\*")

_NUMERAL = r"(?:\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_ATOM = (
    rf"(?:{_NUMERAL}|\d*\\[dtc]?frac\s*(?:\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}|\d\d)|\d*\\sqrt\s*(?:\[\d+\])?\{{[^{{}}]*\}}"
    r"|\([\d\s.,+\-*/^]+\)|\\pi|π)"
)
_VALUE = re.compile(
    r"\$\$(?:[^$]|\\\$)+\$\$|\\\[(?:[^\\]|\\(?!\]))+\\\]|\\\((?:[^\\]|\\(?!\)))+\\\)|(?<!\\)\$(?!\d+(?:\.\d+)?\s)[^$\n]+\$(?!\d)"
    rf"|(?:(?<![A-Za-z\d\\])[A-Za-z]\s*=\s*)?(?<![\w.\\])[-+±]?\s?[$€£¥]?{_ATOM}(?:\s*[-+*/^×÷·=]\s*-?{_ATOM})*"
    r"(?:\s?\\?%|\s?°)?"
)
_LINK = re.compile(r"\s*(?:,\s*)?(?:and|or|to|through|&|as\s+well\s+as)\s+|\s*[,;]\s*|\s*(?:,\s*)?(?:and|or)\s*\n\s*")
_UNIT_LINK = re.compile(r"\s+[A-Za-z]+\s+(?:and|or|to)\s+")
_QUALIFIER = re.compile(
    r"(?:\b(?:between|from|either|both|not|negative|minus|plus|under|over|below|above|except|half(?:\s+of)?|power\s+of"
    r"|(?:at|no|not)\s+(?:least|most|more|less)(?:\s+than)?|(?:more|less|fewer|greater|smaller|larger)\s+than|±)\s+)+$",
    re.IGNORECASE,
)
_PHRASE = re.compile(r"(?:\s+[A-Za-z]+){1,2}\s+")
_VERB = re.compile(
    r"\b(?:is|are|was|were|be|so|then|gives?|gets?|equals?|makes?|leaves?|yields?|has|have|costs?|eats?|pays?|[a-z]+ed)\b", re.IGNORECASE
)
_SCALE_WORD = re.compile(
    r"\s*(?:percent(?:age)?|pct|hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial)\b", re.IGNORECASE
)


def score(response: str, problem: Answered, sample: Sample, seconds: float = 5.0) -> float:
    """1.0 if the answer stated in the response equals the row's, else 0.0. `seconds`: limit on the CPU time of a parse or comparison."""
    return float(_is_correct(response, problem.answer, seconds))


def _is_correct(response: str, answer: str, seconds: float) -> bool:
    try:
        with _time_limit(seconds):
            gold_readings = _parse_gold(answer)
        with _time_limit(seconds):
            stated_readings = _parse_response(response)
    except TimeoutException:
        return False
    except Exception:
        logging.getLogger(__name__).debug("not readable: %r or %r", response[-200:], answer, exc_info=True)
        return False
    return any(_compare(gold_reading, stated_reading, seconds) for gold_reading in gold_readings for stated_reading in stated_readings)


def _compare(gold: Value, stated: Value, seconds: float) -> bool:
    try:
        with _time_limit(seconds):
            return equal(gold, stated)
    except TimeoutException:
        return False
    except Exception:  # the library and sympy raise various errors for texts that are not mathematics, which are wrong answers
        logging.getLogger(__name__).debug("not comparable: %r and %r", gold, stated, exc_info=True)
        return False


@lru_cache(maxsize=512)
def _parse_gold(answer: str) -> tuple[Value, ...]:
    """Readings of a row's answer. A worked solution is parsed like a response."""
    is_short = len(answer) <= 200 and "boxed" not in answer and "#" not in answer and "\n" not in answer.strip()
    return parse_answer(answer) if is_short else _parse_response(answer) or parse_answer(answer)


def _parse_response(response: str) -> tuple[Value, ...]:
    """Readings of the first candidate text that states a value; if none does, of the first candidate."""
    first_readings: tuple[Value, ...] = ()
    for text in answer_texts(response):
        values = parse_answer(text)
        if any(value.states_value for value in values):
            return values
        first_readings = first_readings or values
    return first_readings


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutException if the block uses more than `seconds` of CPU time, or `_WALL_CLOCK_FACTOR` times that of wall-clock time."""

    is_active = True

    def raise_timeout(*_: object) -> None:
        if is_active:
            raise TimeoutException

    limits = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, _WALL_CLOCK_FACTOR * seconds))
    handlers = [signal.signal(number, raise_timeout) for _, number, _ in limits]
    try:
        for timer, _, limit in limits:
            signal.setitimer(timer, limit)
        yield
    finally:
        is_active = False  # A timer that fires from here on has no effect.
        for timer, _, _ in limits:
            signal.setitimer(timer, 0.0)
        for (_, number, _), handler in zip(limits, handlers, strict=True):
            signal.signal(number, handler)


def equal(gold: Value, answer: Value) -> bool:
    """Whether the answer states exactly the values of the gold answer."""
    if gold.kind == "list" and answer.kind == "list":
        return _equal_lists(gold, answer)
    if gold.kind == "set" or answer.kind == "set":
        return _equal_sets(gold, answer)
    if gold.kind == "list" or answer.kind == "list":
        brackets = answer if gold.kind == "list" else gold
        is_tuple = brackets.kind == "bracket" and (brackets.brackets == "()" or (brackets.brackets == "[]" and len(brackets.items) > 2))
        return is_tuple and _equal_in_order(gold.items, answer.items)
    if gold.kind == "range" or answer.kind == "range":
        return gold.kind in ("range", "bracket") and answer.kind in ("range", "bracket") and _equal_in_order(gold.items, answer.items)
    if gold.kind == "bracket" and answer.kind == "bracket":
        same = gold.brackets == answer.brackets or (len(gold.items) > 2 and {gold.brackets, answer.brackets} <= {"()", "[]"})
        return same and _names_agree(gold, answer) and _equal_in_order(gold.items, answer.items)
    if gold.kind == "text" or answer.kind == "text":
        return _letters(gold) == _letters(answer) != ""
    return _equal_values(gold, answer)


def _equal_in_order(gold: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
    return len(gold) == len(answer) and all(equal(one, other) for one, other in zip(gold, answer, strict=True))


def _equal_lists(gold: Value, answer: Value) -> bool:
    names = [{item.name for item in value.items} for value in (gold, answer)]
    if {""} in names and max(map(len, names)) > 1:  # `x = 1, y = 2` against `1, 2`
        return _equal_in_order(gold.items, answer.items)
    return _can_pair(_remove_duplicates(gold.items), _remove_duplicates(answer.items))


def _equal_sets(gold: Value, answer: Value) -> bool:
    if {gold.kind, answer.kind} <= {"set", "list"}:
        return _can_pair(_remove_duplicates(gold.items), _remove_duplicates(answer.items))
    if len(gold.items or (gold,)) == len(answer.items or (answer,)) == 1:  # {5} and 5
        return equal((gold.items or (gold,))[0], (answer.items or (answer,))[0])
    return False


def _remove_duplicates(items: tuple[Value, ...]) -> tuple[Value, ...]:
    distinct: list[Value] = []
    for item in items:
        if not any(equal(other, item) for other in distinct):
            distinct.append(item)
    return tuple(distinct)


def _can_pair(gold: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
    """Whether the items can be paired so that all pairs are equal."""
    unpaired = list(answer)
    if len(unpaired) != len(gold):
        return False
    for item in gold:
        index = next((index for index, other in enumerate(unpaired) if equal(item, other)), None)
        if index is None:
            return False
        del unpaired[index]
    return True


def _names_agree(gold: Value, answer: Value) -> bool:
    """Whether two assignments have the same name. A value without a name matches every name."""
    names = [value.name for value in (gold, answer) if re.fullmatch(_QUANTITY, value.name)]
    return len(names) < 2 or _strip_markup(names[0]) == _strip_markup(names[1])


def _letters(value: Value) -> str:
    return re.sub(r"[\s\x02{}]+|\\text", "", value.source).lower()


def _equal_values(gold: Value, answer: Value) -> bool:
    if not _sides_agree(answer):
        return False
    if gold.sides and answer.sides:
        if re.fullmatch(_QUANTITY, gold.name) and re.fullmatch(_QUANTITY, answer.name):
            return _strip_markup(gold.name) == _strip_markup(answer.name) and (
                _equal_numbers(gold, answer) or _verify_symbolically(gold.equation, answer.equation)
            )
        return (_strip_markup(gold.sides[0]) == _strip_markup(answer.sides[0]) and _equal_numbers(gold, answer)) or _verify_symbolically(
            gold.equation, answer.equation
        )
    if (gold.name and not _is_quantity(gold.name)) or (gold.sides and not gold.name and gold.number is None):  # the equation of a curve
        return False
    if answer.name and gold.number is not None and not _is_quantity(answer.name, sums=True):  # 2x = 42 does not state 42
        return False
    return _equal_numbers(gold, answer)


def _strip_markup(text: str) -> str:
    return re.sub(r"[\s{}\x02]", "", text)


def _is_quantity(side: str, sums: bool = False) -> bool:
    """Whether a side of an equation names a quantity: letters, f(2), |AB|, S:V, with `sums` also x + y, but not 2x or x + 1."""
    bare = re.sub(r"_(?:\{[^{}]*\}|\w)|\^(?:\{\d+\}|\d)|\([^()]*\)|\\(?:frac|sqrt)", "", side)
    return re.search(r"\d" if sums else r"\d|[-+]", bare) is None


def _sides_agree(answer: Value) -> bool:
    """Whether all numeric sides of an equation are equal."""
    numbers = [number for number in map(read_number, answer.sides) if number is not None]
    if len(numbers) < 2:
        return True
    if r"\approx" not in answer.equation:
        return all(same_number(numbers[0], number) is not False for number in numbers[1:])
    return all(abs(number.approximation - numbers[0].approximation) <= _ROUNDED * abs(numbers[0].approximation) for number in numbers[1:])


def _equal_numbers(gold: Value, answer: Value) -> bool:
    expected, number = gold.number, answer.number
    if expected is None or number is None:
        if gold.source == answer.source:
            return True
        if expected is not None and expected.value is not None:
            return False  # the answer is not a number, or is a function that was not evaluated
        return _verify_symbolically(gold.source, answer.source)
    if expected.evaluated and not number.evaluated:
        return _strip_markup(gold.source) == _strip_markup(answer.source)
    divisor_pairs = [(1, 1)] if gold.percent == answer.percent else [(1, 1), (1, 100) if answer.percent else (100, 1)]
    for gold_divisor, answer_divisor in divisor_pairs:
        verdict = same_number(_divide(expected, gold_divisor), _divide(number, answer_divisor))
        if verdict or (verdict is None and _verify_symbolically(gold.source, answer.source)):
            return True
    return False


def _divide(number: Number, divisor: int) -> Number:
    value = None if number.value is None else number.value / divisor
    return Number(value, number.approximation / divisor, number.decimal, number.evaluated, number.numeral)


def _verify_symbolically(gold: str, answer: str) -> bool:
    left, right = _parse_expression(gold), _parse_expression(answer)
    return bool(verify(left, right, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))


@lru_cache(maxsize=256)
def _parse_expression(text: str) -> object:
    latex = normalize_latex(text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").replace("\x02", ""), config=_NORMALIZATION)
    return latex2sympy(latex, is_real=not should_treat_as_complex(latex), convert_degrees=False, normalization_config=None)


def answer_texts(text: str) -> Iterator[str]:
    """Candidate texts for the answer of a response, best first."""
    text = text[-MAX_CHARACTERS:]
    boxed, unclosed = _find_boxed(text)
    if boxed is not None:
        yield boxed
        return
    if unclosed:  # The response was truncated inside its only box, which may contain only a part of the answer.
        return
    if (mark := _MARK.search(text) or _last_match(_MARKED_LINE, text)) is not None:
        yield mark[1]
    if (answer := _last_match(_ANSWER, text)) is not None:
        yield _sentence(text, answer.end())
    stripped = text.strip()
    line = re.split(r"(?<=[.!?])\s+(?=[A-Z])", stripped.rpartition("\n")[2])[-1]
    if (match := _COPULA.match(line)) is not None:
        yield _sentence(line, match.start("rest"))
    is_one_formula_or_plain = (stripped[:1] in "$\\" and stripped.rstrip(".")[-1:] in "$)]}") or not re.search(
        r"\$[^$]+\$|\\[(\[]", stripped
    )
    if "\n" not in stripped and len(stripped) <= 200 and is_one_formula_or_plain and not _CALCULATION.search(stripped):
        yield stripped
    if (last := _last_values(text)) is not None:
        yield last


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(reversed(list(pattern.finditer(text))), None)


def _find_boxed(text: str) -> tuple[str | None, bool]:
    """The content of the last box, joined with the boxes before it if they form a list; and whether a box is not closed."""
    boxes, unclosed = [], False
    closings = _closing_braces(text)
    for match in _BOX.finditer(text):
        if match[1] is not None:
            boxes.append((match.start(), match.end(), match[1]))
        elif (end := closings.get(match.end() - 1)) is None:
            unclosed = True
        else:
            boxes.append((match.start(), end + 1, text[match.end() : end]))
    if not boxes:
        return None, unclosed
    start, end, content = boxes[-1]
    contents = [content]
    for previous in reversed(boxes[:-1]):
        if previous[1] > start:  # the box is inside another one
            start, end, contents = previous[0], previous[1], [previous[2]]
            continue
        if not _form_list(text[previous[1] : start]):
            break
        contents.insert(0, previous[2])
        start = previous[0]
    unit = _AFTER_BOX.match(text, end)
    return ", ".join(dict.fromkeys(contents)) + (f" {unit[1]}" if unit else ""), unclosed


def _form_list(between: str) -> bool:
    """Whether two boxes with this text between them form one list."""
    if len(between) > 80:
        return False
    bare = _NAMED.sub("", _BLANK.sub(" ", between).strip()).strip()
    return not bare or _WORD_JOIN.fullmatch(bare) is not None


def _closing_braces(text: str) -> dict[int, int]:
    """Map the position of each opening brace to that of its closing brace. Unclosed braces are omitted."""
    opened: list[int] = []
    closings = {}
    for index, character in enumerate(text):
        if character in "{}" and (index == 0 or text[index - 1] != "\\"):
            if character == "{":
                opened.append(index)
            elif opened:
                closings[opened.pop()] = index
    return closings


def _sentence(text: str, start: int) -> str:
    """The text from `start` to the end of its sentence; a displayed formula is not cut."""
    for opening, closing in (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"), ("$", "$")):
        if text.startswith(opening, start) and (end := text.find(closing, start + len(opening))) > 0:
            if opening == "$" and _SENTENCE_END.search(text, start, end):
                break  # amounts of dollars: the answer is $5. He has $3 left
            rest = _SENTENCE_END.search(text, end + len(closing))
            return text[start : rest.start() if rest else len(text)]
    stop = _SENTENCE_END.search(text, start)
    return text[start : stop.start() if stop else len(text)]


def _last_values(text: str) -> str | None:
    """The last value of a text with its list or range, the qualifiers before it, and the words for its scale after it."""
    matches = list(_VALUE.finditer(text))
    if not matches:
        return None
    first_index = last_index = len(matches) - 1
    while first_index > 0:
        between = text[matches[first_index - 1].end() : matches[first_index].start()]
        are_values = not any(_is_calculation(matches[index][0]) for index in (first_index - 1, first_index))
        if not (_LINK.fullmatch(between) or _UNIT_LINK.fullmatch(between)) or not are_values:
            break
        first_index -= 1
    start, end = matches[first_index].start(), matches[last_index].end()
    if qualifier := _QUALIFIER.search(text, max(0, start - 60), start):
        start = qualifier.start()
    if suffix := _SCALE_WORD.match(text, end):
        end = suffix.end()
    if re.match("[-+\u00b1]\\s", text[start : start + 2]) and re.search(r"\w\s*$", text[max(0, start - 60) : start]):
        return None  # a sum with a word: width + 2
    between = text[matches[first_index - 1].end() : start] if first_index == last_index > 0 else ""
    if not _is_calculation(matches[last_index][0]) and _PHRASE.fullmatch(between) and not _VERB.search(between):
        return None  # 5 feet 6
    return text[start:end]


def _is_calculation(value: str) -> bool:
    """Whether a value is a step of a calculation (`3 * 4 = 12`) instead of an item of a list."""
    left, equals, _ = value.partition("=")
    return bool(equals) and re.search(r"\d\s*[-+*/^×÷·)]|^\s*[\d(]", left) is not None


# The first fraction, root or set in a process takes a hundred times as long as later ones, because parsers and sympy load modules.
# Therefore each kind is parsed once at import, before workers are forked.
_WARM_UP = (
    *("1", r"\frac{1}{2}", r"3\sqrt{13}", "x^2+2x+1", "(1,2)", r"\{1,2\}", "[0,1)", "x=3", "x<2", "6-5i", r"2\pi", r"\sin x", r"50\%"),
    *("1,000", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
)
for _text in _WARM_UP:
    _is_correct(rf"\boxed{{{_text}}}", _text, _WARM_UP_S)
    _is_correct(rf"\boxed{{{_text}}}", r"\frac{x}{7}+1", _WARM_UP_S)
