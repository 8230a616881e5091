"""The names that tests need of an answer."""

from __future__ import annotations

import ast


def names_in(tests: list[str], entry_point: str | None) -> list[str]:
    """Names that the tests read, and the entry point. Raises SyntaxError where a test is no Python."""
    trees = [ast.parse(test) for test in tests]
    names = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return sorted(names | ({entry_point} if entry_point else set()))


def builtin_names(entry_point: str | None) -> list[str]:
    """Names that are the answer's, even where Python has a thing of its own by that name."""
    return [entry_point] if entry_point else []
