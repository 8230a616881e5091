"""Parses answers: numbers, expressions, text, and several of them as a list, set, tuple, interval or range.

A text that lists several values is never parsed as only one of them. An ambiguous text has several readings: "1,234" is a number or a
list.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from mtpctl.rl.rewards.numerals import Number, read_number

Kind = Literal["value", "text", "list", "set", "bracket", "range"]


@dataclass(frozen=True, slots=True)
class Value:
    """A parsed answer.

    Attributes:
        kind: `value` (a number or expression), `text`, `list` (in any order), `set`, `bracket` (a tuple or interval, with its brackets in
            `brackets`) or `range` ("5 to 7", which does not state whether the ends are included).
        source: the normalized text; for an equation, its last side.
        percent: whether a percent sign follows the number.
        name: the left side of an assignment such as `x = 5`.
        equation: the whole equation, and `sides` its sides.
    """

    kind: Kind
    source: str
    items: tuple[Value, ...] = ()
    brackets: str = ""
    number: Number | None = None
    percent: bool = False
    name: str = ""
    equation: str = ""
    sides: tuple[str, ...] = ()

    @property
    def states_value(self) -> bool:
        """Whether the answer states a value, not just text."""
        return self.kind != "text" and all(item.kind != "text" for item in self.items)


_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\n\r", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u0002"),  # zero width
        "\u00d7": r"\times ",
        "\u00f7": r"\div ",
        "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u00b1": r"\pm ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2208": r"\in ",
        "\u222a": r"\cup ",
        "\u2248": r"\approx ",
        "\u2260": r"\ne ",
        "\u00b0": r"^\circ ",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00bd": r"\frac{1}{2}",
        "\u00bc": r"\frac{1}{4}",
        "\u00be": r"\frac{3}{4}",
        "\uff0c": ",",
        "\u3001": ",",
        "\uff1b": ";",
        "\uff05": "%",
        "\u2044": "/",
        "\u2215": "/",
    }
)
_REMOVED = re.compile(
    r"\\(?:displaystyle|textstyle|m?left|m?right|[bB]igg?[lr]?|limits|nolimits|rm|bf|it)(?![A-Za-z])|\\!|\*\*"
    r"|(?<!\\)\$|\\\$|(?<!\\)\\[()\[\]]|[€£¥₹\"`]"
)
_STYLED = re.compile(r"\\(?:mathbf|boldsymbol|bm|underline|mathit|mathsf|f?boxed|ensuremath)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_COLORED = re.compile(r"\\(?:textcolor|colorbox|color)\s*\{[^{}]*\}")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mbox|hbox|mathrm|operatorname\*?)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|~|\\hspace\*?\{[^{}]*\}|\\(?:thin|en)space(?![A-Za-z])")
_THIN_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\\[, ;:]|~|\s*\{\s*,\s*\}\s*|\{?,\\!\}?\s*|,\{\}| |')\d{3})+)(?!\d)")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_DEGREES = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])")
_PERCENT = re.compile(r"\s*(?:\\?%|\x02?(?:\bpercent(?:age)?\b|\bpct\b))(?=$|[\s,;)\]}])", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")

_WORD = re.compile(
    r"(?:(?<![^\s(:/])[A-Za-z]{2,}(?:['-][A-Za-z]+)*(?=$|[\s.,:;!?)/^%])|(?<=\d)[A-Za-z]{2,}(?=$|[\s.,;/^])|\x02[A-Za-z]+)"
    r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
)
_SHORT_WORDS_TEXT = (
    "of is at in by on we it be an as to cm mm km kg mg ml mL ft yd mi lb oz hr mph kmh kph Hz day days men man boy boys "
    "egg eggs way ways the are for was car cars bus box bag bags cup cups sum set ton tons deg rad min sec yen has can per "
    "all"
)
_SHORT_WORDS = frozenset(_SHORT_WORDS_TEXT.split())
"""Words of two or three letters. Other strings of two or three letters are variables, as in 4 ab."""
_FUNCTIONS_TEXT = "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log exp sqrt infinity"
_FUNCTIONS = frozenset(_FUNCTIONS_TEXT.split())
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MODIFIERS_TEXT = (
    "not least most than negative minus plus times half dozen over under above below except without less more fewer greater "
    "smaller larger squared cubed factorial choose root power no non never up within before after remainder modulo mod "
    "third thirds quarter quarters divided multiplied sum difference product square-root"
)
_MODIFIERS = frozenset(_MODIFIERS_TEXT.split())
"""Words that change the value of the number next to them."""
_NOISE = re.compile(r"^(?:either|both|exactly|approximately|about|roughly|around|therefore|thus|hence|so|and|or)\s+", re.IGNORECASE)
_BETWEEN = re.compile(r"^(?:.*\b)?(?:between\s+(?P<a>.+?)\s+and|from\s+(?P<b>.+?)\s+(?:to|through|until))\s+(?P<end>.+)$", re.IGNORECASE)
_TO = re.compile(r"^(?P<a>.+?)\s+(?:to|through|until)\s+(?P<end>.+)$", re.IGNORECASE)
_DASHED = re.compile(r"^([\d.,/]+)\s*-\s*([\d.,/]+)((?:\s+\x02?[A-Za-z]{2,})*)$")
_EQUALS = re.compile(r"\\approx(?![A-Za-z])|(?<![\\<>!:=])=(?!=)")
_RELATION = re.compile(r"\\(?:[lg]e(?:q|qslant)?|n(?:e|eq)|lt|gt|in|cup|cap|setminus|mid|to|equiv)(?![A-Za-z])|[<>]")
_MEMBER = re.compile(r"^(?:\\?[A-Za-z]\w*|\([^()]*\))\s*\\in(?![A-Za-z])\s*(?P<set>.+)$")
_SUBSCRIPT = re.compile(r"(?<=\d)_(?:\{\s*\d+\s*\}|\d+)$")


def parse_answer(text: str) -> tuple[Value, ...]:
    """All readings of a text; empty for a text without content."""
    text = _normalize(text)
    if not text:
        return ()
    values = [_parse(_COMMA_THOUSANDS.sub(lambda match: match[0].replace(",", ""), text))]
    if _COMMA_THOUSANDS.search(text):
        values.append(_parse(text))
    elif re.fullmatch(r"-?\d+,\d+", text):  # a decimal comma
        values.append(_parse(text.replace(",", ".")))
    if match := _DASHED.match(text):
        low, high = _parse(match[1]), _parse(match[2])
        if low.number and high.number:
            values.append(Value("range", text, (low, high)))
    if r"\approx" in text:  # an exact value before a rounded one is also an answer
        values += [_parse(part) for part in text.split(r"\approx")[-2:-1] if part.strip()]
    return tuple(dict.fromkeys(values))


def _normalize(text: str) -> str:
    text = re.sub("(?<![A-Za-z])([a-z]{1,2})(?=[\u00b2\u00b3])", r"\\text{\1}", text).translate(_CHARACTERS)
    text = _THIN_THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = _TEXT.sub(_mark_words, text)
    for _ in range(3):
        text = _STYLED.sub(r"\1", text)
    text = _COLORED.sub("", text)
    text = text.replace(r"\{", r"\lbrace ").replace(r"\}", r"\rbrace ")
    text = _REMOVED.sub("", _SPACES.sub(" ", text))
    text = _DEGREES.sub("", _FRACTION.sub(r"\\frac", text))
    text = re.sub(r"\\(?:langle|lparen)(?![A-Za-z])", "(", re.sub(r"\\(?:rangle|rparen)(?![A-Za-z])", ")", text))
    text = re.sub(r"\\lbrack(?![A-Za-z])", "[", re.sub(r"\\rbrack(?![A-Za-z])", "]", text))
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"^[:=,;.\s]+(?=\D)|^[:=,;\s]+|[.,;:?\s]+$", "", text)


def _mark_words(match: re.Match[str]) -> str:
    """The words of a text command, each marked by `\\x02`. A single letter is a variable or constant, unless an exponent follows."""
    content = match[1]
    if re.fullmatch(r"[A-Za-z]", content) and match.string[match.end() : match.end() + 1] != "^":
        return content

    def mark(word: re.Match[str]) -> str:
        return word[0] if word[0].lower() in ("and", "or", "to") else f"\x02{word[0]}"

    return f" {re.sub('[A-Za-z]+', mark, content)} "


def _parse(text: str) -> Value:
    """Parse a normalized text in which every comma is a separator."""
    text = text.strip()
    while (stripped := _NOISE.sub("", text)) != text:
        text = stripped
    if (ends := _parse_range(text)) is not None:
        return Value("range", text, ends)
    for separators in (";", ",and"):
        parts = _split(text, separators)
        if len(parts) > 1:
            values = [_parse(part) for part in parts]
            # A mix of values and text is a sentence, not a list: "6 feet, of which 2 are wet".
            if len({value.states_value for value in values}) == 1 and (values[0].states_value or not re.search(r"\d", text)):
                return _build_list(text, values, separators)
            return Value("text", _normalize_words(text))
    return _parse_single(text)


def _parse_range(text: str) -> tuple[Value, Value] | None:
    if (match := _BETWEEN.match(text)) is not None:
        start = match["a"] or match["b"]
    elif (match := _TO.match(text)) is not None and r"\to" not in text:
        start = match["a"]
    else:
        return None
    ends = _parse(start), _parse(match["end"])
    return ends if all(end.kind == "value" for end in ends) else None


def _build_list(text: str, values: list[Value], separators: str = ",and") -> Value:
    name, items = "", list[Value]()
    for value in values:  # `x = 1, 2` assigns two values to x
        name = value.name or name
        if value.kind == "list" and separators == ",and":  # one of the items is 1 \pm 2
            items += value.items
        else:
            items.append(replace(value, name=name) if name and value.kind in ("value", "bracket") and not value.name else value)
    return items[0] if len(items) == 1 else Value("list", text, tuple(items))


def _parse_single(text: str) -> Value:
    sides = _split(text, "=")
    if len(sides) > 1 and not _RELATION.search(re.sub(r"\([^()]*\)", "", text)):
        if any(re.search(r"\d", side) and any(map(_is_word, _WORD.findall(side))) for side in sides[:-1]):
            return Value("text", _normalize_words(text))
        value = _parse_single(sides[-1])
        name = "" if read_number(sides[0]) is not None else sides[0].replace(" ", "")
        if value.kind == "list":  # x = \pm 3
            return replace(value, items=tuple(replace(item, name=name) for item in value.items))
        return replace(value, name=name, equation=text, sides=tuple(sides))
    if (match := _MEMBER.match(text)) is not None:
        return _parse_single(match["set"])
    if (bracket := _parse_bracketed(text)) is not None:
        return bracket
    if r"\pm" in text and text.count(r"\pm") == 1:
        return _build_list(text, [_parse_single(text.replace(r"\pm", sign).strip().removeprefix("+").strip()) for sign in "+-"])
    return _parse_leaf(text)


def _parse_bracketed(text: str) -> Value | None:
    """A tuple, interval or set: brackets around several values."""
    for opening, closing in ((r"\lbrace", r"\rbrace"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)].strip()
            if _is_balanced(inner) and r"\mid" not in inner and "|" not in inner and ":" not in inner:
                if opening == "{":
                    return _parse(inner)
                return Value("set", text, tuple(_parse_single(part) for part in _split(inner, ",;and")))
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and _is_balanced(text[1:-1]):
        parts = _split(text[1:-1], ",;")
        if len(parts) > 1:
            return Value("bracket", text, tuple(_parse_single(part) for part in parts), text[0] + text[-1])
        if text[0] + text[-1] == "()":
            return _parse_single(text[1:-1].strip())
    return None


def _parse_leaf(text: str) -> Value:
    percent = _PERCENT.search(text)
    stripped = (text[: percent.start()] + " " + text[percent.end() :]).strip() if percent else text
    stripped = _SUBSCRIPT.sub("", stripped)
    if (number := read_number(stripped)) is not None:
        return Value("value", stripped, number=number, percent=percent is not None)
    matches = list(_WORD.finditer(stripped))
    sentence = any(_is_word(match[0]) for match in matches)
    matches = [match for match in matches if _is_word(match[0]) or (sentence and re.fullmatch(r"[A-Za-z]{3}", match[0]))]
    if not matches:
        return Value("value", text)
    words = [re.match(r"\x02?([A-Za-z'-]+)", match[0])[1].lower() for match in matches]  # type: ignore[index]
    remainder, end = "", 0
    for match in matches:
        remainder += stripped[end : match.start()].rstrip("/") + " "
        end = match.end()
    remainder = re.sub(r"^[\s:.,'?!]+(?=\D)|^[\s:,'?!]+|[\s:.,'?!/]+$", "", remainder + stripped[end:]).strip()
    has_operator = any(
        re.search(r"[-+*^=]\s*$", stripped[: match.start()]) or re.match(r"\s*[+*=]|\s*-(?!\d)", stripped[match.end() :])
        for match in matches
    )
    if not remainder or has_operator or not _MODIFIERS.isdisjoint(words):
        return Value("text", _normalize_words(text))
    number = read_number(remainder)
    scale = math.prod(_SCALES.get(word.removesuffix("s"), 1) for word in words)
    if number is not None and scale > 1 and number.value is not None:
        number = replace(number, value=number.value * scale, approximation=number.approximation * scale)
    elif number is None and (scale > 1 or stripped.find(remainder) < 0):  # words in the middle: a sentence
        return Value("text", _normalize_words(text))
    return Value("value", remainder, number=number, percent=percent is not None)


def _is_word(text: str) -> bool:
    word = re.match(r"\x02?[A-Za-z]+", text)
    assert word is not None
    return text[0] == "\x02" or (len(word[0]) > 3 and word[0].lower() not in _FUNCTIONS) or word[0] in _SHORT_WORDS | _MODIFIERS


def _normalize_words(text: str) -> str:
    """Normalize a text for comparison: lower case, without punctuation and redundant blanks."""
    return re.sub(r"[\s.,;:!?'\"\x02]+", " ", text).strip().lower()


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


_SEPARATORS = {
    "=": _EQUALS,
    ";": re.compile(r";"),
    ",;": re.compile(r"[,;]"),
    ",and": re.compile(
        r"\s*,?\s*(?<![A-Za-z\\])(?:and|or|as\s+well\s+as)(?![A-Za-z])\s*|\s*&\s*|\s*\\(?:land|lor|wedge|vee)(?![A-Za-z])|,"
    ),
    ",;and": re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*|[,;]"),
}


def _split(text: str, separators: str) -> list[str]:
    """Split at separators outside brackets, and drop empty parts."""
    pattern = _SEPARATORS[separators]
    if pattern.search(text) is None:
        return [text]
    depth, depths = 0, []
    for character in text:
        depth -= character in ")]}"
        depths.append(depth)
        depth += character in "([{"
    for command in (r"\lbrace", r"\rbrace", r"\begin", r"\end"):
        step = 1 if command in (r"\lbrace", r"\begin") else -1
        start = text.find(command)
        while start >= 0:
            for index in range(start, len(text)):
                depths[index] += step
            start = text.find(command, start + 1)
    parts, begin = [], 0
    for match in pattern.finditer(text):
        if depths[match.start()] <= 0 and depths[match.end() - 1] <= 0:
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    parts.append(text[begin:].strip())
    return [part for part in parts if part]
