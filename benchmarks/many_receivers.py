"""The time to push a version to 1, 2, … receivers over `nccl` and `ipc`, which shows whether the sender feeds them in turn.

    python benchmarks/many_receivers.py --gib 14.6                      # one sender, and a receiver on every other GPU
    python benchmarks/many_receivers.py --gib 0.06 --receivers 1 2 3    # on a CPU: gloo instead of NCCL, files instead of CUDA IPC

Each receiver is a process, on a separate GPU if there are enough. Buckets are sent without packing, and receivers drop them. Reported are
the seconds on the wire of a version, median (minimum–maximum) of --rounds after one for warm-up, and the total rate at which receivers get
bytes. With a broadcast that is a ring or tree, the seconds hardly grow with the number of receivers.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from harness import parser, print_environment
from mtpctl.bench.report import format_spread, markdown_table
from mtpctl.plan.buckets import TensorSpec
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.sender import Sender
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import ReaderCache

BUCKET = 1 << 30
CONTEXT = multiprocessing.get_context("spawn")


def receive(manifests: Queue[Manifest | None], device: str) -> None:
    """Receive every version, and drop it."""
    if device != "cpu":
        torch.cuda.set_device(device)
    readers = ReaderCache(device)
    while (manifest := manifests.get()) is not None:
        reader = readers.open(manifest.transport, manifest.address)
        for section, plan in manifest.sections.items():
            reader.begin(manifest.version, section)
            for _ in reader.stream(section, plan.wire_buckets):
                pass
    readers.close()


def measure(transport: str, count: int, gib: float, rounds: int, root: Path) -> tuple[int, list[float]]:
    """The bytes of a version, and the seconds of each round."""
    gpus = torch.cuda.device_count()
    devices = [f"cuda:{number % gpus}" if gpus else "cpu" for number in range(count + 1)]
    elements = int(gib * (1 << 30)) // 2
    specs = [TensorSpec(f"model.layers.{number}.w", (elements // 32,), "bfloat16") for number in range(32)]
    sender = Sender(VersionStore(root), transport, devices[0], host="127.0.0.1", deadline_s=60.0, bucket_bytes=min(BUCKET, elements // 4))
    sender.plan(specs)
    queues = [CONTEXT.Queue() for _ in range(count)]
    processes = [CONTEXT.Process(target=receive, args=(q, device), daemon=True) for q, device in zip(queues, devices[1:], strict=True)]
    for process in processes:
        process.start()
    seconds, nbytes = [], 0
    try:
        for number in range(1, rounds + 2):
            manifest = sender.announce(number, [f"receiver {receiver}" for receiver in range(count)])
            for queue in queues:
                queue.put(Manifest(-number, manifest.transport, manifest.address, manifest.sections))
            stats = sender.probe(number)
            nbytes = stats.nbytes
            seconds.append(stats.wire_seconds or stats.seconds - stats.wait_seconds)
            time.sleep(0.1)
    finally:
        for queue in queues:
            queue.put(None)
        for process in processes:
            process.join(30)
            process.kill()
        sender.close()
    return nbytes, seconds[1:]


def main() -> None:
    arguments = parser(__doc__)
    gpus = torch.cuda.device_count()
    arguments.add_argument("--gib", type=float, default=14.6, help="size of the version, in bf16")
    arguments.add_argument("--receivers", nargs="+", type=int, default=list(range(1, gpus)) or [1, 2])
    arguments.add_argument("--transport", action="append", choices=("nccl", "ipc"))
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    print_environment()
    rows = []
    for transport in options.transport or ("nccl", "ipc"):
        for count in options.receivers:
            if transport == "nccl" and gpus and count >= gpus:
                print(f"nccl: {count} receivers and a sender need {count + 1} GPUs, there are {gpus}", flush=True)
                continue
            with tempfile.TemporaryDirectory() as temporary:
                nbytes, seconds = measure(transport, count, options.gib, options.rounds, Path(temporary))
            rate = count * nbytes / sorted(seconds)[len(seconds) // 2] / 1e9
            rows.append([transport, count, f"{nbytes / 1e9:.2f}", format_spread(seconds, ".3f"), f"{rate:,.1f}"])
            print(f"{transport}, {count} receivers: {format_spread(seconds, '.3f')} s", flush=True)
    print()
    print(markdown_table(["transport", "receivers", "GB", "wire, s", "GB/s, all receivers"], rows))


if __name__ == "__main__":
    main()
