"""Hosts that download through each other: each file leaves the store once, and a host that fails delays the others only."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest
import torch

from mtpctl.cluster.object_store import ObjectStore, StoreFailed
from mtpctl.sync import relay, remote
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.relay import RelayServer, download, upstream_of
from mtpctl.sync.remote import fetch, prefetch

VERSION = "v00000007-0123456789abcdef"
FILES = {f"target-{number:05d}.bin": 300_000 + number for number in range(5)}


class Gated(ObjectStore):
    """A store whose downloads grow in steps, and count."""

    gets: list[str]
    step: Callable[[str, int], None]

    def get(self, name: str, file: Path) -> None:
        Gated.gets.append(name)
        data = (Path(self.url.removeprefix("file://")) / name).read_bytes()
        with file.open("wb", buffering=0) as growing:
            for start in range(0, len(data), 100_000):
                Gated.step(name, start)
                growing.write(data[start : start + 100_000])


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a store with one version."""
    folder = tmp_path / "bucket" / VERSION
    folder.mkdir(parents=True)
    for name, nbytes in FILES.items():
        (folder / name).write_bytes(torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().tobytes())
    monkeypatch.setattr(remote, "ObjectStore", Gated)
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    monkeypatch.setattr(Gated, "gets", [], raising=False)
    monkeypatch.setattr(Gated, "step", lambda name, start: None, raising=False)
    yield f"file://{tmp_path}/bucket"


class Host:
    """A host with its own folder and relay."""

    def __init__(self, root: Path, number: int, kind: type[RelayServer] = RelayServer) -> None:
        self.folder = root / f"host-{number}"
        self.folder.mkdir()
        self.number = number
        self.relay = kind(lambda: self.folder, "127.0.0.1")

    def fetch(self, store: str, before: Host | None) -> None:
        fetch(f"{store}/{VERSION}", self.folder, FILES, relay=before.relay.address if before else "", hops=self.number)

    def assert_complete(self, store: str) -> None:
        files = sorted(path.name for path in (self.folder / VERSION).iterdir())
        assert files == sorted(FILES), "no part is left"
        for name in FILES:
            expected = Path(store.removeprefix("file://"), VERSION, name).read_bytes()
            assert (self.folder / VERSION / name).read_bytes() == expected


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    result = [Host(tmp_path, number) for number in range(4)]
    yield result
    for host in result:
        host.relay.close()


def fetch_all(store: str, hosts: list[Host]) -> None:
    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(lambda pair: pair[0].fetch(store, pair[1]), zip(hosts, [None, *hosts[:-1]], strict=True)))


def test_each_file_leaves_the_store_once(store: str, hosts: list[Host]) -> None:
    fetch_all(store, hosts)
    assert sorted(Gated.gets) == sorted(f"{VERSION}/{name}" for name in FILES)
    for host in hosts:
        host.assert_complete(store)


def test_hosts_pass_on_files_that_still_grow(store: str, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(FILES))
    path = hosts[-1].folder / VERSION / f".{name}"

    def wait_for_the_last_host(name_: str, start: int) -> None:
        until = time.monotonic() + 30
        while name_.endswith(name) and (path.stat().st_size if path.exists() else 0) < start:
            assert time.monotonic() < until, "the last host gets nothing before the first one has everything"
            time.sleep(0.001)

    monkeypatch.setattr(Gated, "step", wait_for_the_last_host)
    fetch_all(store, hosts)
    for host in hosts:
        host.assert_complete(store)


class Dies(RelayServer):
    """A relay whose process ends in the middle of a file."""

    def read(self, file: IO[bytes]) -> bytes:
        if file.tell() > 0:
            raise ConnectionResetError
        return file.read(100_000)


def test_a_host_that_fails_in_the_middle_does_not_change_what_others_get(store: str, tmp_path: Path) -> None:
    kinds = (RelayServer, Dies, RelayServer, RelayServer)
    chain = [Host(tmp_path, number, kind) for number, kind in enumerate(kinds)]
    fetch_all(store, chain)
    assert len(Gated.gets) == 2 * len(FILES), "the host after the failed one downloads from the store, and the one after that from it"
    for host in chain:
        host.assert_complete(store)
        host.relay.close()


def test_without_relay_and_store_nothing_is_complete(store: str, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, start: int) -> None:
        if start:
            raise StoreFailed("503 Slow Down")

    hosts[0].relay.close()
    monkeypatch.setattr(Gated, "step", fail)
    with pytest.raises(remote.SyncError, match="503 Slow Down"):
        hosts[1].fetch(store, hosts[0])
    assert not any(path.suffix == ".bin" and not path.name.startswith(".") for path in (hosts[1].folder / VERSION).iterdir())
    monkeypatch.setattr(Gated, "step", lambda name, start: None)
    hosts[1].fetch(store, hosts[0])
    hosts[1].assert_complete(store)


def test_a_download_that_hangs_is_given_up(store: str, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "STALL_S", 0.2)
    (hosts[0].folder / VERSION).mkdir()
    for name in FILES:
        (hosts[0].folder / VERSION / f".{name}").write_bytes(b"begun")
    hosts[1].fetch(store, hosts[0])
    hosts[1].assert_complete(store)
    assert len(Gated.gets) == len(FILES)


@pytest.mark.parametrize("path", ["/../secret", f"/{VERSION}", f"/{VERSION}/manifest.json", f"/{VERSION}/target-00000.bin?nbytes=x"])
def test_only_files_of_a_version_are_served(hosts: list[Host], path: str) -> None:
    host, _, port = hosts[0].relay.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", path)
    assert connection.getresponse().status == 404


def test_a_shorter_file_is_not_taken(store: str, hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "STALL_S", 0.1)
    name = next(iter(FILES))
    (hosts[0].folder / VERSION).mkdir()
    (hosts[0].folder / VERSION / name).write_bytes(b"short")
    assert not download(hosts[0].relay.address, f"{VERSION}/{name}", FILES[name], tmp_path / "part", hops=1)


def test_only_the_newest_version_comes_from_a_relay(store: str, hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have deleted the versions that a late receiver reads first."""
    monkeypatch.setattr(remote, "open_cache", lambda url, nbytes=0: tmp_path)
    relays: list[str] = []

    def fetch_(address: str, cache: Path, files: dict[str, int], *, relay: str, hops: int) -> Path:
        relays.append(relay)
        return cache / address.rpartition("/")[2]

    monkeypatch.setattr(remote, "fetch", fetch_)
    manifests = [Manifest(number, "storage", f"{store}/v0000000{number}-0a", {}, relay="10.0.0.1:1", hops=1) for number in (1, 2)]
    prefetch(manifests)
    assert relays == ["", "10.0.0.1:1"]


def test_hosts_form_a_chain() -> None:
    addresses = ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.1:3", "10.0.0.3:4"]
    assert upstream_of(addresses) == [("", 0), ("10.0.0.1:1", 1), ("", 0), ("10.0.0.2:2", 2)]
