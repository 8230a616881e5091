"""Changes are found and applied on GPUs as on a CPU, published to a receiver, and pushed to both ranks of an engine.

Without a GPU, `pytest -m gpu` runs the same steps on the CPU. On hosts without NVLink multicast set NCCL_NVLS_ENABLE=0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.cluster.object_store import ObjectStore
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.sync import packing
from mtpctl.sync.delta import apply, compare, decode, encode
from mtpctl.sync.packing import spec_of
from mtpctl.sync.parameters import Run, Shard
from mtpctl.sync.receiver import Inbox, StepReceiver, UpdateStep, begin_step
from mtpctl.sync.remote import URL_FIELD
from mtpctl.sync.sender import Publisher, Sender
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports import shm
from mtpctl.sync.update import cancel_on_error
from tests.fakes.engine_checkpoints import Tensors, write_checkpoint
from tests.fakes.engines import Loop
from tests.fakes.engines import run as run
from tests.fakes.engines import start_engine as start_engine
from tests.fakes.pushed_gpus import BASE, CONFIG, DEVICE, GPUS, settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, BASE)


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_changes_on_a_gpu_equal_those_on_a_cpu(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(3_000_017, generator=generator).to(dtype)
    new = torch.where(torch.rand(old.shape, generator=generator) < share, -old, old)
    change, positions = compare(new, old)
    blob = encode(new, old, change, positions)
    gpu_change, gpu_positions = compare(new.to(DEVICE), old.to(DEVICE))
    gpu_blob = encode(new.to(DEVICE), old.to(DEVICE), gpu_change, gpu_positions)
    assert gpu_change == change and torch.equal(gpu_blob.cpu(), blob)
    live = old.to(DEVICE)
    apply(change, gpu_blob, live)
    assert torch.equal(live.cpu().view(torch.uint8), new.view(torch.uint8))


def test_a_decoded_change_is_written_without_waiting_for_the_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1001, 1003, generator=generator).bfloat16().to(DEVICE)
    new = torch.where(torch.rand(old.shape, generator=generator).to(DEVICE) < 0.01, -old, old)
    change, positions = compare(new, old)
    blob = encode(new, old, change, positions)
    assert change.layout == "offsets"
    shard = Shard(old, tuple(old.shape), 0, (Run(0, 0, len(old)),))
    if GPUS:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        found, values = decode(change, blob, torch.bfloat16)
        assert found is not None
        shard.write_at(found, values)
    finally:
        if GPUS:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(old.view(torch.int16), new.view(torch.int16))


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("transport", ["shm", "storage"])
def test_published_files_are_read_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, delta: bool) -> None:
    """Tensors span buckets and staging buffers of odd sizes, and some are too large to be copied ahead of time."""
    monkeypatch.setattr(shm, "STAGING_BYTES", 100_003)
    monkeypatch.setattr(packing, "PREFETCH_BYTES", 1 << 20)
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = [3, 70_001, 1_000_000, 17, 500_000, 2_000_001, 8]
    tensors = {f"w{i}": torch.randn(n, device=DEVICE, generator=generator).bfloat16() for i, n in enumerate(sizes)}
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    store = VersionStore(tmp_path / "store", ObjectStore(f"file://{tmp_path}/bucket", URL_FIELD) if transport == "storage" else None)
    store.claim()
    publisher = Publisher(store, delta=delta, pinned=bool(GPUS), bucket_bytes=300_000)
    receiver = StepReceiver(Inbox(torch.device(DEVICE)))
    known: set[str] = set()
    for version in range(1, 6):
        manifest = publisher.publish(tensors.items(), version, checksums=True)
        assert manifest.base == (version - 1 if delta and version > 1 else None)
        receiver.begin(
            begin_step(manifest, "target", version=version, discard=False, known=known),
            lambda plan: {n: Shard(live[n], entry.shape, 0, (Run(0, 0, entry.shape[0]),)) for n, entry in plan.tensors().items()},
        )
        count = len(manifest.sections["target"].wire_buckets)
        receiver.receive(UpdateStep(action="buckets", section="target", first=0, count=count))
        receiver.finish()
        assert all(torch.equal(live[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in tensors.items())
        for tensor in tensors.values():
            mask = torch.rand(tensor.shape, device=DEVICE, generator=generator) < 0.01
            tensor.copy_(torch.where(mask, -tensor, tensor))
    store.close()


@pytest.mark.skipif(GPUS in (1, 2), reason="needs a GPU for the sender and two for the engine")
def test_changes_are_pushed_to_both_ranks_of_an_engine(
    start_engine: Callable[[VllmSettings], Any], folder: Path, run: Loop, tmp_path: Path
) -> None:
    engine, device = start_engine(settings(folder, tp=2)), "cuda:2" if GPUS else "cpu"
    tensors: Tensors = {name: tensor.to(device) for name, tensor in BASE.items()}
    sender = Sender(VersionStore(tmp_path), "nccl", device, host="127.0.0.1", deadline_s=60.0, delta=True, bucket_bytes=64 << 10)
    sender.plan(spec_of(name, tensor) for name, tensor in tensors.items())
    ordered = sorted(tensors, key=lambda name: ".mtp_layers." in name)

    def export() -> list[tuple[str, torch.Tensor]]:
        return [(name, tensors[name]) for name in ordered]

    async def push(version: int) -> tuple[int, int]:
        sums = sender.plan_from(export(), checksums=True)
        manifest = sender.announce(version, ["engine 0", "engine 1"], sums)
        assert manifest.base == (version - 1 or None)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, export()))
        report = await cancel_on_error(manifest, engine.update(manifest, verify=True, deadline_s=60))
        await sending
        sender.persist(export())
        return report.verified, manifest.nbytes

    generator = torch.Generator().manual_seed(1)
    sizes = []
    for version in (1, 2, 3):
        verified, nbytes = run(push(version))
        assert verified == len(tensors)
        sizes.append(nbytes)
        for tensor in tensors.values():
            mask = (torch.rand(tensor.shape, generator=generator) < 0.01).to(device)
            tensor[mask] = -tensor[mask]
    assert max(sizes[1:]) < 0.2 * sizes[0]
    sender.flush()
    sender.close()
