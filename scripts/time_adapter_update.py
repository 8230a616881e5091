"""Times what a log-prob replica does with an adapter that comes alone: `python scripts/time_adapter_update.py FOLDER [--precision bf16]`.

FOLDER is a model's; where it holds a config alone, weights are drawn. Adapters and MTP layers are drawn, published in shared memory
and taken in by one rank in this process, on a card where there is one. The time is that of the whole update: read, merge, write.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.families.tensors import section_of
from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
from mtpctl.logprob.replica import Replica
from mtpctl.plan.buckets import ADAPTER_PREFIX, adapter_tensors, wire_tensors
from mtpctl.recipe.model import DTYPES, MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import update_target


class Here:
    """`Ranks` of one rank in this process."""

    def __init__(self, rank: ScoreRank) -> None:
        self.rank = rank

    async def call(self, method: str, *args: Any) -> Any:
        return getattr(self.rank, method)(*args)

    async def end(self) -> None:
        self.rank.engine.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--precision", choices=list(DTYPES), default="bf16")
    parser.add_argument("--versions", type=int, default=9)
    parser.add_argument("--verify", action="store_true", help="compare checksums at each version; they count in the time")
    told = parser.parse_args()
    dtype, lora = DTYPES[told.precision], LoraConfig(rank=16)
    shape = HfFolder.open(told.folder, weights=False).shape
    seed = None if any(Path(told.folder).glob("*.safetensors")) else 0
    config = ReplicaConfig(told.folder, ParallelConfig(), told.precision, MtpConfig(), KernelsConfig(), 4096, random_seed=seed)
    rank = ScoreRank(config, 0)
    replica = Replica(Here(rank), rank.build(""), 0, keep_previous=False)
    specs = [*adapter_tensors(shape, lora.rank, lora.targets, dtype), *wire_tensors(shape, "draft", dtype)]
    seconds = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        publisher = Publisher(
            VersionStore(Path(root)),
            bucket_bytes=1 << 30,
            sections=("adapter", "draft"),
            section_of=lambda name: "adapter" if name.startswith(ADAPTER_PREFIX) else section_of(name, shape),
            config={"adapter": {"r": lora.rank, "lora_alpha": lora.alpha}},
        )
        for version in range(1, told.versions + 1):
            drawn = ((spec.name, 0.02 * torch.randn(spec.shape).to(getattr(torch, dtype))) for spec in specs)
            manifest = publisher.publish(drawn, version, checksums=told.verify)
            began = time.perf_counter()
            await update_target(replica, manifest, verify=told.verify)
            if rank.engine.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    later = seconds[1:]
    print(f"{manifest.nbytes / 1e9:.3f} GB in, {told.precision}, on {rank.engine.device}: first {seconds[0]:.3f} s, ", end="")
    print(f"then {statistics.median(later):.3f} s ({min(later):.3f}-{max(later):.3f})")
    await replica.end()


if __name__ == "__main__":
    asyncio.run(main())
