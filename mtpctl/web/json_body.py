"""Parses JSON bodies from untrusted clients.

Python's parser accepts input that RFC 8259 forbids or leaves undefined, and that fails later or is read differently by other parsers:
`NaN`, numbers beyond the range of a double, integers with thousands of digits, duplicate keys (the last one wins), and unlimited nesting.
`parse` rejects all of these.
"""

from __future__ import annotations

import json
import math
import re

DEPTH = 64
"""Maximum nesting depth of objects and arrays."""
_LONG_INTEGER = re.compile(rb"[0-9]{20}")
_NON_FINITE = re.compile(rb"NaN|Infinity|[eE]\+?[0-9]{3}|[0-9]{200}")
"""A body without a match has only finite numbers."""
_SHOWN = 60
"""Maximum number of characters of a client's value in an error message."""


class BodyInvalid(ValueError):
    """A body that is not acceptable JSON; the message is one line."""


def parse(body: bytes) -> object:
    """Parse JSON in UTF-8. Raises BodyInvalid."""
    # `parse_int` is slow on lists of token ids, so it is used only if a number may exceed 64 bits.
    integer = _integer if _LONG_INTEGER.search(body) else None
    try:
        value: object = json.loads(body.decode(), object_pairs_hook=_object, parse_int=integer)
    except UnicodeDecodeError as error:
        raise BodyInvalid(f"body: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise BodyInvalid(f"body: not valid JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep() from error
    # The depth is at most the number of opening brackets.
    if body.count(b"[") + body.count(b"{") > DEPTH and _deeper_than(value, DEPTH):
        raise _too_deep()
    if _NON_FINITE.search(body) and (path := _non_finite(value)) is not None:
        raise BodyInvalid(f"{shown(path)[1:-1] or 'body'}: must be a finite number")
    return value


def parse_object(body: bytes) -> dict[str, object]:
    """Parse a JSON object. Raises BodyInvalid."""
    value = parse(body)
    if not isinstance(value, dict):
        raise BodyInvalid("body: must be a JSON object")
    return value


def check_text(value: object) -> None:
    """Raise BodyInvalid if a string in the value has a lone surrogate, which tokenizers cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BodyInvalid("body: a string has a lone surrogate, which is not a character") from error


def shown(value: object) -> str:
    """Format a client's value for an error message: on one line, and truncated."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _too_deep() -> BodyInvalid:
    return BodyInvalid(f"body: nested too deeply; at most {DEPTH} levels are allowed")


def _deeper_than(value: object, levels: int) -> bool:
    level: list[object] = [value]
    for _ in range(levels):
        children = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        # Most lists contain only token ids, for which checking the set of types is faster than checking each item.
        level = [
            child for each in children if not {dict, list}.isdisjoint(map(type, each)) for child in each if type(child) in (dict, list)
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise BodyInvalid(f"body: the key {shown(twice)} occurs twice in one object")
    return fields


def _non_finite(value: object, path: str = "") -> str | None:
    """The path of a number that is infinite or NaN; None if all are finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    paths = (_non_finite(each, f"{path}.{key}" if path else str(key)) for key, each in items)
    return next((each for each in paths if each is not None), None)


def _integer(text: str) -> int:
    if len(text) > 20:
        raise BodyInvalid(f"body: the integer {text[:20]}… has {len(text)} characters; 64 bits take at most 20")
    return int(text)
