"""Read numbers without importing all of sympy for each of them.

sympy's `parse_expr`, through which it reads every number that it is given as text, makes the names that the text may use anew each time, by
an import of everything. That is a third of what math-verify takes for an answer. Here they are made once, by sympy itself, and copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from sympy.parsing import sympy_parser

Names = dict[str, object]


def install() -> None:
    """Have `parse_expr` copy the names where a caller gives none. Raises RuntimeError where sympy hands them to transformations no more."""
    upstream: Callable[..., object] = sympy_parser.parse_expr
    if hasattr(upstream, "__wrapped__"):
        return
    made: Names = {}

    def keep(tokens: list[tuple[int, str]], _: Names, names: Names) -> list[tuple[int, str]]:
        made.update(names)
        return tokens

    upstream("1", transformations=(keep, *sympy_parser.standard_transformations))
    if "Integer" not in made:
        raise RuntimeError(f"sympy's parse_expr gives transformations no names any more: see {__name__}")

    @functools.wraps(upstream)
    def parse_expr(
        s: str,
        local_dict: Names | None = None,
        transformations: object = sympy_parser.standard_transformations,
        global_dict: Names | None = None,
        evaluate: bool = True,
    ) -> object:
        return upstream(s, local_dict, transformations, made.copy() if global_dict is None else global_dict, evaluate)

    vars(sympy_parser)["parse_expr"] = parse_expr
