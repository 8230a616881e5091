"""Hosts that download through each other: each file leaves the store once, and a host that fails delays the others only."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from mtpctl.cluster import object_store
from mtpctl.cluster.object_store import ObjectStore, StoreFailed
from mtpctl.sync import remote
from mtpctl.sync.protocol import Manifest, SyncError
from mtpctl.sync.remote import ChainLink, RelayServer, compute_digests, download, fetch, prefetch, upstream_of

VERSION = "v00000007-0123456789abcdef"
FILES = {f"target-{number:05d}.bin": 300_000 + number for number in range(5)}


class Gated(ObjectStore):
    """A store that counts its downloads and calls `step` before each piece. `get` writes the last piece first, as s3fs may."""

    gets: list[str]
    step: Callable[[str, int], None]

    def get(self, name: str, file: Path) -> None:
        Gated.gets.append(name)
        data = (Path(self.url.removeprefix("file://")) / name).read_bytes()
        with file.open("wb", buffering=0) as written:
            written.truncate(len(data))
            for start in reversed(range(0, len(data), 100_000)):
                Gated.step(name, start)
                written.seek(start)
                written.write(data[start : start + 100_000])

    def append(self, name: str, file: Path, nbytes: int) -> None:
        if not file.exists() or file.stat().st_size < nbytes:
            Gated.gets.append(name)
        super().append(name, file, nbytes)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        Gated.step(name, start)
        return super().read_range(name, start, end)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a store with one version."""
    folder = tmp_path / "bucket" / VERSION
    folder.mkdir(parents=True)
    for name, nbytes in FILES.items():
        (folder / name).write_bytes(torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().tobytes())
    monkeypatch.setattr(remote, "ObjectStore", Gated)
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)
    monkeypatch.setattr(object_store, "REQUEST_BYTES", 100_000)
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
        digests = compute_digests(sorted(Path(store.removeprefix("file://"), VERSION).iterdir()))
        fetch(f"{store}/{VERSION}", self.folder, FILES, ChainLink(before.relay.address if before else "", self.number, digests))

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


def test_relay_sends_nothing_of_a_file_whose_end_is_written_first(store: str, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host downloads for a receiver that is not in the chain, so its files do not grow from the front."""
    requested = threading.Event()
    monkeypatch.setattr(Gated, "step", lambda name, start: requested.wait(30) if not start else None)

    class Asked(RelayServer):
        def _respond(self, handler: BaseHTTPRequestHandler) -> None:
            requested.set()
            super()._respond(handler)

    (hosts[0].folder / "first").mkdir()
    first = Asked(lambda: hosts[0].folder / "first", "127.0.0.1")
    try:
        with ThreadPoolExecutor(1) as pool:
            outside = pool.submit(fetch, f"{store}/{VERSION}", hosts[0].folder / "first", FILES)
            link = ChainLink(first.address, 1, compute_digests(sorted(Path(store.removeprefix("file://"), VERSION).iterdir())))
            fetch(f"{store}/{VERSION}", hosts[1].folder, FILES, link)
            outside.result()
    finally:
        first.close()
    hosts[1].assert_complete(store)
    assert len(Gated.gets) == len(FILES), "the relay waited for whole files"


def test_every_download_of_a_host_in_a_chain_grows_from_the_front(
    store: str, hosts: list[Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also that of a log-prob rank, which does not know the chain."""
    offsets: list[int] = []
    monkeypatch.setattr(object_store, "READ_AHEAD", 1)
    monkeypatch.setattr(remote, "CONNECTIONS", 1)
    monkeypatch.setattr(Gated, "step", lambda name, start: offsets.append(start))
    fetch_all(store, hosts[:1])
    in_order, offsets[:] = offsets[:], []
    Path(store.removeprefix("file://"), VERSION).rename(tmp_path / "bucket" / "v00000008-0a")
    fetch(f"{store}/v00000008-0a", hosts[0].folder, FILES)
    assert offsets == in_order and offsets[:3] == [0, 100_000, 200_000]


class Zeros(RelayServer):
    """A relay whose files have other bytes."""

    def read(self, file: IO[bytes]) -> bytes:
        return bytes(len(super().read(file)))


def test_other_bytes_are_detected(store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain = [Host(tmp_path, number, kind) for number, kind in enumerate((Zeros, RelayServer))]
    with caplog.at_level(logging.WARNING):
        fetch_all(store, chain)
    assert "does not match its digest" in caplog.text and VERSION not in caplog.text
    assert len(Gated.gets) == 2 * len(FILES)
    for host in chain:
        host.assert_complete(store)
        host.relay.close()


class Dies(RelayServer):
    """A relay whose process ends in the middle of a file."""

    def read(self, file: IO[bytes]) -> bytes:
        if file.tell() > 0:
            raise ConnectionResetError
        return file.read(100_000)


def test_host_that_fails_during_a_transfer_does_not_affect_other_hosts(store: str, tmp_path: Path) -> None:
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


def test_only_the_host_after_a_hanging_one_downloads_from_the_store(store: str, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALL_S", 0.1)
    (hosts[0].folder / VERSION).mkdir()
    for name in FILES:
        begun = Path(store.removeprefix("file://"), VERSION, name).read_bytes()[:5]
        (hosts[0].folder / VERSION / f".{name}").write_bytes(begun)
    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(lambda pair: pair[1].fetch(store, pair[0]), pairwise(hosts)))
    assert sorted(Gated.gets) == sorted(f"{VERSION}/{name}" for name in FILES)
    for host in hosts[1:]:
        host.assert_complete(store)


def test_a_relay_that_failed_is_not_used_for_further_files(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CONNECTIONS", 1)
    requests: list[str] = []

    class Refusing(RelayServer):
        def _respond(self, handler: BaseHTTPRequestHandler) -> None:
            requests.append(handler.path)
            handler.send_error(404)

    chain = [Host(tmp_path, number, kind) for number, kind in enumerate((Refusing, RelayServer))]
    chain[1].fetch(store, chain[0])
    chain[1].assert_complete(store)
    assert len(requests) == 1
    for host in chain:
        host.relay.close()


def test_rest_of_a_broken_file_comes_from_the_store(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart at the first byte would stop the hosts after it for the time of the bytes that they have."""
    # Further files would not use a relay that has failed.
    name = max(FILES)
    monkeypatch.setattr(f"{__name__}.FILES", {name: FILES[name]})
    chain = [Host(tmp_path, number, kind) for number, kind in enumerate((Dies, RelayServer))]
    chain[0].fetch(store, None)
    offsets: list[int] = []
    monkeypatch.setattr(Gated, "step", lambda name, start: offsets.append(start))
    chain[1].fetch(store, chain[0])
    chain[1].assert_complete(store)
    assert sorted(offsets) == [100_000, 200_000, 300_000]
    for host in chain:
        host.relay.close()


def test_a_full_disk_is_not_reported_as_a_failure_of_the_relay(store: str, hosts: list[Host]) -> None:
    hosts[0].fetch(store, None)
    (hosts[1].folder / VERSION).mkdir()
    (hosts[1].folder / VERSION / f".{next(iter(FILES))}").symlink_to("/dev/full")
    name, digests = next(iter(FILES)), dict.fromkeys(FILES, "")
    with pytest.raises(OSError, match="No space left"):
        download(ChainLink(hosts[0].relay.address, 1, digests), f"{VERSION}/{name}", FILES[name], hosts[1].folder / VERSION / f".{name}")


def status_of(host: Host, path: str) -> int:
    address, _, port = host.relay.address.rpartition(":")
    connection = http.client.HTTPConnection(address, int(port), timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_only_files_of_a_version_are_served(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALL_S", 0.1)
    folder, wanted = hosts[0].folder / VERSION, "?nbytes=5&hops=0"
    folder.mkdir()
    for path in (
        folder / "target-00000.bin",
        folder / "manifest.json",
        hosts[0].folder / "target-00000.bin",
        hosts[0].folder.parent / "secret",
    ):
        path.write_bytes(b"12345")
    assert status_of(hosts[0], f"/{VERSION}/target-00000.bin{wanted}") == 200
    for name in ("../secret", "target-00000.bin", VERSION, f"{VERSION}/manifest.json", f"{VERSION}/../target-00000.bin"):
        assert status_of(hosts[0], f"/{name}{wanted}") == 404
    assert status_of(hosts[0], f"/{VERSION}/target-00000.bin?nbytes=x&hops=0") == 404
    assert status_of(hosts[0], f"/{VERSION}/target-00001.bin{wanted}") == 404, "not begun"


def test_relay_of_a_host_without_downloads_creates_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first download decides where the folder is."""
    monkeypatch.setattr(remote, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path))
    assert remote.find_cache("s3://bucket/run") is None
    assert not list(tmp_path.iterdir())
    cache = remote.open_cache("s3://bucket/run", 5)
    assert remote.find_cache("s3://bucket/run") == cache == next(tmp_path.glob("mtpctl-fetched-*"))


def test_truncated_file_is_rejected(store: str, hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALL_S", 0.1)
    name = next(iter(FILES))
    (hosts[0].folder / VERSION).mkdir()
    (hosts[0].folder / VERSION / name).write_bytes(b"short")
    assert not download(ChainLink(hosts[0].relay.address, 0, {}), f"{VERSION}/{name}", FILES[name], tmp_path / "part")


def test_manifests_of_a_version_store_name_no_relay(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is behind reads them, and other hosts may not have those versions."""
    monkeypatch.setattr(remote, "open_cache", lambda url, nbytes: tmp_path)
    links: list[ChainLink | None] = []

    def fetch_(address: str, cache: Path, files: dict[str, int], link: ChainLink | None) -> Path:
        links.append(link)
        return cache / address.rpartition("/")[2]

    monkeypatch.setattr(remote, "fetch", fetch_)
    published = Manifest(1, "storage", f"{store}/v00000001-0a", {}, digests={"a": "b"})
    relayed = replace(published, relay="10.0.0.1:1", hops=1)
    prefetch([relayed])
    prefetch([Manifest.from_dict(relayed.to_dict()), replace(published, digests={})])
    assert links == [ChainLink("10.0.0.1:1", 1, {"a": "b"}), ChainLink("", 0, {"a": "b"}), None]


def test_hosts_form_a_chain() -> None:
    addresses = ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.1:3", "10.0.0.3:4"]
    assert upstream_of(addresses) == [("", 0), ("10.0.0.1:1", 1), ("", 0), ("10.0.0.2:2", 2)]


def test_folder_is_in_shared_memory_only_if_two_versions_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is deleted after the next one is complete."""
    memory, disk = tmp_path / "shm", tmp_path / "disk"
    memory.mkdir(), disk.mkdir()
    monkeypatch.setattr(remote, "SHARED_MEMORY", memory)
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(disk))
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: SimpleNamespace(free=30))
    assert remote.open_cache("s3://bucket/a", 20).parent == disk
    assert remote.open_cache("s3://bucket/b", 14).parent == memory


def test_folder_that_cannot_be_created_is_an_error_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(remote, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(SyncError, match=r"file/mtpctl-fetched-\w+: the folder for weights cannot be created: "):
        remote.open_cache("s3://bucket/run", 5)


def test_host_that_disconnects_leaves_no_traceback(hosts: list[Host], capfd: pytest.CaptureFixture[str]) -> None:
    """As a host does that downloads from the store instead."""
    name, nbytes = "target-00000.bin", 64 << 20
    (hosts[0].folder / VERSION).mkdir()
    (hosts[0].folder / VERSION / name).write_bytes(bytes(nbytes))
    address, _, port = hosts[0].relay.address.rpartition(":")
    with socket.create_connection((address, int(port))) as connection:
        connection.sendall(f"GET /{VERSION}/{name}?nbytes={nbytes}&hops=1 HTTP/1.1\r\n\r\n".encode())
        connection.recv(1000)
    deadline = time.monotonic() + 10
    while any("process_request_thread" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert capfd.readouterr().err == ""
