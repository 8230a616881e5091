"""Parses fenced code blocks of a response as in CommonMark, in one pass over its lines."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_FENCE = re.compile(r"(?P<prefix>[ \t>]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})(?P<info>.*)")
"""An opening fence, also in a quotation or at the beginning of a list item."""
_PYTHON = re.compile(r"(?:i?python|py|c?pypy|cpython|sage)[0-9.]*|.*\.py", re.IGNORECASE)
_WORD = re.compile(r"[\w+#.-]+")
_DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE)
_ATTRIBUTE = re.compile(r"[\w-]+=(?:\"[^\"]*\"|'[^']*'|[^\s}]*)")
_MAX_INFO = 200
_MAX_CLOSING_INDENT = 3
"""Maximum indentation of a closing fence beyond the opening one. A deeper fence is content, such as in a docstring."""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block. `language`: first word of the info string in lower case; `python` for all its names; empty if there is none."""

    language: str
    code: str


def code_of(response: str, names: Collection[str] = ()) -> str:
    """Extract the Python code from a response.

    Returns the last fenced block that is marked as Python, even if truncated; otherwise the last block without a language; otherwise the
    text. If the blocks define some of `names`, it returns the last block that defines all of these, or all blocks joined if no single
    block does. So a usage example is not mistaken for the answer, and a helper in a separate block is not lost.
    """
    filled = [block for block in blocks(response) if block.code.strip()]
    candidates = [block.code for block in filled if block.language == "python"] or [block.code for block in filled if not block.language]
    if not candidates:
        return response
    defined = [set(names).intersection(name for pair in _DEFINED.findall(code) for name in pair) for code in candidates]
    all_defined = set[str]().union(*defined)
    matches = (code for code, own in zip(reversed(candidates), reversed(defined), strict=True) if own == all_defined)
    return next(matches, "\n".join(candidates))


def blocks(text: str) -> list[Block]:
    """All fenced blocks in order. The last one may lack its closing fence."""
    result: list[Block] = []
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    opening: re.Match[str] | None = None
    start, indented_fence = 0, -1
    for number, line in enumerate(lines):
        if "```" not in line and "~~~" not in line:
            continue
        if opening is None:
            opening = _opening(line)
            start, indented_fence = number + 1, -1
        elif (depth := _closing_depth(line, opening)) is not None:
            if depth <= _MAX_CLOSING_INDENT:
                result.append(_block(opening, lines[start:number]))
                opening = None
            elif indented_fence < 0:
                indented_fence = number
    if opening is not None:
        last = _block(opening, lines[start : indented_fence if indented_fence >= 0 else len(lines)])
        result.append(last if indented_fence >= 0 else Block(last.language, last.code.removesuffix("\n")))
    return result


def unfenced(text: str) -> str:
    """The content of a text that is a single fenced block; other texts are returned unchanged."""
    first, newline, rest = text.strip().partition("\n")
    opening = _opening(first)
    if opening is None or not newline:
        return text
    content = rest.rstrip(opening["fence"][0])
    return content.removesuffix("\n").removesuffix("\r") if len(rest) - len(content) >= 3 else text


def _opening(line: str) -> re.Match[str] | None:
    match = _FENCE.match(line)
    return None if match is None or (match["fence"][0] == "`" and "`" in match["info"]) else match


def _closing_depth(line: str, opening: re.Match[str]) -> int | None:
    """Columns by which a closing fence is indented beyond `opening`; None if the line is no closing fence."""
    content = line.lstrip(" \t>" if ">" in opening["prefix"] else " \t")
    if len(content.rstrip()) < len(opening["fence"]) or content.rstrip().strip(opening["fence"][0]):
        return None
    return _columns(line[: len(line) - len(content)]) - _columns(opening["prefix"])


def _columns(prefix: str) -> int:
    return len(prefix.expandtabs(4))


def _block(opening: re.Match[str], lines: list[str]) -> Block:
    """The block, with its lines outdented by their common indentation or by that of the fence."""
    blanks = " \t>" if ">" in opening["prefix"] else " \t"
    margins = [_columns(line[: len(line) - len(line.lstrip(blanks))]) for line in lines if line.strip(blanks)]
    width = max(min(margins), min(_columns(opening["prefix"]), margins[0])) if margins else 0
    return Block(_language(opening["info"]), "".join(f"{_outdented(line, width, blanks)}\n" for line in lines))


def _outdented(line: str, width: int, blanks: str) -> str:
    """Remove up to `width` columns of leading `blanks`."""
    column = cut = 0
    while cut < len(line) and column < width and line[cut] in blanks:
        column += 4 - column % 4 if line[cut] == "\t" else 1
        cut += 1
    return line[cut:]


def _language(info: str) -> str:
    """The language of an info string such as `python`, `Python title="x.py"`, `{.python .numberLines}`, `python:main.py` or `main.py`."""
    words = _ATTRIBUTE.sub(" ", info[:_MAX_INFO]).strip().strip("{}").split()
    named = [word.lstrip(".") for word in words if not word.startswith(("#", "[", "("))]
    match = _WORD.match(named[0]) if named else None
    return "" if match is None else "python" if _PYTHON.fullmatch(match[0]) else match[0].lower()
