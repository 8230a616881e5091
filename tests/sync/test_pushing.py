"""`ipc` and `nccl` between processes (a mapped file and gloo on a CPU): byte-equal, one group for all versions, deadlines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import Manifest, PlanMismatch, SyncError
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import cancel
from mtpctl.sync.transports.shm import Writer
from tests.fakes.pushing import CONTEXT, Die, Receiver, in_process, model, receivers, sender

TRANSPORTS = ["ipc", "nccl"]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Receiver]]:
    yield from receivers(2)


def newest(store: VersionStore) -> Manifest:
    return store.open(store.versions()[-1])


def equal(taken: Any, version: int) -> bool:
    return (
        isinstance(taken, dict)
        and {name: torch.tensor(value) for name, value in taken.items()}.keys() == model(version).keys()
        and all(torch.equal(torch.tensor(taken[name]), tensor) for name, tensor in model(version).items())
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_receiver_gets_every_byte(tmp_path: Path, pair: list[Receiver], transport: str) -> None:
    sends = sender(tmp_path, transport)
    addresses = set()
    for version in (1, 2, 3):
        manifest = sends.announce(version, ["a", "b"])
        addresses.add(manifest.address)
        for receiver in pair:
            receiver.take(manifest)
        sent = sends.send(model(version).items())
        assert all(equal(receiver.taken(), version) for receiver in pair)
        assert sent.nbytes == manifest.nbytes
        assert 0 < sent.wire_seconds <= sent.seconds
    assert len(addresses) == 1, "one group serves all versions"
    sends.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_buffers_are_filled_before_the_receivers_are_ready(
    tmp_path: Path, pair: list[Receiver], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer_class = import_module(f"mtpctl.sync.transports.{transport}").Writer
    send, filled = writer_class.send, []

    def record(writer: Any, section: str, bucket: Bucket) -> None:
        send(writer, section, bucket)
        filled.append((section, bucket.index))

    monkeypatch.setattr(writer_class, "send", record)
    sends = sender(tmp_path, transport)
    for version in (1, 2):
        filled.clear()
        manifest = sends.announce(version, ["a"])
        sending = Thread(target=sends.send, args=(model(version).items(),))
        sending.start()
        while len(filled) < 2:
            assert sending.is_alive()
            time.sleep(0.001)
        time.sleep(0.05)
        assert filled == [("target", 0), ("target", 1)], "there is no third buffer"
        pair[0].take(manifest)
        assert equal(pair[0].taken(), version)
        sending.join(20)
        assert filled == [(section, bucket.index) for section, plan in manifest.sections.items() for bucket in plan.buckets]
    sends.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_that_fails_after_the_transfer_does_not_affect_the_next(tmp_path: Path, pair: list[Receiver], transport: str) -> None:
    """For example an engine that refuses a complete adapter."""
    sends = sender(tmp_path, transport)
    for last in (False, True):
        manifest = sends.announce(1, ["a"])
        pair[0].take(manifest)
        sends.send(model(1).items())
        assert equal(pair[0].taken(), 1)
        if not last:
            cancel(manifest, "a receiver of the weights gave up: it refuses")
    sends.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sent_version_is_persisted_for_later_receivers(tmp_path: Path, pair: list[Receiver], transport: str) -> None:
    sends = sender(tmp_path, transport)
    manifest = sends.announce(1, ["a"])
    pair[0].take(manifest)
    sends.send(model(1).items())
    pair[0].taken()
    assert sends.store.versions() == []
    sends.persist(model(1).items())
    sends.flush()
    retained = newest(sends.store)
    assert retained is not None and (retained.version, retained.transport) == (1, "shm")
    pair[1].take(retained)
    assert equal(pair[1].taken(), 1)
    sends.close()


def test_a_slow_store_does_not_delay_the_next_version(tmp_path: Path, pair: list[Receiver], monkeypatch: pytest.MonkeyPatch) -> None:
    written = Event()
    upstream = Writer.put

    def slow(self: Writer, *arguments: Any) -> None:
        written.wait(30)
        upstream(self, *arguments)

    monkeypatch.setattr(Writer, "put", slow)
    sends = sender(tmp_path, "nccl")
    for version in (1, 2):
        manifest = sends.announce(version, ["a"])
        pair[0].take(manifest)
        sends.send(model(version).items())
        assert equal(pair[0].taken(), version)
        if version == 1:
            sends.persist(model(version).items())
    assert sends.store.versions() == []
    written.set()
    sends.flush()
    assert sends.store.versions() == [1]
    sends.close()


def test_the_store_pauses_during_a_transfer(tmp_path: Path, pair: list[Receiver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.sync.transports.shm.PIECE_BYTES", 8)
    monkeypatch.setattr("mtpctl.sync.sender.PAUSE_S", 30.0)
    begun, upstream = Event(), Writer.put

    def slow_put(self: Writer, section: str, bucket: Bucket, data: torch.Tensor, before: Any) -> None:
        def slowly() -> None:
            begun.set()
            time.sleep(0.001)
            before()

        upstream(self, section, bucket, data, slowly)

    monkeypatch.setattr(Writer, "put", slow_put)
    sends = sender(tmp_path, "nccl")

    def written() -> int:
        return sum(path.stat().st_size for path in sends.store.folder(1).glob("*.bin"))

    pair[0].take(sends.announce(1, ["a"]))
    sends.send(model(1).items())
    assert equal(pair[0].taken(), 1)
    sends.persist(model(1).items())
    assert begun.wait(10)
    manifest = sends.announce(2, ["a"])
    time.sleep(0.1)
    stood = written()
    time.sleep(0.3)
    assert (written(), sends.store.versions()) == (stood, [])
    pair[0].take(manifest)
    sends.send(model(2).items())
    assert equal(pair[0].taken(), 2)
    sends.flush()
    retained = newest(sends.store)
    assert retained is not None and retained.version == 1
    pair[1].take(retained)
    assert equal(pair[1].taken(), 1)
    sends.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_other_receivers_get_a_new_group(tmp_path: Path, pair: list[Receiver], transport: str) -> None:
    sends = sender(tmp_path, transport)
    for version, members in ((1, pair[:1]), (2, pair), (3, pair[1:])):
        manifest = sends.announce(version, [str(id(member)) for member in members])
        assert f"group-{version}?" in manifest.address
        for member in members:
            member.take(manifest)
        sends.send(model(version).items())
        assert all(equal(member.taken(), version) for member in members)
    sends.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_receiver_ends_the_transfer_for_all(tmp_path: Path, pair: list[Receiver], transport: str) -> None:
    sends = sender(tmp_path, transport, deadline_s=30.0)
    doomed = Receiver(Die(bucket=3))
    manifest = sends.announce(1, ["a", "doomed"])
    for receiver in (pair[0], doomed):
        receiver.take(manifest)

    def report() -> None:
        doomed.process.join()
        cancel(manifest, "a receiver of the weights gave up: it was killed")

    Thread(target=report).start()
    began = time.monotonic()
    with pytest.raises(SyncError):
        sends.send(model(1).items())
    assert pair[0].taken().startswith("SyncError")
    assert time.monotonic() - began < 10
    manifest = sends.announce(1, ["a"])
    assert "group-2?" in manifest.address
    pair[0].take(manifest)
    sends.send(model(1).items())
    assert equal(pair[0].taken(), 1)
    sends.close()
    doomed.end()


def _send_and_die(root: Path, transport: str, announced: Any) -> None:
    def export() -> Any:
        for index, item in enumerate(model(1).items()):
            if index == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    sends = sender(root, transport)
    announced.put(sends.announce(1, ["a"]))
    sends.send(export())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_sender_is_noticed_and_leaves_no_file(tmp_path: Path, pair: list[Receiver], transport: str) -> None:
    announced = CONTEXT.Queue()
    dying = in_process(_send_and_die, tmp_path, transport, announced)
    began = time.monotonic()
    pair[0].take(announced.get(timeout=30))
    assert pair[0].taken().startswith("SyncError")
    dying.join(10)
    assert dying.exitcode == -signal.SIGKILL
    assert time.monotonic() - began < 20
    assert not list(Path("/dev/shm").glob(f"mtpctl-ipc-{dying.pid}-*")), "no file is left in shared memory"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_export_that_changed_ends_the_transfer_for_all(tmp_path: Path, pair: list[Receiver], transport: str) -> None:
    sends = sender(tmp_path, transport)
    pair[0].take(sends.announce(1, ["a"]))
    broken = model(1)
    broken["model.norm.weight"] = broken["model.norm.weight"].half()
    with pytest.raises(PlanMismatch, match=r"model.norm.weight \(8,\) float16"):
        sends.send(broken.items())
    assert "the sender of the weights gave up" in pair[0].taken()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_waiting_for_a_missing_receiver_times_out(tmp_path: Path, transport: str) -> None:
    sends = sender(tmp_path, transport, deadline_s=0.3)
    sends.announce(1, ["a"])
    with pytest.raises(SyncError, match=r"took longer than sync.deadline_s = 0.3"):
        sends.send(model(1).items())


def test_a_surplus_receiver_is_refused(tmp_path: Path, pair: list[Receiver]) -> None:
    sends = sender(tmp_path, "nccl")
    manifest = sends.announce(1, ["a"])
    pair[0].take(manifest)
    sends.send(model(1).items())
    assert equal(pair[0].taken(), 1)
    pair[1].take(manifest)
    assert "has its 1 receivers already" in pair[1].taken()
    sends.close()


def changed(tensors: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """A copy with a few other elements; in every third version all of one tensor, in every fourth none."""
    generator = torch.Generator().manual_seed(version)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if version % 3 == 0:
        tensors["model.norm.weight"].neg_()
    if version % 4:
        tensors["model.layers.0.w"].view(-1)[torch.randint(0, 4096, (40,), generator=generator)] = -0.0
        tensors["model.mtp_layers.0.w"][version % 5] = float(version)
    return tensors


def test_receivers_of_the_previous_version_get_its_changes(tmp_path: Path, pair: list[Receiver]) -> None:
    sends = sender(tmp_path, "nccl", delta=True)
    tensors, full = model(1), 0
    for version in range(1, 13):
        # Another group gets a complete version at 5 and 9, a repeated transfer at 7.
        members = pair[:1] if 5 <= version < 9 else pair
        sends.plan_from(tensors.items())
        manifest = sends.announce(version, [str(id(member)) for member in members])
        if version == 7:
            assert manifest.base == 6
            cancel(manifest, "a receiver of the weights gave up")
            sends.plan_from(tensors.items())
            manifest = sends.announce(version, [str(id(member)) for member in members])
        for member in members:
            member.take(manifest)
        sent = sends.send(tensors.items())
        for member in members:
            taken = member.taken()
            assert all(torch.equal(torch.tensor(taken[name]).view(torch.int32), tensors[name].view(torch.int32)) for name in tensors), taken
        assert sent.nbytes == manifest.nbytes
        assert manifest.base == (None if version in (1, 5, 7, 9) else version - 1)
        if version == 1:
            full = manifest.nbytes
        elif manifest.base is not None:
            assert manifest.nbytes < 0.2 * full
            assert (sum(plan.num_changed or 0 for plan in manifest.sections.values()) > 0) == (
                (version - 1) % 4 != 0 or (version - 1) % 3 == 0
            )
        sends.persist(tensors.items())
        tensors = changed(tensors, version)
    sends.flush()
    assert newest(sends.store).base is None, "the store has complete versions"
    sends.close()


def test_a_version_that_is_not_persisted_is_followed_by_a_complete_one(tmp_path: Path, pair: list[Receiver]) -> None:
    sends = sender(tmp_path, "nccl", delta=True)
    for version in (1, 2):
        sends.plan_from(model(1).items())
        manifest = sends.announce(version, ["a"])
        assert manifest.base is None
        pair[0].take(manifest)
        sends.send(model(1).items())
        assert equal(pair[0].taken(), 1)
    sends.close()
