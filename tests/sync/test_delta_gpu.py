"""Changes are found and applied on GPUs as on a CPU, and pushed to both ranks of an engine.

Without a GPU, `pytest -m gpu` runs the same steps on the CPU. On hosts without NVLink multicast set NCCL_NVLS_ENABLE=0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.sync.delta import apply, compare, encode
from mtpctl.sync.packing import spec_of
from mtpctl.sync.sender import Sender
from mtpctl.sync.store import VersionStore
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
