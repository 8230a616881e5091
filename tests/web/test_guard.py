"""Checks of `Host` and `Origin`, and JSON of untrusted clients."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

import pytest

from mtpctl.web.guard import (
    HOSTS_VARIABLE,
    MAX_JSON_DEPTH,
    BodyInvalid,
    check_text,
    is_allowed_host,
    is_same_origin,
    parse_json,
    parse_json_object,
    quote_value,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "10.0.0.7:8338", "[::1]", "localhost:1", "LocalHost.", "node7:80"])
def test_an_address_and_a_local_name_are_accepted(host: str) -> None:
    assert is_allowed_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "1.2.3",
        "256.1.1.1",
        "[evil]",
        "a b",
        "a@b",
        "",
        ":80",
        "x:y",
        "ü",
        "a/b",
    ],
)
def test_a_public_domain_is_rejected(host: str) -> None:
    assert not is_allowed_host(host)


def test_names_of_the_machine_and_allowed_hosts_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.corp")
    assert is_allowed_host("node7.cluster.corp:80") and not is_allowed_host("gate.corp")
    monkeypatch.setenv(HOSTS_VARIABLE, " gate.corp,Other.Corp")
    assert is_allowed_host("GATE.corp:443") and is_allowed_host("other.corp") and not is_allowed_host("x.gate.corp")


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://127.0.0.1:80", "127.0.0.1:80", True),
        ("https://gate.corp", "Gate.corp", True),
        ("http://127.0.0.1:81", "127.0.0.1:80", False),
        ("http://evil.example", "127.0.0.1", False),
        ("null", "127.0.0.1", False),
        ("file://127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("", "", False),
    ],
)
def test_an_origin_must_be_the_host(origin: str, host: str, same: bool) -> None:
    assert is_same_origin(origin, host) == same


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
        (nested(MAX_JSON_DEPTH + 1), "nested too deeply"),
        (nested(100_000), "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"' + b"k" * 10_000 + b'": NaN}', "must be a finite number"),
    ],
)
def test_json_that_only_python_accepts_is_rejected(body: bytes, reason: str) -> None:
    with pytest.raises(BodyInvalid) as caught:
        parse_json(body)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def random_json(rng: random.Random, levels: int) -> Any:
    kind = rng.randrange(8 if levels else 6)
    if kind < 6:
        return [None, True, rng.randrange(-(1 << 63), 1 << 63), rng.uniform(-1e300, 1e300), "NaN ü\n☃", 1e-320][kind]
    size = rng.randrange(4)
    if kind == 6:
        return [random_json(rng, levels - 1) for _ in range(size)]
    return {f"k{number}": random_json(rng, levels - 1) for number in range(size)}


def test_other_values_are_parsed_as_by_python() -> None:
    rng = random.Random(0)
    for _ in range(500):
        value = random_json(rng, 8)
        assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(nested(MAX_JSON_DEPTH)) == json.loads(nested(MAX_JSON_DEPTH))
    assert parse_json(b'["' + b"[" * 1000 + b'"]') == ["[" * 1000]
    assert parse_json(b"[0.3333333333333333333333333]") == [1 / 3]


def test_a_body_without_an_object_and_lone_surrogates_are_rejected() -> None:
    with pytest.raises(BodyInvalid, match="must be a JSON object"):
        parse_json_object(b"[]")
    check_text({"a": ["☃🂡"]})
    for value in ({"a": ["\ud800"]}, {"\udfff": 1}):
        with pytest.raises(BodyInvalid, match="lone surrogate"):
            check_text(value)


def test_a_clients_value_is_shown_on_one_line() -> None:
    assert quote_value("a\nb") == r"'a\nb'" and len(quote_value("x" * 10_000)) < 100
