"""Links between hosts: every pair is measured, and slow links are reported."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from mtpctl.cluster import links
from mtpctl.cluster.links import Endpoint, Link, find_slow, measure_links, schedule_pairs


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_every_pair_is_measured_once_and_no_host_twice_in_a_round(count: int) -> None:
    rounds = schedule_pairs(count)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    for each in rounds:
        hosts = [host for pair in each for host in pair]
        assert len(hosts) == len(set(hosts))


def test_rate_and_latency_of_a_link_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TRANSFER_BYTES", 4 << 20)
    there = Endpoint().listen("127.0.0.1")
    for _ in range(2):
        latency, rate = Endpoint().measure(*there)
        assert 0 < latency < 5 and rate > 1e6


def test_an_unreachable_host_is_an_error() -> None:
    with pytest.raises(OSError):
        Endpoint().measure("127.0.0.1", 1)


def test_slow_and_failed_links_are_reported() -> None:
    good = [Link("a", "b", 1e-4, 1.2e9), Link("a", "c", 1e-4, 1.0e9), Link("b", "c", 1.2e-4, 1.1e9)]
    assert find_slow(good) == []
    thin, far, dead = Link("c", "d", 1e-4, 1e8), Link("a", "d", 0.02, 1e9), Link("b", "d", error="not reached: refused")
    assert find_slow([*good, thin, far, dead]) == [thin, far, dead]
    assert str(thin) == "c – d: 0.10 GB/s, 0.10 ms round trip"
    assert find_slow([dead]) == [dead]


def test_connection_that_times_out_is_not_reported_as_a_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def listen() -> tuple[str, int]:
        return "10.0.0.1", 1

    async def measure(*_: object) -> object:
        raise RayTaskError("measure", "traceback", TimeoutError("timed out")).as_instanceof_cause()

    endpoint = SimpleNamespace(listen=SimpleNamespace(remote=listen), measure=SimpleNamespace(remote=measure))
    actor: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: endpoint))
    monkeypatch.setattr(ray, "remote", lambda _: actor)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(links, "list_ray_hosts", lambda: [SimpleNamespace(node_id="00" * 28, name=name) for name in "ab"])
    assert asyncio.run(measure_links()) == [Link("a", "b", error="not reached: timed out")]
