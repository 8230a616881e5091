"""A sync of the changed weights against a complete one, over a link of a given rate.

    python benchmarks/delta_sync.py --layers 2 --gbit 1
    python benchmarks/delta_sync.py --device cuda --gbit 0

The weights have the shapes of RECIPE's model, in bf16 with random values; a share of them changes from version to version. The trainer's
end finds the changes and writes them to a version store in shared memory (`encode`). The link copies the store's files to another folder
at the given rate; 0: as fast as memory. The receiver's end writes them into live weights on the device (`apply`), which are compared bit by
bit. `--layers` reduces the model. The script needs host memory for four copies of the weights, three of them in shared memory, and
memory for two more on the device.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from harness import parser, print_environment
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import section_of
from mtpctl.plan.buckets import wire_tensors
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.model import hf_config
from mtpctl.sync.parameters import Run, Shard
from mtpctl.sync.protocol import Manifest, SectionPlan
from mtpctl.sync.receiver import Inbox, StepReceiver, UpdateStep, begin_step
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore

LINK_CHUNK_BYTES = 1 << 20
"""Bytes that the link sends at once."""

Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def flip_bits(tensors: Tensors, share: float) -> None:
    """Flip the lowest bit of this share of the elements."""
    for tensor in tensors.values():
        words = tensor.view(-1).view(torch.int16)
        for part in words.split(1 << 26):
            part.bitwise_xor_((torch.rand(part.shape, device=part.device) < share).to(torch.int16))


def copy_over_link(source: Path, destination: Path, gbit: float) -> float:
    """Copy the files of a version at this rate. Returns the seconds."""
    began, sent_bytes = time.perf_counter(), 0
    destination.mkdir()
    for file in sorted(source.glob("*.bin")):
        with file.open("rb", buffering=0) as reading, (destination / file.name).open("wb", buffering=0) as writing:
            while data := reading.read(LINK_CHUNK_BYTES):
                writing.write(data)
                sent_bytes += len(data)
                if gbit:
                    time.sleep(max(0.0, began + sent_bytes * 8 / gbit / 1e9 - time.perf_counter()))
    return time.perf_counter() - began


class Receiver:
    """Live weights, and the receiving end of an engine's worker."""

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        self.live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.steps = StepReceiver(Inbox(device))
        self.known: set[str] = set()

    def _match(self, plan: SectionPlan) -> dict[str, Shard]:
        return {name: Shard(self.live[name], entry.shape, 0, (Run(0, 0, entry.shape[0]),)) for name, entry in plan.tensors().items()}

    def apply(self, manifest: Manifest) -> float:
        """Write a version into the live weights. Returns the seconds."""
        began = time.perf_counter()
        for section, plan in manifest.sections.items():
            self.steps.begin(begin_step(manifest, section, version=manifest.version, discard=False, known=self.known), self._match)
            self.steps.receive(UpdateStep(action="buckets", section=section, first=0, count=len(plan.wire_buckets)))
            self.steps.finish()
        synchronize()
        return time.perf_counter() - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--recipe", default="mimo7b_mtp")
    arguments.add_argument("--layers", type=int, help="decoder layers; default: those of the model")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--gbit", type=float, default=1.0, help="rate of the link in Gbit/s")
    arguments.add_argument("--share", type=float, default=0.01, help="share of the elements that change")
    arguments.add_argument("--versions", type=int, default=3, help="measured deltas")
    arguments.add_argument("--folder", default="/dev/shm", help="where the store and its copy are created")
    options = arguments.parse_args()
    config = dict(hf_config(load_recipe(options.recipe).recipe.model) or {})
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    shape, device = shape_of(config), torch.device(options.device)
    torch.manual_seed(0)
    specs = [*wire_tensors(shape, "target", "bfloat16"), *wire_tensors(shape, "draft", "bfloat16")]
    tensors = {spec.name: torch.randn(spec.shape, dtype=torch.bfloat16, device=device) for spec in specs}
    receiver, rows = Receiver(tensors, device), []
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        senders = {
            kind: Publisher(
                VersionStore(Path(root) / kind),
                delta=kind == "delta",
                pinned=device.type == "cuda",
                bucket_bytes=1 << 30,
                section_of=lambda name: section_of(name, shape),
            )
            for kind in ("delta", "complete")
        }
        for version in range(1, options.versions + 2):
            flip_bits(tensors, options.share)
            for kind, sender in senders.items():
                if not sender.plans:
                    sender.plan(specs)
                synchronize()
                began = time.perf_counter()
                manifest = sender.publish(iter(tensors.items()), version)
                encode = time.perf_counter() - began
                received = Path(root) / "arrived"
                # The first version is complete in both cases and is not reported.
                link = copy_over_link(Path(manifest.address), received, options.gbit if version > 1 else 0)
                apply = receiver.apply(replace(manifest, address=str(received)))
                shutil.rmtree(received)
                if kind == "complete":
                    sender.store.discard(version)
                assert all(torch.equal(receiver.live[n].view(torch.int16), t.view(torch.int16)) for n, t in tensors.items()), (
                    "not bit-equal"
                )
                if version > 1:
                    rows.append((kind, manifest.nbytes / 1e9, encode, link, apply))
    print_environment()
    print(f"{len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()) / 1e9:.2f} GB in bf16 on {device}; {options.gbit:g} Gbit/s\n")
    print("| sync | GB | encode s | link s | apply s | sum s |\n|---|---|---|---|---|---|")
    for kind in senders:
        nbytes, encode, link, apply = (
            statistics.median(column) for column in list(zip(*(r for r in rows if r[0] == kind), strict=True))[1:]
        )
        print(f"| {kind} | {nbytes:.3f} | {encode:.3f} | {link:.3f} | {apply:.3f} | {encode + link + apply:.3f} |")


if __name__ == "__main__":
    main()
