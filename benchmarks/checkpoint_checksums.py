"""The cost of checkpoint checksums: megatron-core's writer with and without them, alternating.

    python benchmarks/checkpoint_checksums.py FOLDER --gib 1 --rounds 5

FOLDER is on the disk to measure. Each round writes the same tensors twice and flushes them to disk. A write starts after all earlier data
is on the disk. The fastest rounds are compared, because other work and the disk's rate limit can only slow a round down.
"""

from __future__ import annotations

import os
import queue
import shutil
import time
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from harness import alternate, parser, print_spread
from mtpctl.checkpoint.listing import Checksum, check_listing, write_listing
from mtpctl.compat import megatron_core

TENSOR_BYTES = 64 << 20


def write(folder: Path, tensors: list[torch.Tensor], *, checksums: bool) -> float:
    """Write the tensors as one shard. Returns the seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    items = [(WriteItem(MetadataIndex(str(i)), WriteItemType.TENSOR), tensor) for i, tensor in enumerate(tensors)]
    os.sync()
    module = vars(filesystem_async)
    megatron_core.compute_checksums(Checksum)
    hashing_open = module["open"]
    if not checksums:
        module["open"] = open
    file = str(folder / "__0_0.distcp")
    began = time.perf_counter()
    try:
        filesystem_async.FileSystemWriterAsync.write_preloaded_data_multithread(
            [_StorageWriterTransforms()], False, 0, [(file, "__0_0.distcp", ([], items))], queue.Queue()
        )
        return time.perf_counter() - began
    finally:
        module["open"] = hashing_open
        write_listing(folder, 1, {Path(path).name: entry for path, entry in megatron_core.take_checksums([file]).items()})  # type: ignore[misc]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--gib", type=float, default=1.0)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    tensors = [torch.randn(TENSOR_BYTES // 4) for _ in range(max(1, int(options.gib * (1 << 30)) // TENSOR_BYTES))]
    folder, size = options.folder / "checksums", len(tensors) * TENSOR_BYTES / 1e9
    ways = {"without": lambda: write(folder, tensors, checksums=False), "with": lambda: write(folder, tensors, checksums=True)}
    seconds = alternate(ways, options.rounds)
    for name, values in seconds.items():
        print_spread(f"{name} checksums", values, "s", ".3f")
    fastest = {name: min(values) for name, values in seconds.items()}
    print(
        f"{size / fastest['without']:.2f} GB/s without; checksums cost {fastest['with'] / fastest['without'] - 1:+.1%} of the fastest round"
    )
    began = time.perf_counter()
    check_listing(folder, write_listing(folder, 1, {}), verify_checksums=True)
    print(f"verify: {size / (time.perf_counter() - began):.1f} GB/s from the page cache")
    began = time.perf_counter()
    checksum = Checksum()
    for tensor in tensors:
        checksum.update(memoryview(tensor.numpy()).cast("B"))
    print(f"xxh3: {size / (time.perf_counter() - began):.1f} GB/s in memory")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
