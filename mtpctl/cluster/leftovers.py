"""What killed runs leave on a machine: weight versions in shared memory, and Ray's session folders.

Whoever makes such a folder leaves in it who it is: process id, the moment when that process started (ids are given out again), and
what the id counts in, a boot of a machine and a namespace of it. A folder goes once its process has. What bears no such mark, is another
user's, or was made in another container is left alone: nobody here can tell whether it is in use.

Who removes or claims holds a lock meanwhile, on the folder of shared memory itself: it needs no room, and containers that share the memory
share it.
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
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mtpctl-"
"""How the names of our folders in shared memory begin."""

MARK = ".mtpctl-owner"
_GOING = f".{PREFIX}going-"
_NAMESPACE = "/proc/self/ns/pid"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder whose maker is gone, and the bytes in it."""

    path: Path
    nbytes: int


def mark(folder: Path) -> None:
    """Leave in `folder` that it is this process's."""
    (folder / MARK).write_text(json.dumps(_identity(os.getpid())))


def unmark(folder: Path) -> None:
    """Take the mark off: the folder stays, whoever ends."""
    with suppress(OSError):
        (folder / MARK).unlink()


def make_marked(folder: Path) -> None:
    """Make `folder`, which is not there, with this process's mark in it, at one stroke."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    mark(aside)
    aside.rename(folder)


def vacate(folder: Path) -> bool:
    """Remove `folder` where this process or one that is gone made it. Returns whether nothing is there now."""
    with _alone(wait=True):
        return _vacate(folder)


def claim(folder: Path) -> bool:
    """`vacate` and `make_marked`, with nobody in between. Returns False, and leaves the folder, where it may be in use.

    Raises OSError where it cannot be made.
    """
    with _alone(wait=True):
        if not _vacate(folder):
            return False
        make_marked(folder)
        return True


def delete(folder: Path) -> None:
    """Remove `folder`, its mark last: should this break off, what is left is still known for a leftover."""
    if folder.is_symlink():
        raise NotADirectoryError(f"{folder} is a link")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    shutil.rmtree(folder)


def namespace() -> str:
    """A name for what this process's id counts in: another one in each container, unless it shares its host's."""
    return str(os.stat(_NAMESPACE).st_ino)


def find() -> list[Leftover]:
    """Folders on this machine whose makers are gone."""
    return [Leftover(folder, _size(folder)) for folder in _folders() if _abandoned(folder)]


def unknown() -> list[Path]:
    """What bears our name in shared memory, is this user's, and does not tell whose it is."""
    return [path for path in (*_in_memory(), *_own(SHARED_MEMORY, f".{PREFIX}*")) if _owner(path) is None]


def elsewhere() -> list[Path]:
    """Folders that tell whose they are, by an id of another container or, on disk, of an earlier boot: it means nothing here."""
    owners = [(folder, _owner(folder)) for folder in _folders() if not _abandoned(folder)]
    return [folder for folder, owner in owners if owner is not None and not _counts_here(owner)]


def remove() -> list[Leftover]:
    """Remove what `find` finds, unless another process does that just now. Returns what is gone."""
    try:
        with _alone(wait=False):
            return [left for left in find() if _remove(left.path)]
    except BlockingIOError:
        return []


@contextmanager
def _alone(*, wait: bool) -> Iterator[None]:
    """No other process removes or claims meanwhile. Raises BlockingIOError where one does, unless this is to `wait` for it."""
    lock = os.open(SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # A process forked meanwhile has the descriptor too.
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
    """Whether it is gone. Aside first: an engine that makes it anew meanwhile shall not lose what it writes."""
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
    yield from (path for path in _own(_ray_folder(), "session_*") if not path.is_symlink())
    for root in (SHARED_MEMORY, _ray_folder()):
        yield from _own(root, f".{PREFIX}*")  # what was being made or removed when its process was killed


def _in_memory() -> list[Path]:
    return _own(SHARED_MEMORY, f"{PREFIX}*")


def _own(root: Path, pattern: str) -> list[Path]:
    """Of this user: of others' processes nothing is known, and their folders could not be removed."""
    found = []
    for path in sorted(root.glob(pattern)):
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                found.append(path)
    return found


def _ray_folder() -> Path:
    """Where Ray makes its session folders."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def _owner(folder: Path) -> dict[str, Any] | None:
    """Who marked the folder, None where that cannot be read."""
    try:
        owner = json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and {"pid", "started", *_counted_in()} <= owner.keys() else None


def _counts_here(owner: dict[str, Any]) -> bool:
    return all(owner[name] == value for name, value in _counted_in().items())


def _abandoned(folder: Path) -> bool:
    """Whether the process that marked the folder is gone, and none that Ray started for it is left."""
    owner = _owner(folder)
    if owner is None:
        return False
    if not _counts_here(owner):
        # Memory is one machine's, and none of its processes outlives a boot. A disk may be another machine's too.
        return folder.parent == SHARED_MEMORY and owner["boot"] != _counted_in()["boot"]
    try:
        here = _identity(owner["pid"])
    except ProcessLookupError:
        here = {}
    return here != owner and not _named_by_a_process(folder.name)


def _identity(pid: int) -> dict[str, Any]:
    """Of a process. Raises ProcessLookupError where there is none of that id."""
    try:
        # The name of the program is the second field, in brackets, and may hold blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise ProcessLookupError(pid) from error
    return {"pid": pid, "started": int(fields[19]), **_counted_in()}


def _counted_in() -> dict[str, Any]:
    return {"boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "namespace": os.readlink(_NAMESPACE)}


def _named_by_a_process(name: str) -> bool:
    """Whether a process bears this name on its command line, as Ray's bear their session's."""
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
