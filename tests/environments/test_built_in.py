"""The environment that computes: arithmetic and nothing else, and an answer to whatever the model writes."""

from __future__ import annotations

import asyncio

import pytest

from mtpctl.environments.built_in import Calculator, compute


def asked(turn: str) -> str:
    return asyncio.run(Calculator(None).reply(turn))


@pytest.mark.parametrize(
    ("expression", "value"), [("1+2", 3), ("2*(3-5)", -4), ("7/2", 3.5), ("7//2", 3), ("-3 % 5", 2), (" 12 ", 12), ("1.5*4", 6)]
)
def test_calculator_evaluates_expressions(expression: str, value: float) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize(
    "turn", ["1/0", "2**999", "x", "", "__import__('os')", "1+", "(" * 150, "9" * 300, "10.0**400", "1 if 2 else 3", "True", "1j", "\x00"]
)
def test_any_expression_gets_a_reply(turn: str) -> None:
    assert asked(f"so <calc>{turn}</calc>") == "<result>error</result>"


def test_the_last_call_of_a_turn_is_answered() -> None:
    assert asked("<calc>1</calc> no, <calc>2*21</calc>") == "<result>42</result>"
    assert asked("<calc>1/8</calc>") == "<result>0.125</result>"


def test_answer_may_contain_braces_and_the_opening_may_be_empty() -> None:
    calculator = Calculator(None, opening="", closing="=", answer='{"value": {}}')
    assert asyncio.run(calculator.reply("6*7=")) == '{"value": 42}'
