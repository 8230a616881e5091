"""A store listens from the moment its address is known, so that no other process can take its port."""

from __future__ import annotations

import errno
import socket
import time
from functools import partial
from typing import Any

import pytest

from mtpctl.cluster.rendezvous import address_of, host_store, join_store
from tests.fakes.forked import start_forked


def taken(address: str) -> bool:
    """Whether another listener is refused this address."""
    host, port = address.rsplit(":", 1)
    with socket.socket() as other:
        try:
            other.bind((host, int(port)))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return True
    return False


def _greet(address: str) -> None:
    join_store(address, 30).set("greeting", "hello")


def test_a_store_is_joined_at_its_address() -> None:
    store = host_store()
    other = start_forked(partial(_greet, address_of(store)))
    assert store.get("greeting") == b"hello"
    other.join(30)
    assert other.exitcode == 0


def test_a_store_uses_the_hosts_address_in_the_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's name often resolves to its loopback, which other hosts cannot reach."""
    monkeypatch.setattr("socket.gethostbyname", lambda _: "127.0.0.1")
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.2")
    store = host_store()
    assert address_of(store).startswith("127.0.0.2:")
    join_store(address_of(store)).set("greeting", "hello")
    assert store.get("greeting") == b"hello"


def test_a_store_keeps_its_port_until_it_is_closed() -> None:
    store = host_store("127.0.0.1")
    address = address_of(store)
    assert taken(address)
    del store
    assert not taken(address)


def test_joining_without_a_store_fails_at_once() -> None:
    store = host_store("127.0.0.1")
    address = address_of(store)
    del store
    began = time.monotonic()
    with pytest.raises(OSError, match="refused"):
        join_store(address)
    assert time.monotonic() - began < 10


def test_reading_a_missing_key_times_out() -> None:
    store = host_store("127.0.0.1")
    joined = join_store(address_of(store), 0.2)
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        joined.get("nothing")


@pytest.mark.parametrize("kind", ["trainer", "log-prob replica"])
def test_rank_0_hosts_the_store_whose_address_it_returns(kind: str) -> None:
    rank = first_rank(kind)
    assert taken(rank.address())


def first_rank(kind: str) -> Any:
    if kind == "trainer":
        from mtpctl.recipe.loading import load_recipe
        from mtpctl.trainer.actor import TrainerRank

        return TrainerRank(load_recipe("tiny_mtp").recipe.model_dump_json(by_alias=True), 0, 2)
    from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
    from mtpctl.recipe.model import MtpConfig
    from mtpctl.recipe.schema import KernelsConfig
    from mtpctl.recipe.section import ParallelConfig

    parallel = ParallelConfig(tp=2)
    return ScoreRank(ReplicaConfig("model", parallel, "fp32", MtpConfig(), KernelsConfig(), tokens_per_batch=64), 0)
