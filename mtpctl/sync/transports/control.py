"""How the sender of a pushing transport and its receivers find each other, and how a fault of one reaches the others.

The sender hosts a small key-value store. Receivers join a group by its name; once all have, the group is complete and is used until
something fails. A fault is written to a key that everyone reads while waiting, and the next transfer has a group of another name. If
the sender dies the store is gone too, which its receivers notice as fast.
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

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Address:
    """Where a group meets: the store's host and port, the group's name, its receivers, and the deadline of every wait."""

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
    """One party's view of a group."""

    def __init__(self, store: TCPStore, address: Address) -> None:
        self.store, self.address = store, address
        self._looked = 0.0

    def key(self, *parts: object) -> str:
        """A key of this group."""
        return "/".join([self.address.group, *map(str, parts)])

    def raise_(self, *parts: object) -> int:
        """Count one more at a key; returns the count. Raises SyncError where the sender's store is gone."""
        try:
            return int(self.store.add(self.key(*parts), 1))
        except RuntimeError as error:
            raise SyncError("the sender of the weights is gone") from error

    def count(self, *parts: object) -> int:
        """The count at a key."""
        return int(self.store.add(self.key(*parts), 0))

    def fail(self, why: str) -> None:
        """Tell everyone in the group that it is over. Without the store nobody need be told: everyone notices."""
        with contextlib.suppress(RuntimeError):
            self.store.set(self.key("fault"), why)

    def look(self) -> None:
        """Raise SyncError where a fault was reported, or the sender's store is gone."""
        try:
            if self.store.check([self.key("fault")]):
                raise SyncError(self.store.get(self.key("fault")).decode())
        except SyncError:
            raise
        except RuntimeError as error:
            raise SyncError("the sender of the weights is gone") from error

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Return once `done()`, looking for faults meanwhile. Raises SyncError for one, and after the deadline."""
        began = time.monotonic()
        pause = 0.00005
        while True:
            try:
                if done():
                    return
            except RuntimeError as error:
                # A peer that fails breaks what its neighbours wait for; what it said is the better reason.
                self.look()
                raise SyncError(f"{what} broke off: {str(error).splitlines()[0]}") from error
            now = time.monotonic()
            if now - self._looked > _LOOK_S:
                self._looked = now
                self.look()
            if now - began > self.address.deadline_s:
                why = f"{what} took longer than sync.deadline_s = {self.address.deadline_s:g}"
                self.fail(why)
                raise SyncError(why)
            time.sleep(pause)
            pause = min(2 * pause, 0.002)


def join(address: Address) -> tuple[Control, int]:
    """Become a receiver of a group: its control, and this receiver's number from 1. Raises SyncError where the group is full or gone."""
    try:
        store = join_store(f"{address.host}:{address.port}")
    except (OSError, RuntimeError) as error:
        raise SyncError(f"the sender of the weights at {address.host}:{address.port} cannot be reached") from error
    control = Control(store, address)
    rank = control.raise_("joined")
    if rank > address.receivers:
        raise SyncError(f"group {address.group} has its {address.receivers} receivers already")
    control.wait(lambda: control.count("joined") >= address.receivers, "waiting for the other receivers of the weights")
    return control, rank


def report(text: str, why: str) -> None:
    """Tell the group at this address that it is over, from outside of it."""
    address = Address.parse(text)
    with contextlib.suppress(OSError, RuntimeError):
        store = join_store(f"{address.host}:{address.port}")
        Control(store, address).fail(why)
