"""Receivers on a GPU read files through two buffers. Here the GPU's buffer is in host memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from mtpctl.cluster.object_store import ObjectStore
from mtpctl.sync.protocol import SyncError
from mtpctl.sync.remote import URL_FIELD
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports import shm
from mtpctl.sync.transports.base import open_reader
from mtpctl.sync.transports.shm import StagedReader

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers, in host memory for every device."""
    monkeypatch.setattr(shm, "STAGING_BYTES", 64)
    monkeypatch.setattr(shm, "StagedReader", lambda device, nbytes: StagedReader(CPU, nbytes))


@pytest.mark.parametrize("nbytes", [1, 3, 5, 63, 64, 65, 127, 128, 200, 1000])
def test_files_of_any_size_are_read_unchanged(tmp_path: Path, nbytes: int) -> None:
    reader = StagedReader(CPU, 1000)
    for seed in (0, 1):
        content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        (tmp_path / "file").write_bytes(bytes(content.tolist()) + b"more")
        with (tmp_path / "file").open("rb") as file:
            assert torch.equal(reader.read(file.fileno(), nbytes), content)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = shm.os.preadv
    monkeypatch.setattr(shm.os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:5]], offset))
    content = bytes(range(256)) * 2
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        assert bytes(StagedReader(CPU, 512).read(file.fileno(), 512).tolist()) == content


class LazyStream:
    """A stream whose copies run only when the host waits for them."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def run_until(self, count: int) -> None:
        for destination, source in self.copies[self.done : count]:
            destination[:] = source
        self.done = max(self.done, count)

    def synchronize(self) -> None:
        self.run_until(len(self.copies))


class LazyEvent:
    def __init__(self) -> None:
        self.stream, self.position = LazyStream(), 0

    def record(self, stream: LazyStream) -> None:
        self.stream, self.position = stream, len(stream.copies)

    def synchronize(self) -> None:
        self.stream.run_until(self.position)


def test_a_buffer_is_filled_again_only_after_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, reader = LazyStream(), StagedReader(CPU, 300)
    reader._copied = [LazyEvent(), LazyEvent()]  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking: stream.copies.append((self, source)))
    for number, nbytes in enumerate((300, 130, 299), 1):
        content = bytes((7 * number * i) % 251 for i in range(nbytes))
        (tmp_path / "file").write_bytes(content)
        with (tmp_path / "file").open("rb") as file:
            data = reader.read(file.fileno(), nbytes)
        assert len(stream.copies) - stream.done == 2, "both buffers are being copied"
        reader.wait()
        assert bytes(data.tolist()) == content


@pytest.mark.parametrize("transport", ["shm", "storage"])
def test_buckets_equal_the_mapped_ones(tmp_path: Path, transport: str) -> None:
    remote = ObjectStore(f"file://{tmp_path}/bucket", URL_FIELD) if transport == "storage" else None
    store = VersionStore(tmp_path / "store", remote)
    store.claim()
    weights = {f"w{size}": torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, 500, 17, 90)}
    manifest = Publisher(store, bucket_bytes=1024).publish(weights.items(), 1)
    buckets = manifest.sections["target"].buckets
    on_gpu, mapped = (open_reader(manifest.transport, manifest.address, device).stream("target", buckets) for device in ("cuda", "cpu"))
    try:
        count = 0
        for (bucket, data), (same_bucket, expected) in zip(on_gpu, mapped, strict=True):
            assert bucket is same_bucket and torch.equal(data, expected)
            count += 1
        assert count == len(buckets) > 2
    finally:
        store.close()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), partial(shm.os.truncate, length=1000)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_missing_or_short_file_is_an_error(tmp_path: Path, device: str, damage: object) -> None:
    manifest = Publisher(VersionStore(tmp_path), bucket_bytes=1024).publish([("a", torch.ones(256)), ("b", torch.ones(256))], 1)
    damage(tmp_path / "v00000001" / "target-00001.bin")  # type: ignore[operator]
    stream = open_reader("shm", manifest.address, device).stream("target", manifest.sections["target"].buckets)
    assert next(stream)[1].view(torch.float32).tolist() == [1.0] * 256
    with pytest.raises(SyncError, match=r"target-00001\.bin: bucket 1 of section target cannot be read"):
        next(stream)
