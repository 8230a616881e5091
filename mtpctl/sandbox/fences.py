"""Parses fenced code blocks of a response as in CommonMark, in one pass over its lines."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_FENCE = re.compile(r"(?P<prefix>[ \t>]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})(?P<info>.*)")
"""An opening fence. It may be in a quotation or at the beginning of a list item."""
_PYTHON_LANGUAGE = re.compile(r"(?:i?python|py|c?pypy|cpython|sage)[0-9.]*|.*\.py", re.IGNORECASE)
_WORD = re.compile(r"[\w+#.-]+")
_DEFINITION = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE)
_ATTRIBUTE = re.compile(r"[\w-]+=(?:\"[^\"]*\"|'[^']*'|[^\s}]*)")
_MAX_INFO_LENGTH = 200
_MAX_CLOSING_INDENT = 3
"""Maximum indentation of a closing fence beyond the opening one. A deeper fence is content, such as in a docstring."""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. `language`: first word of the info string in lower case, `python` for every name of Python, or empty."""

    language: str
    code: str


def extract_code(response: str, names: Collection[str] = ()) -> str:
    """Extract the Python code from a response.

    Candidates are the fenced blocks that are marked as Python (the last one may be truncated), or else the blocks without a language. If
    there are none, the whole response is returned.

    Considers the functions, classes and variables in `names` that at least one candidate defines. Returns the last candidate that defines
    all of them, so that a usage example is not mistaken for the answer. If their definitions are spread over several candidates, all
    candidates are joined. If no candidate defines any of them, returns the last candidate.
    """
    non_empty = [block for block in parse_blocks(response) if block.code.strip()]
    candidates = [block.code for block in non_empty if block.language == "python"] or [
        block.code for block in non_empty if not block.language
    ]
    if not candidates:
        return response
    defined_names = [set(names).intersection(name for pair in _DEFINITION.findall(code) for name in pair) for code in candidates]
    all_defined = set[str]().union(*defined_names)
    matches = (
        code for code, names_in_code in zip(reversed(candidates), reversed(defined_names), strict=True) if names_in_code == all_defined
    )
    return next(matches, "\n".join(candidates))


def parse_blocks(text: str) -> list[Block]:
    """All fenced blocks in order. The last one may lack its closing fence."""
    result: list[Block] = []
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    opening: re.Match[str] | None = None
    start, indented_closing = 0, -1  # a deeply indented fence ends a block only if no other fence does
    for number, line in enumerate(lines):
        if "```" not in line and "~~~" not in line:
            continue
        if opening is None:
            opening = _match_opening(line)
            start, indented_closing = number + 1, -1
        elif (depth := _closing_depth(line, opening)) is not None:
            if depth <= _MAX_CLOSING_INDENT:
                result.append(_make_block(opening, lines[start:number]))
                opening = None
            elif indented_closing < 0:
                indented_closing = number
    if opening is not None:
        last = _make_block(opening, lines[start : indented_closing if indented_closing >= 0 else len(lines)])
        result.append(last if indented_closing >= 0 else Block(last.language, last.code.removesuffix("\n")))
    return result


def strip_fence(text: str) -> str:
    """Remove the opening and the closing fence of a text that begins and ends with a fence. Other texts are returned unchanged."""
    first_line, newline, body = text.strip().partition("\n")
    opening = _match_opening(first_line)
    if opening is None or not newline:
        return text
    content = body.rstrip(opening["fence"][0])
    return content.removesuffix("\n").removesuffix("\r") if len(body) - len(content) >= 3 else text


def _match_opening(line: str) -> re.Match[str] | None:
    match = _FENCE.match(line)
    return None if match is None or (match["fence"][0] == "`" and "`" in match["info"]) else match


def _closing_depth(line: str, opening: re.Match[str]) -> int | None:
    """Columns by which a closing fence is indented beyond `opening`; None if the line is not a closing fence."""
    content = line.lstrip(" \t>" if ">" in opening["prefix"] else " \t")
    if len(content.rstrip()) < len(opening["fence"]) or content.rstrip().strip(opening["fence"][0]):
        return None
    return _width(line[: len(line) - len(content)]) - _width(opening["prefix"])


def _width(prefix: str) -> int:
    return len(prefix.expandtabs(4))


def _make_block(opening: re.Match[str], lines: list[str]) -> Block:
    """Create the block.

    Its lines are outdented by their common indentation or, if that is larger, by the fence's, but at most by the first line's.
    """
    indent_characters = " \t>" if ">" in opening["prefix"] else " \t"
    indentations = [_width(line[: len(line) - len(line.lstrip(indent_characters))]) for line in lines if line.strip(indent_characters)]
    indentation = max(min(indentations), min(_width(opening["prefix"]), indentations[0])) if indentations else 0
    return Block(_parse_language(opening["info"]), "".join(f"{_outdent(line, indentation, indent_characters)}\n" for line in lines))


def _outdent(line: str, width: int, indent_characters: str) -> str:
    """Remove up to `width` columns of leading `indent_characters`."""
    column = position = 0
    while position < len(line) and column < width and line[position] in indent_characters:
        column += 4 - column % 4 if line[position] == "\t" else 1
        position += 1
    return line[position:]


def _parse_language(info: str) -> str:
    """The language of an info string such as `python`, `Python title="x.py"`, `{.python .numberLines}`, `python:main.py` or `main.py`."""
    words = _ATTRIBUTE.sub(" ", info[:_MAX_INFO_LENGTH]).strip().strip("{}").split()
    language_words = [word.lstrip(".") for word in words if not word.startswith(("#", "[", "("))]
    match = _WORD.match(language_words[0]) if language_words else None
    return "" if match is None else "python" if _PYTHON_LANGUAGE.fullmatch(match[0]) else match[0].lower()
