"""Recipes read YAML 1.2 scalars, keep the line of every key, write what they read, and reject hostile documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpctl.errors import UserError
from mtpctl.recipe import yaml12


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("2.", 2.0),
        (".inf", float("inf")),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-3", -3),
        ("no", "no"),
        ("Off", "Off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("1.2.3", "1.2.3"),
        ("!!str 1", "1"),
        ("[a, 1, true]", ["a", 1, True]),
    ],
)
def test_scalars_have_the_types_of_yaml_1_2(text: str, value: Any) -> None:
    result = yaml12.parse(text, "here").value
    assert result == value and type(result) is type(value)


def test_every_key_has_its_line() -> None:
    document = yaml12.parse("a:\n  b: 1\n\n  c: [x,\n      y]\nd: {e: 2}\n", "here")
    assert document.lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 4, ("a", "c", 0): 4, ("a", "c", 1): 5, ("d",): 6, ("d", "e"): 6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "here:3: a is a duplicate key, first set in line 1"),
        ("t:\n  x: 1\n  x: 2\n", "here:3: t.x is a duplicate key, first set in line 2"),
        ("a: [1, 2\nb: 3\n", "here:2: not valid YAML"),
        ("a: 1\n\tb: 2\n", "here:2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "here:2: not valid YAML: but found another document"),
        ("a: !!python/object:os.system x\n", "here:1: .*is not allowed in recipes"),
        ("a: !!timestamp 2024-01-01\n", "here:1: the tag 'timestamp' is not allowed in recipes"),
        ("? [a, b]\n: 1\n", "here:1: a key must be text"),
        ("a: &x\n  b: *x\n", "here:.*not valid YAML|here:1: an anchor contains itself"),
        ("a: !!int x\n", "here:1: 'x' is not a number"),
        ("a: \x00\n", "here: not valid YAML"),
    ],
)
def test_invalid_yaml_is_reported_with_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        yaml12.parse(text, "here")
    assert "\n" not in str(caught.value)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(["no", "1e5", "on", "012", "~", "=", "<<"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_dumped_values_are_read_back(value: Any) -> None:
    assert yaml12.parse(yaml12.dump(value), "dumped").value == value


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 100,000 values"),
        ("[" * 100_000, "nested too deeply"),
        ("{a: " * 100_000, "nested too deeply"),
        ("- " * 5_000 + "1", "nested too deeply"),
        ("a: " + "9" * 5_000, "is not a number"),
        ("a: &a [*a]", "an anchor contains itself"),
    ],
    ids=["aliases", "lists", "mappings", "items", "digits", "cycle"],
)
def test_hostile_document_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        yaml12.parse(text, "recipe.yaml")
    line = str(error.value)
    assert line.startswith("recipe.yaml") and "\n" not in line and len(line) < 300


def test_aliases_of_usual_size_are_read() -> None:
    assert yaml12.parse("a: &a [1, 2]\nb: *a\nc: *a", "recipe.yaml").value == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
