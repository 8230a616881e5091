"""Everything that a command listens on accepts connections of this host only, and its files are readable by this user only."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mtpctl.cluster import leftovers
from mtpctl.cluster.local import keep_token_private, make_private_sessions
from mtpctl.cluster.rendezvous import host_store
from mtpctl.errors import PrerequisiteMissing
from mtpctl.sync.remote import RelayServer
from mtpctl.telemetry.run_directory import RECIPE, RunDirectory
from tests.fakes.daemons import Command, started


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    """One for all tests of this file, which only look at it."""
    with started() as command:
        yield command


def listening(process: psutil.Process) -> set[str]:
    """The addresses at which a process takes TCP connections."""
    return {each.laddr.ip for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN}


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_local_cluster_and_its_actors_listen_on_loopback_only(command: Command) -> None:
    store, gloo, nccl = command.ask("store").split()
    addresses = {process.name(): listening(process) for process in (psutil.Process(command.process.pid), *command.started)}
    assert addresses["gcs_server"] and addresses["raylet"], "no sockets to check"
    assert all(is_loopback(address) for each in addresses.values() for address in each), addresses
    # Ranks of the trainer meet at a store, and connect by gloo and NCCL.
    assert is_loopback(store.rpartition(":")[0])
    assert (gloo, nccl) == ("lo", "lo")


def test_token_of_a_local_cluster_is_private(command: Command) -> None:
    token = command.home / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert mode(token) == 0o600 and mode(token.parent) == 0o700


def test_sessions_of_ray_are_out_of_reach_of_other_users(command: Command) -> None:
    private = command.home.parent / f"mtpctl-{os.getuid()}"
    assert mode(private) == 0o700
    (session,) = (private / "ray").glob("session_2*")
    assert (session / "sockets" / "raylet").is_socket()


def test_directory_of_another_user_is_not_used_for_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made it could replace what is in it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    private = leftovers.sessions_folder().parent
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    private.symlink_to(elsewhere)
    with pytest.raises(PrerequisiteMissing, match=f"^{private}: does not belong to this user; remove it, or set RAY_TMPDIR"):
        make_private_sessions()
    private.unlink()
    private.mkdir(mode=0o755)
    assert make_private_sessions() == private / "ray" and mode(private) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "mtpctl-12345").mkdir()
    with pytest.raises(PrerequisiteMissing, match="does not belong to this user"):
        make_private_sessions()


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_readable_token_is_restricted_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(umask)
    try:
        keep_token_private()
        token = tmp_path / ".ray" / "auth_token"
        text = token.read_text()
        assert len(text) == 64 and mode(token) == 0o600
        token.chmod(0o644)
        keep_token_private()
    finally:
        os.umask(before)
    assert token.read_text() == text and mode(token) == 0o600
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_token_from_the_environment_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    keep_token_private()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_rendezvous_store_listens_on_its_host_only(host: str) -> None:
    before = listening(psutil.Process())
    store = host_store(host)
    assert listening(psutil.Process()) - before <= {host}
    ports = {each.laddr for each in psutil.Process().net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN}
    assert (host, store.port) in ports


def test_relay_listens_on_its_host_only(tmp_path: Path) -> None:
    before = listening(psutil.Process())
    relay = RelayServer(lambda: tmp_path, "127.0.0.2")
    try:
        assert listening(psutil.Process()) - before <= {"127.0.0.2"}
        assert relay.address.startswith("127.0.0.2:")
    finally:
        relay.close()


def test_run_directory_and_recipes_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for text in ("steps: 1\n", "steps: 2\n"):
            with RunDirectory.create(tmp_path / "run", text) as run:
                run.record(text)
    finally:
        os.umask(before)
    assert mode(run.path) == 0o700
    assert [mode(path) for path in (run.path / RECIPE, *run.logs.iterdir())] == [0o600, 0o600]


def test_weights_in_shared_memory_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        leftovers.make_marked(tmp_path / "mtpctl-run")
    finally:
        os.umask(before)
    assert mode(tmp_path / "mtpctl-run") == 0o700
