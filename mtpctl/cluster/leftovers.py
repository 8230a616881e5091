"""What killed runs leave on a machine: weight versions in shared memory, and Ray's session folders.

Whoever makes such a folder leaves in it who it is: process id, the moment when that process started (ids are given out again), and
what the id counts in, a boot of a machine and a namespace of it. A folder goes once its process has. What bears no such mark, is another
user's, or was made in another container is left alone: nobody here can tell whether it is in use.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mtpctl-"
"""How the names of our folders in shared memory begin."""

MARK = ".mtpctl-owner"
_GOING = f".{PREFIX}going-"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder whose maker is gone, and the bytes in it."""

    path: Path
    nbytes: int


def mark(folder: Path) -> None:
    """Leave in `folder` that it is this process's."""
    (folder / MARK).write_text(json.dumps(_identity(os.getpid())))


def make_marked(folder: Path) -> None:
    """Make `folder`, which is not there, with this process's mark in it, at one stroke."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    mark(aside)
    aside.rename(folder)


def find() -> list[Leftover]:
    """Folders on this machine whose makers are gone."""
    return [Leftover(folder, _size(folder)) for folder in _folders() if _abandoned(folder)]


def unknown() -> list[Path]:
    """What bears our name in shared memory, is this user's, and does not tell whose it is."""
    return [path for path in _in_memory() if not (path / MARK).is_file()]


def remove() -> list[Leftover]:
    """Remove what `find` finds. Returns what is gone."""
    gone = []
    for left in find():
        # Aside first: another start may have removed it meanwhile, and its run have made it anew.
        aside = left.path.with_name(f"{_GOING}{os.getpid()}-{left.path.name}")
        with suppress(OSError):
            left.path.rename(aside)
            if not _abandoned(aside):
                aside.rename(left.path)
                continue
            shutil.rmtree(aside)
            gone.append(left)
    return gone


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


def _abandoned(folder: Path) -> bool:
    """Whether the process that marked the folder is gone, and none that Ray started for it is left."""
    try:
        owner: dict[str, Any] = json.loads((folder / MARK).read_text())
        here = _identity(owner["pid"])
    except ProcessLookupError:
        here = {}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if {name: owner.get(name) for name in ("boot", "namespace")} != _counted_in():
        return False
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
    return {"boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "namespace": os.readlink("/proc/self/ns/pid")}


def _named_by_a_process(name: str) -> bool:
    """Whether a process bears this name on its command line, as Ray's bear their session's."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if name.encode() in path.read_bytes():
                return True
    return False


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total
