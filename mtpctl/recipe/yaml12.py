"""Reads and writes YAML 1.2 with PyYAML. The parser records the line of every key, and rejects duplicate keys.

PyYAML reads YAML 1.1, in which `1e-5` is text, `no` and `off` are booleans, `010` is 8 and `12:30` is 750. The resolvers here follow the
core schema of YAML 1.2: only `true` and `false` are booleans.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from mtpctl.errors import UserError

KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""

_MAX_VALUES = 100_000
"""Maximum number of values in a document, counting each use of an anchor: a few nested aliases can expand to billions."""

_PREFIX = "tag:yaml.org,2002:"
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("float", r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+.0123456789"),
)
"""Types of unquoted scalars: name, pattern, and the characters with which one can begin (NUL for empty text)."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would parse as another type."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> ScalarNode:
    # Unicode line breaks and the byte-order mark are only preserved in double quotes.
    style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar(_PREFIX + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _name, _pattern, _first_characters in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _name, re.compile(_pattern), ["" if c == "\0" else c for c in _first_characters])


@dataclass(slots=True)
class Document:
    """A parsed document: its value, and the line (from 1) of every key and list item by path."""

    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)


def parse(text: str, source: str) -> Document:
    """Parse one YAML document. `source` names it in errors.

    Raises UserError with `source:line` for invalid YAML, duplicate keys, keys that are lists or mappings, tags outside the core schema,
    recursive anchors, several documents, excessive nesting and too many values.
    """
    document = Document(None)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is not None:
            document.value = _build(node, (), document.lines, source, set(), itertools.count())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.problem, f"({error.context})" if error.context else None) if part)
        raise UserError(f"{source}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise UserError(f"{source}: lists and mappings are nested too deeply; flatten them") from None
    return document


def parse_value(text: str) -> object:
    """The YAML value in `--set key=value`. Raises UserError if it is not valid YAML."""
    return parse(text, f"--set value {text[:40]!r}").value


def dump(value: object) -> str:
    """YAML text that `parse` reads as `value`. The order of keys is preserved."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _build(node: Node, path: KeyPath, lines: dict[KeyPath, int], source: str, open_nodes: set[int], count: Iterator[int]) -> object:
    location = f"{source}:{node.start_mark.line + 1}"
    if next(count) >= _MAX_VALUES:
        raise UserError(f"{location}: the document has more than {_MAX_VALUES:,} values, counting each use of an anchor; remove aliases")
    if id(node) in open_nodes:
        raise UserError(f"{location}: an anchor contains itself")
    if isinstance(node, ScalarNode):
        return _scalar(node, location)
    open_nodes.add(id(node))
    try:
        if isinstance(node, SequenceNode) and node.tag == _PREFIX + "seq":
            lines.update({(*path, index): item.start_mark.line + 1 for index, item in enumerate(node.value)})
            return [_build(item, (*path, index), lines, source, open_nodes, count) for index, item in enumerate(node.value)]
        if isinstance(node, MappingNode) and node.tag == _PREFIX + "map":
            return {key: _build(item, (*path, key), lines, source, open_nodes, count) for key, item in _pairs(node, path, lines, source)}
    finally:
        open_nodes.discard(id(node))
    raise UserError(f"{location}: the tag {node.tag.removeprefix(_PREFIX)!r} is not allowed in recipes; write plain YAML")


def _pairs(node: MappingNode, path: KeyPath, lines: dict[KeyPath, int], source: str) -> Iterator[tuple[str, Node]]:
    first_lines: dict[str, int] = {}
    for key_node, item in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            raise UserError(f"{source}:{line}: a key must be text")
        key = key_node.value
        if key in first_lines:
            raise UserError(f"{source}:{line}: {'.'.join(map(str, (*path, key)))} is a duplicate key, first set in line {first_lines[key]}")
        first_lines[key] = line
        lines[(*path, key)] = line
        yield key, item


def _scalar(node: ScalarNode, location: str) -> object:
    text, kind = node.value, node.tag.removeprefix(_PREFIX)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if kind == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError as error:
        raise UserError(f"{location}: {text[:40]!r} is not a number") from error
    raise UserError(f"{location}: the tag {kind!r} is not allowed in recipes; write plain YAML")
