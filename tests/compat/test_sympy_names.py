"""`parse_expr` with cached names returns upstream's results, and does not import all of sympy for each text."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from sympy.parsing import sympy_parser

from mtpctl.compat import sympy_names

TEXTS = ["3", "2.50", "x**2 + 2*x + 1", "sqrt(8)", "max(2, 3)", "abs(-2)", "sin(pi/6)", "f(x)", "Matrix([1, 2])", "5!"]


def test_texts_are_parsed_as_upstream_does_without_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    sympy_names.install()
    upstream = sympy_parser.parse_expr.__wrapped__
    transformations = (*sympy_parser.standard_transformations, sympy_parser.factorial_notation)
    expected = [upstream(text, transformations=transformations) for text in TEXTS]

    def imports(*_: Any) -> None:
        raise AssertionError("all of sympy was imported")

    monkeypatch.setattr(sympy_parser, "exec", imports, raising=False)
    assert [sympy_parser.parse_expr(text, transformations=transformations) for text in TEXTS] == expected
    assert sympy.sympify("3/4") == sympy.Rational(3, 4)


def test_names_of_one_text_do_not_leak_into_the_next() -> None:
    sympy_names.install()
    assert sympy_parser.parse_expr("x + 1", {"x": sympy.Integer(2)}) == 3
    assert sympy_parser.parse_expr("x + 1") == sympy.Symbol("x") + 1
    assert sympy_parser.parse_expr("more(2)", global_dict={"more": lambda number: number + 1, "Integer": int}) == 3
