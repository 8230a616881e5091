"""Senders and receivers in processes of their own, as a trainer and its engines are: forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mtpctl.plan.buckets import TensorSpec
from mtpctl.sync.packing import Export
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.receiver import pieces
from mtpctl.sync.sender import Sender
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import Readers

Tensors = dict[str, torch.Tensor]
SHAPES = {"model.embed.weight": (40, 8), "model.layers.0.w": (64, 64), "model.norm.weight": (8,), "model.mtp_layers.0.w": (5, 3)}
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.fakes.pushing"])


def model(seed: int) -> Tensors:
    """Tensors of a made-up model, drawn anew for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sender(root: Path, transport: str, *, bucket_bytes: int = 2048, deadline_s: float = 20.0) -> Sender:
    """A sender on this machine that knows the made-up model."""
    found = Sender(VersionStore(root), transport, "cpu", host="127.0.0.1", deadline_s=deadline_s, bucket_bytes=bucket_bytes)
    found.plan(TensorSpec(name, shape, "float32") for name, shape in SHAPES.items())
    return found


def send_version(pipe: Any, over: Sender, version: int, members: list[str], export: Export, sending: Export | None = None) -> None:
    """One version by this sender, in the process that sends: its manifest into `pipe`, then what was sent, or why it was not.

    `sending`: an export that comes in place of the one that was learnt, for faults.
    """
    try:
        pipe.send(over.announce(version, members, over.plan_from(export, checksums=True)))
        sent = over.send(export if sending is None else sending)
        over.persist(export)
        over.flush()
        pipe.send(sent)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


class Die:
    """What a receiver does when it comes to this bucket of the target section."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket


def _receive(inbox: Any, outbox: Any, fault: Die | None) -> None:
    readers = Readers("cpu")
    while (manifest := inbox.get()) is not None:
        try:
            outbox.put(_take(readers, manifest, fault))
        except Exception as error:
            readers.fail(str(error))
            outbox.put(f"{type(error).__name__}: {error}")
        readers.end_section()
    readers.close()


def _take(readers: Readers, manifest: Manifest, fault: Die | None) -> dict[str, Any]:
    reader = readers.open(manifest.transport, manifest.address)
    found: Tensors = {}
    for section, plan in manifest.sections.items():
        reader.begin(manifest.version, section)
        for bucket, data in reader.stream(section, plan.buckets):
            if fault is not None and section == "target" and bucket.index == fault.bucket:
                os.kill(os.getpid(), signal.SIGKILL)
            for entry, piece in pieces(bucket, data):
                whole = found.setdefault(entry.name, torch.empty(entry.shape, dtype=piece.dtype))
                whole.view(-1)[entry.part_start : entry.part_stop] = piece
    return {name: tensor.tolist() for name, tensor in found.items()}


class Receiver:
    """A process that takes versions in."""

    def __init__(self, fault: Die | None = None) -> None:
        self.inbox, self.outbox = CONTEXT.Queue(), CONTEXT.Queue()
        self.process = CONTEXT.Process(target=_receive, args=(self.inbox, self.outbox, fault), daemon=True)
        self.process.start()

    def take(self, manifest: Manifest) -> None:
        """Begin to take a version in."""
        self.inbox.put(manifest)

    def taken(self, seconds: float = 30.0) -> Any:
        """What was taken in, or the error."""
        return self.outbox.get(timeout=seconds)

    def end(self) -> None:
        """End the process."""
        self.inbox.put(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def receivers(count: int, faults: dict[int, Die] | None = None) -> Iterator[list[Receiver]]:
    """That many receivers, for a fixture."""
    started = [Receiver((faults or {}).get(index)) for index in range(count)]
    yield started
    for receiver in started:
        receiver.end()


def in_process(run: Callable[..., None], *arguments: Any) -> Any:
    """A process of its own that runs this."""
    process = CONTEXT.Process(target=run, args=arguments, daemon=True)
    process.start()
    return process
