"""Rendezvous of a sender and its receivers, and propagation of failures between them.

The sender hosts a key-value store. Receivers join a group by name, and the complete group is used until a member fails. A failure is
written to a key that all members poll while they wait, and the next transfer uses a group with a new name. If the sender dies, its store
is lost too, which receivers detect at their next poll.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from torch.distributed import TCPStore

from mtpctl.cluster.rendezvous import join_store
from mtpctl.sync.protocol import SyncError

_CHECK_S = 0.02
"""Interval of checks for failures, in seconds."""


@dataclass(frozen=True, slots=True)
class Address:
    """A group's address: the store's host and port, the group's name, its number of receivers, and the deadline of every wait."""

    host: str
    port: int
    group: str
    receivers: int
    deadline_s: float

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}/{self.group}?receivers={self.receivers}&deadline_s={self.deadline_s:g}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Inverse of `str`."""
        parts = urlsplit(text)
        query = parse_qs(parts.query)
        assert parts.hostname is not None and parts.port is not None
        return cls(parts.hostname, parts.port, parts.path.lstrip("/"), int(query["receivers"][0]), float(query["deadline_s"][0]))


class Control:
    """One member's view of a group."""

    def __init__(self, store: TCPStore, address: Address) -> None:
        self.store, self.address = store, address
        self._checked = 0.0

    def key(self, *parts: object) -> str:
        return "/".join([self.address.group, *map(str, parts)])

    def increment(self, *parts: object) -> int:
        """Increment the counter at a key, and return it. Raises SyncError if the sender's store is lost."""
        try:
            return int(self.store.add(self.key(*parts), 1))
        except RuntimeError as error:
            raise SyncError("the sender of the weights is gone") from error

    def count(self, *parts: object) -> int:
        """The counter at a key."""
        return int(self.store.add(self.key(*parts), 0))

    def fail(self, why: str) -> None:
        """Report a failure to the group. If the store is lost, all members notice that by themselves."""
        with contextlib.suppress(RuntimeError):
            self.store.set(self.key("fault"), why)

    def check(self) -> None:
        """Raise SyncError if a failure was reported, or the sender's store is lost."""
        try:
            if self.store.check([self.key("fault")]):
                raise SyncError(self.store.get(self.key("fault")).decode())
        except SyncError:
            raise
        except RuntimeError as error:
            raise SyncError("the sender of the weights is gone") from error

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`. Raises SyncError after a failure in the group, and after the deadline."""
        began = time.monotonic()
        pause = 0.00005
        while True:
            try:
                if done():
                    return
            except RuntimeError as error:
                # A failing peer also breaks the operations of other members. Prefer the reason that the peer reported.
                self.check()
                raise SyncError(f"{what} failed: {str(error).splitlines()[0]}") from error
            now = time.monotonic()
            if now - self._checked > _CHECK_S:
                self._checked = now
                self.check()
            if now - began > self.address.deadline_s:
                why = f"{what} took longer than sync.deadline_s = {self.address.deadline_s:g}"
                self.fail(why)
                raise SyncError(why)
            time.sleep(pause)
            pause = min(2 * pause, 0.002)


def join(address: Address) -> tuple[Control, int]:
    """Join a group as a receiver. Returns its control and this receiver's rank, from 1. Raises SyncError if it is full or lost."""
    try:
        store = join_store(f"{address.host}:{address.port}")
    except (OSError, RuntimeError) as error:
        raise SyncError(f"the sender of the weights at {address.host}:{address.port} cannot be reached") from error
    control = Control(store, address)
    rank = control.increment("joined")
    if rank > address.receivers:
        raise SyncError(f"group {address.group} has its {address.receivers} receivers already")
    control.wait(lambda: control.count("joined") >= address.receivers, "waiting for the other receivers of the weights")
    return control, rank


def report_failure(text: str, why: str) -> None:
    """Report a failure to the group at this address, without being a member."""
    address = Address.parse(text)
    with contextlib.suppress(OSError, RuntimeError):
        store = join_store(f"{address.host}:{address.port}")
        Control(store, address).fail(why)
