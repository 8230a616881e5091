"""Measure the cost of checkpoint checksums: megatron-core's writer with and without them, alternately.

    python scripts/time_checksums.py FOLDER [--gib 1] [--rounds 5]

FOLDER is on the disk to measure. Each round writes the same tensors twice, and flushes them to disk.
"""

from __future__ import annotations

import argparse
import queue
import shutil
import statistics
import time
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from mtpctl.checkpoint.listing import Checksum, check_listing, write_listing
from mtpctl.compat import megatron_core

TENSOR = 64 << 20
"""Bytes of a tensor."""


def write(folder: Path, tensors: list[torch.Tensor], *, checksums: bool) -> float:
    """Write the tensors as one shard. Returns the seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    items = [(WriteItem(MetadataIndex(str(i)), WriteItemType.TENSOR), tensor) for i, tensor in enumerate(tensors)]
    files = vars(filesystem_async)
    megatron_core.compute_checksums(Checksum)
    hashed = files["open"]
    if not checksums:
        files["open"] = open
    file = str(folder / "__0_0.distcp")
    began = time.perf_counter()
    try:
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread(
            [_StorageWriterTransforms()], False, 0, [(file, "__0_0.distcp", ([], items))], queue.Queue()
        )
        return time.perf_counter() - began
    finally:
        files["open"] = hashed
        write_listing(folder, 1, {Path(path).name: entry for path, entry in megatron_core.take_checksums([file]).items()})  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tensors = [torch.randn(TENSOR // 4) for _ in range(max(1, int(options.gib * (1 << 30)) // TENSOR))]
    folder, size = options.folder / "checksums", len(tensors) * TENSOR / 1e9
    write(folder, tensors, checksums=True)
    without, with_them = [], []
    for _ in range(options.rounds):
        without.append(write(folder, tensors, checksums=False))
        with_them.append(write(folder, tensors, checksums=True))
    a, b = statistics.median(without), statistics.median(with_them)
    for name, seconds in (("without", without), ("with", with_them)):
        middle = statistics.median(seconds)
        print(f"{name:8} {middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), {size / middle:.2f} GB/s")
    print(f"cost     {b / a - 1:+.1%} of the writing")
    listing = write_listing(folder, 1, {})
    began = time.perf_counter()
    check_listing(folder, listing, contents=True)
    print(f"verify   {size / (time.perf_counter() - began):.1f} GB/s from the page cache")
    began = time.perf_counter()
    checksum = Checksum()
    for tensor in tensors:
        checksum.update(memoryview(tensor.numpy()).cast("B"))
    print(f"xxh3     {size / (time.perf_counter() - began):.1f} GB/s in memory")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
