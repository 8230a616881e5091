"""Which `Host` and `Origin` a web page of a stranger cannot have."""

from __future__ import annotations

import socket

import pytest

from mtpctl.web.guard import HOSTS, is_allowed_host, is_same_origin


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
    monkeypatch.setenv(HOSTS, " gate.corp,Other.Corp")
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
