"""How long a log-prob replica takes to apply an adapter that is sent without base weights.

    python benchmarks/adapter_update.py FOLDER --precision bf16

FOLDER is a model's; if it has only a config, weights are random. Random adapters and MTP layers are published in shared memory and
applied by one rank in this process. The time is that of the whole update: read, merge, write.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness import parser, print_environment, print_spread
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.families.tensors import section_of
from mtpctl.logprob.rank import ReplicaConfig, ScoreRank
from mtpctl.logprob.replica import Replica
from mtpctl.plan.buckets import ADAPTER_PREFIX, adapter_tensors, wire_tensors
from mtpctl.recipe.model import DTYPES, MtpConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.sync.update import update_target


class LocalRanks:
    """The `Ranks` interface of one rank in this process."""

    def __init__(self, rank: ScoreRank) -> None:
        self.rank = rank

    async def call(self, method: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return method(self.rank, *args)

    async def locations(self) -> list[Any]:
        return []

    async def end(self) -> None:
        self.rank.engine.close()


async def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("folder")
    arguments.add_argument("--precision", choices=list(DTYPES), default="bf16")
    arguments.add_argument("--versions", type=int, default=9)
    arguments.add_argument("--verify", action="store_true", help="compare checksums at each version, within the measured time")
    options = arguments.parse_args()
    dtype, lora = DTYPES[options.precision], LoraConfig(rank=16)
    shape = HfFolder.open(options.folder, weights=False).shape
    seed = None if any(Path(options.folder).glob("*.safetensors")) else 0
    config = ReplicaConfig(options.folder, ParallelConfig(), options.precision, MtpConfig(), KernelsConfig(), 4096, random_seed=seed)
    rank = ScoreRank(config, 0)
    replica = Replica(LocalRanks(rank), rank.build(""), 0, keep_previous=False)
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
        for version in range(1, options.versions + 1):
            tensors = ((spec.name, 0.02 * torch.randn(spec.shape).to(getattr(torch, dtype))) for spec in specs)
            manifest = publisher.publish(tensors, version, checksums=options.verify)
            began = time.perf_counter()
            await update_target(replica, manifest, verify=options.verify)
            if rank.engine.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    await replica.end()
    print_environment()
    print(f"{manifest.nbytes / 1e9:.3f} GB, {options.precision}; the first update took {seconds[0]:.3f} s")
    print_spread("later updates", seconds[1:], "s", ".3f")


if __name__ == "__main__":
    asyncio.run(main())
