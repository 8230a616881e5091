"""Find and remove folders that killed runs left on this machine: weight versions in shared memory, and Ray's session folders.

The process that creates such a folder writes a mark into it: its process id, its start time (because ids are reused), and the boot
and process namespace in which the id is valid. A folder is removed if its process has ended. Folders without a mark, of another user, or
from another container are not removed, because they may be in use.

Removing and claiming lock the shared memory folder itself, so that containers that share the memory are excluded too.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mtpctl-"
"""Prefix of mtpctl's names in shared memory."""

MARK = ".mtpctl-owner"
ENDED = "ZX"
"""States of processes that have ended, including zombies."""
_GOING = f".{PREFIX}going-"
_NAMESPACE = "/proc/self/ns/pid"


class Origin(TypedDict):
    """The scope of a process id: a boot of the machine, and a process namespace, which is usually that of a container."""

    boot: str
    namespace: str


class Owner(Origin):
    """The mark in a folder: the process that created it. `started` is in clock ticks after the boot."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder of a process that has ended, and its size."""

    path: Path
    nbytes: int


def mark(folder: Path) -> None:
    (folder / MARK).write_text(json.dumps(_identity(os.getpid())))


def unmark(folder: Path) -> None:
    """Remove the mark, so that the folder is kept when its process ends."""
    with suppress(OSError):
        (folder / MARK).unlink()


def make_marked(folder: Path) -> None:
    """Atomically create `folder`, private to this user and with the mark of this process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    mark(aside)
    aside.rename(folder)


def vacate(folder: Path) -> bool:
    """Delete `folder` if it was created by this process, or by one that has ended. Returns whether it no longer exists."""
    with _alone(wait=True):
        return _vacate(folder)


def claim(folder: Path) -> bool:
    """`vacate` and `make_marked` atomically. Returns False if the folder may be in use. Raises OSError if it cannot be created."""
    with _alone(wait=True):
        if not _vacate(folder):
            return False
        make_marked(folder)
        return True


def delete(folder: Path) -> None:
    """Delete `folder`, its mark last, so that an interrupted deletion still leaves a recognizable leftover."""
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a link")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    shutil.rmtree(folder)


def namespace() -> str:
    """An id of the process namespace. Each container has its own, unless it shares its host's."""
    return str(os.stat(_NAMESPACE).st_ino)


def find() -> list[Leftover]:
    """Folders on this machine whose processes have ended."""
    return [Leftover(folder, _size(folder)) for folder in _folders() if _abandoned(folder)]


def unknown() -> list[Path]:
    """Folders of this user in shared memory with mtpctl's prefix but without a readable mark."""
    return [path for path in (*_in_memory(), *_own(SHARED_MEMORY, f".{PREFIX}*")) if _owner(path) is None]


def elsewhere() -> list[Path]:
    """Folders whose process id cannot be looked up here: it is from another container or, on disk, from an earlier boot."""
    owners = [(folder, _owner(folder)) for folder in _folders() if not _abandoned(folder)]
    return [folder for folder, owner in owners if owner is not None and not _same_namespace(owner)]


def remove(*, wait: bool = False) -> list[Leftover]:
    """Delete the leftovers, and return them. If another process is deleting them, wait for it, or without `wait` return an empty list."""
    try:
        with _alone(wait=wait):
            return [left for left in find() if _remove(left.path)]
    except BlockingIOError:
        return []


@contextmanager
def _alone(*, wait: bool) -> Iterator[None]:
    """Lock removing and claiming. If another process has the lock, wait for it, or without `wait` raise BlockingIOError."""
    lock = os.open(SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # Closing is not enough if a process was forked meanwhile.
        os.close(lock)


def _vacate(folder: Path) -> bool:
    if not os.path.lexists(folder):
        return True
    if _owner(folder) != _identity(os.getpid()) and not _abandoned(folder):
        return False
    with suppress(OSError):  # another user's
        delete(folder)
    return not os.path.lexists(folder)


def _remove(folder: Path) -> bool:
    """Delete `folder`, unless its process is alive. Returns whether it was deleted.

    It is renamed first, so that a process may create it again at the same time.
    """
    aside = folder
    if not folder.name.startswith(_GOING):
        aside = folder.with_name(f"{_GOING}{os.getpid()}-{folder.name}")
    try:
        if not _abandoned(folder):
            return False
        folder.rename(aside)
        delete(aside)
    except OSError:
        return False
    return True


def _folders() -> Iterator[Path]:
    yield from _in_memory()
    yield from (path for path in _own(sessions(), "session_*") if not path.is_symlink())
    for root in (SHARED_MEMORY, sessions()):
        yield from _own(root, f".{PREFIX}*")  # The process was killed while it created or deleted the folder.


def _in_memory() -> list[Path]:
    return _own(SHARED_MEMORY, f"{PREFIX}*")


def _own(root: Path, pattern: str) -> list[Path]:
    """Matching paths that belong to this user."""
    paths = []
    for path in sorted(root.glob(pattern)):
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                paths.append(path)
    return paths


def sessions() -> Path:
    """The folder for sessions of local Ray clusters. Its parent is private to the user, since Ray makes this folder world-writable."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / f"{PREFIX}{os.getuid()}" / "ray"


def _owner(folder: Path) -> Owner | None:
    """The mark of a folder; None if there is no readable mark."""
    try:
        owner: Owner = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and Owner.__required_keys__ <= owner.keys() else None


def _same_namespace(owner: Owner) -> bool:
    """Whether the process id of the mark can be looked up here."""
    here = _origin()
    return owner["boot"] == here["boot"] and owner["namespace"] == here["namespace"]


def _abandoned(folder: Path) -> bool:
    """Whether the process of the mark and all processes that Ray started for it have ended."""
    owner = _owner(folder)
    if owner is None:
        return False
    if not _same_namespace(owner):
        # Shared memory belongs to this machine, and no process survives a reboot. A disk may be shared with another machine.
        return folder.parent == SHARED_MEMORY and owner["boot"] != _origin()["boot"]
    try:
        running = _identity(owner["pid"]) == owner
    except ProcessLookupError:
        running = False
    return not running and not _named_by_a_process(folder.name)


def started(pid: int) -> int:
    """The start time of a running process, in clock ticks after the boot. Raises ProcessLookupError if no running process has that id."""
    try:
        # The second field is the program's name in parentheses, which may contain blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise ProcessLookupError(pid) from error
    if fields[0] in ENDED:
        raise ProcessLookupError(pid)
    return int(fields[19])


def _identity(pid: int) -> Owner:
    """The mark that identifies a running process. Raises ProcessLookupError if no running process has that id."""
    return {"pid": pid, "started": started(pid), **_origin()}


def _origin() -> Origin:
    return {"boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "namespace": os.readlink(_NAMESPACE)}


def _named_by_a_process(name: str) -> bool:
    """Whether a command line contains this name. The command lines of Ray's processes contain the name of their session."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if name.encode() in path.read_bytes():
                return True
    return False


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
