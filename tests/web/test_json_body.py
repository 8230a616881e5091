"""JSON of clients that are not trusted."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mtpctl.web.json_body import DEPTH, BodyInvalid, check_text, parse, parse_object, shown


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
        (b'[{"x": {"a": 1, "a": 1}}]', "the key 'a' occurs twice"),
        (b'{"x": [0, NaN]}', "x.1: must be a finite number"),
        (b'{"x": -Infinity}', "x: must be a finite number"),
        (b"1e999", "body: must be a finite number"),
        (b"1" + b"0" * 400 + b".5", "body: must be a finite number"),
        (b"9" * 250 + b"e99", "body: must be a finite number"),
        (b"-" + b"9" * 5000, "the integer -9999999999999999999… has 5001 characters"),
        (nested(DEPTH + 1), "nested too deeply"),
        (nested(100_000), "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"' + b"k" * 10_000 + b'": NaN}', "must be a finite number"),
    ],
)
def test_json_that_only_python_accepts_is_rejected(body: bytes, reason: str) -> None:
    with pytest.raises(BodyInvalid) as caught:
        parse(body)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def drawn(chance: random.Random, levels: int) -> Any:
    kind = chance.randrange(8 if levels else 6)
    if kind < 6:
        return [None, True, chance.randrange(-(1 << 63), 1 << 63), chance.uniform(-1e300, 1e300), "NaN ü\n☃", 1e-320][kind]
    size = chance.randrange(4)
    if kind == 6:
        return [drawn(chance, levels - 1) for _ in range(size)]
    return {f"k{number}": drawn(chance, levels - 1) for number in range(size)}


def test_other_values_are_parsed_as_by_python() -> None:
    chance = random.Random(0)
    for _ in range(500):
        value = drawn(chance, 8)
        assert parse(json.dumps(value).encode()) == value
    assert parse(nested(DEPTH)) == json.loads(nested(DEPTH))
    assert parse(b'["' + b"[" * 1000 + b'"]') == ["[" * 1000]
    assert parse(b"[0.3333333333333333333333333]") == [1 / 3]


def test_a_body_without_an_object_and_lone_surrogates_are_rejected() -> None:
    with pytest.raises(BodyInvalid, match="must be a JSON object"):
        parse_object(b"[]")
    check_text({"a": ["☃🂡"]})
    for value in ({"a": ["\ud800"]}, {"\udfff": 1}):
        with pytest.raises(BodyInvalid, match="lone surrogate"):
            check_text(value)


def test_a_clients_value_is_shown_on_one_line() -> None:
    assert shown("a\nb") == r"'a\nb'" and len(shown("x" * 10_000)) < 100
