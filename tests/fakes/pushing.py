"""Senders and receivers in separate processes, like a trainer and its engines. They are forked from a process with torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mtpctl.plan.buckets import TensorSpec
from mtpctl.sync.delta import BlobAssembler, apply
from mtpctl.sync.packing import Export
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.receiver import pieces
from mtpctl.sync.sender import Sender
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import ReaderCache

Tensors = dict[str, torch.Tensor]
SHAPES = {"model.embed.weight": (40, 8), "model.layers.0.w": (64, 64), "model.norm.weight": (8,), "model.mtp_layers.0.w": (5, 3)}
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.fakes.pushing"])


def model(seed: int) -> Tensors:
    """Random tensors of a small model."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sender(root: Path, transport: str, *, bucket_bytes: int = 2048, deadline_s: float = 20.0, delta: bool = False) -> Sender:
    """A sender of `model` on this machine."""
    sends = Sender(VersionStore(root), transport, "cpu", host="127.0.0.1", deadline_s=deadline_s, delta=delta, bucket_bytes=bucket_bytes)
    sends.plan(TensorSpec(name, shape, "float32") for name, shape in SHAPES.items())
    return sends


def send_version(pipe: Any, over: Sender, version: int, members: list[str], export: Export, sending: Export | None = None) -> None:
    """Send one version in the sender's process, and put its manifest and then the result or error into `pipe`.

    `sending`: an export that differs from the planned one, for faults.
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
    """Makes a receiver kill itself at this bucket of the target section."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket


def _receive(inbox: Any, outbox: Any, fault: Die | None) -> None:
    readers = ReaderCache("cpu")
    live: Tensors = {}
    while (manifest := inbox.get()) is not None:
        try:
            outbox.put(_take(readers, manifest, fault, live))
        except Exception as error:
            readers.fail(str(error))
            outbox.put(f"{type(error).__name__}: {error}")
        readers.end_section()
    readers.close()


def _take(readers: ReaderCache, manifest: Manifest, fault: Die | None, tensors: Tensors) -> dict[str, Any]:
    """Receive a version into `tensors`, which have the previous one."""
    reader = readers.open(manifest.transport, manifest.address)
    if manifest.base is None:
        tensors.clear()
    for section, plan in manifest.sections.items():
        reader.begin(manifest.version, section)
        blobs = BlobAssembler()
        for bucket, data in reader.stream(section, plan.wire_buckets) if plan.wire_buckets else ():
            if fault is not None and section == "target" and bucket.index == fault.bucket:
                os.kill(os.getpid(), signal.SIGKILL)
            if plan.delta is not None:
                for name, blob in blobs.read(bucket, data):
                    apply(plan.delta.changes[name], blob, tensors[name])
                continue
            for entry, piece in pieces(bucket, data):
                whole = tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=piece.dtype))
                whole.view(-1)[entry.part_start : entry.part_stop] = piece
    return {name: tensor.tolist() for name, tensor in tensors.items()}


class Receiver:
    """A process that receives versions."""

    def __init__(self, fault: Die | None = None) -> None:
        self.inbox, self.outbox = CONTEXT.Queue(), CONTEXT.Queue()
        self.process = CONTEXT.Process(target=_receive, args=(self.inbox, self.outbox, fault), daemon=True)
        self.process.start()

    def take(self, manifest: Manifest) -> None:
        """Start to receive a version."""
        self.inbox.put(manifest)

    def taken(self, seconds: float = 30.0) -> Any:
        """The received tensors, or the error."""
        return self.outbox.get(timeout=seconds)

    def end(self) -> None:
        """End the process."""
        self.inbox.put(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def receivers(count: int, faults: dict[int, Die] | None = None) -> Iterator[list[Receiver]]:
    """A fixture of `count` receivers."""
    started = [Receiver((faults or {}).get(index)) for index in range(count)]
    yield started
    for receiver in started:
        receiver.end()


def in_process(run: Callable[..., None], *arguments: Any) -> Any:
    """Start `run` in a new process."""
    process = CONTEXT.Process(target=run, args=arguments, daemon=True)
    process.start()
    return process
