"""Documents that are made to exhaust the reader are refused in one line."""

from __future__ import annotations

import pytest

from mtpctl.errors import UserError
from mtpctl.recipe import yaml12

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
