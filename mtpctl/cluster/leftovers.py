"""Removes what killed runs leave on this machine: folders in shared memory, Ray's session folders, and Ray's daemons.

Folders: the process that creates a folder writes a mark into it: its process id, its start time (because ids are reused), and the boot and
process namespace in which the id is valid. A folder is removed after its process, and all processes whose command line has its name, have
ended. Folders without a mark, of another user, or from another container are not removed, because they may be in use. The lock for removing
and creating is on the shared memory folder itself, so it also excludes processes of other containers that share the memory.

Daemons: each of Ray's daemons has its own session, so signals to the command's process group do not reach it. The watchdog is a small
process with its own session. Daemons write their process id and start time into a pipe that it reads. When the command closes the watchdog
or ends, the watchdog kills all processes of the daemons' sessions and their descendants. If the command has ended without closing it, the
watchdog also removes all leftover folders. It runs this module, which therefore imports only the standard library.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mtpctl-"
"""Prefix of mtpctl's names in shared memory."""

MARK = ".mtpctl-owner"
ENDED_STATES = "ZX"
"""States of processes that have ended, including zombies."""
_DELETING_PREFIX = f".{PREFIX}going-"
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
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    mark(temporary)
    temporary.rename(folder)


def vacate(folder: Path) -> bool:
    """Delete `folder` if it was created by this process, or by one that has ended. Returns whether it no longer exists."""
    with _locked(wait=True):
        return _vacate(folder)


def claim(folder: Path) -> bool:
    """Atomically `vacate` and `make_marked`. Returns False if the folder may be in use. Raises OSError if it cannot be created."""
    with _locked(wait=True):
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


def process_namespace() -> str:
    """Id of the process namespace. Containers have different namespaces, unless they share the namespace of their host."""
    return str(os.stat(_NAMESPACE).st_ino)


def find() -> list[Leftover]:
    """Folders on this machine whose processes have ended."""
    return [Leftover(folder, _size(folder)) for folder in _folders() if _is_abandoned(folder)]


def find_unmarked() -> list[Path]:
    """Folders of this user in shared memory with mtpctl's prefix but without a readable mark."""
    paths = (*_user_paths(SHARED_MEMORY, f"{PREFIX}*"), *_user_paths(SHARED_MEMORY, f".{PREFIX}*"))
    return [path for path in paths if _owner(path) is None]


def find_foreign() -> list[Path]:
    """Folders whose process id is from another container or, on disk, from an earlier boot."""
    owners = [(folder, _owner(folder)) for folder in _folders() if not _is_abandoned(folder)]
    return [folder for folder, owner in owners if owner is not None and not _same_namespace(owner)]


def remove(*, wait: bool = False) -> list[Leftover]:
    """Delete the leftovers, and return them.

    If another process has the lock, wait for it if `wait` is true; otherwise return an empty list.
    """
    try:
        with _locked(wait=wait):
            return [leftover for leftover in find() if _remove(leftover.path)]
    except BlockingIOError:
        return []


@contextmanager
def _locked(*, wait: bool) -> Iterator[None]:
    """Lock removing and claiming. If another process has the lock, wait for it if `wait` is true; otherwise raise BlockingIOError."""
    lock = os.open(SHARED_MEMORY if SHARED_MEMORY.is_dir() else tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # Closing is not enough: a process that was forked in the block also has the lock open.
        os.close(lock)


def _vacate(folder: Path) -> bool:
    if not os.path.lexists(folder):
        return True
    if _owner(folder) != _identity(os.getpid()) and not _is_abandoned(folder):
        return False
    with suppress(OSError):  # The folder may belong to another user.
        delete(folder)
    return not os.path.lexists(folder)


def _remove(folder: Path) -> bool:
    """Delete `folder` unless its process is alive, after renaming it so that it can be created again. Returns whether it was deleted."""
    renamed_folder = folder
    if not folder.name.startswith(_DELETING_PREFIX):
        renamed_folder = folder.with_name(f"{_DELETING_PREFIX}{os.getpid()}-{folder.name}")
    try:
        if not _is_abandoned(folder):
            return False
        folder.rename(renamed_folder)
        delete(renamed_folder)
    except OSError:
        return False
    return True


def _folders() -> Iterator[Path]:
    yield from _user_paths(SHARED_MEMORY, f"{PREFIX}*")
    yield from (path for path in _user_paths(sessions_folder(), "session_*") if not path.is_symlink())
    for root in (SHARED_MEMORY, sessions_folder()):
        yield from _user_paths(root, f".{PREFIX}*")  # of processes that were killed while they created or deleted a folder


def _user_paths(root: Path, pattern: str) -> list[Path]:
    """Matching paths that belong to this user."""
    paths = []
    for path in sorted(root.glob(pattern)):
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                paths.append(path)
    return paths


def sessions_folder() -> Path:
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
    current = _origin()
    return owner["boot"] == current["boot"] and owner["namespace"] == current["namespace"]


def _is_abandoned(folder: Path) -> bool:
    """Whether the process of the mark and all processes that Ray started for it have ended."""
    owner = _owner(folder)
    if owner is None:
        return False
    if not _same_namespace(owner):
        # Shared memory belongs to this machine, and no process survives a reboot. A disk may be shared with another machine.
        return folder.parent == SHARED_MEMORY and owner["boot"] != _origin()["boot"]
    try:
        is_running = _identity(owner["pid"]) == owner
    except ProcessLookupError:
        is_running = False
    return not is_running and not _named_by_a_process(folder.name)


@dataclass(frozen=True, slots=True)
class Process:
    """A running process. `started` is in clock ticks after the boot."""

    pid: int
    parent: int
    session: int
    started: int


def read_process(pid: int) -> Process:
    """Read a process from `/proc`. Raises ProcessLookupError if no running process has that id."""
    try:
        # The second field is the program's name in parentheses, which may contain blanks and parentheses.
        state, parent, _, session, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise ProcessLookupError(pid) from error
    if state in ENDED_STATES:
        raise ProcessLookupError(pid)
    return Process(pid, int(parent), int(session), int(fields[15]))


def read_start_time(pid: int) -> int:
    """The start time of a running process, in clock ticks after the boot. Raises ProcessLookupError if no running process has that id."""
    return read_process(pid).started


def _identity(pid: int) -> Owner:
    """The mark that identifies a running process. Raises ProcessLookupError if no running process has that id."""
    return {"pid": pid, "started": read_start_time(pid), **_origin()}


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


KILL_TIMEOUT_S = 15.0
"""Seconds to wait for killed processes to disappear."""
_CLOSED = b"closed"
_POLL_S = 0.5
_PAUSE_S = 0.02


class Watchdog:
    """The watchdog process, and the command's end of the pipe to it."""

    def __init__(self) -> None:
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P excludes the working directory from the import path.
                [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(read_start_time(os.getpid()))],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read_end)
        self._closed = False

    def register(self) -> None:
        """Register the calling process, the leader of its session. A daemon calls it before its program begins."""
        os.write(self._pipe, b"%d %d\n" % (os.getpid(), read_start_time(os.getpid())))

    def close(self) -> None:
        """End all processes of the daemons' sessions, and wait for the watchdog."""
        if self._closed:
            return
        self._closed = True
        with suppress(BrokenPipeError):  # the watchdog was killed
            os.write(self._pipe, _CLOSED + b"\n")
        os.close(self._pipe)
        try:
            self._process.wait(2 * KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def find_session_members(leaders: dict[int, int]) -> list[Process]:
    """The processes of these sessions and their descendants. `leaders`: start time of each session's leader, by process id.

    The id of a session is not reused while it has a member. If its leader has another start time, it is another session.
    """
    processes = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            processes[int(path.name)] = read_process(int(path.name))
    sessions = {leader for leader, started in leaders.items() if leader not in processes or processes[leader].started == started}
    pids = {process.pid for process in processes.values() if process.session in sessions}
    while children := {process.pid for process in processes.values() if process.parent in pids} - pids:
        pids |= children
    return [processes[pid] for pid in pids]


def kill_sessions(leaders: dict[int, int]) -> None:
    """Kill the members of the sessions until none is left, for at most `KILL_TIMEOUT_S`."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (members := find_session_members(leaders)) and time.monotonic() < deadline:
        for process in members:
            with suppress(ProcessLookupError, PermissionError):
                if read_start_time(process.pid) == process.started:
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def run_watchdog(command_pid: int, started: int) -> None:
    """Read the pipe on stdin until the command (given by process id and start time) closes it or ends. Then end the daemons."""
    received = b""
    while True:
        if select.select([0], [], [], _POLL_S)[0]:
            data = os.read(0, 1 << 16)
            received += data
            if not data or received.endswith(_CLOSED + b"\n"):
                break
        elif _ended(command_pid, started):
            break
    *lines, _ = received.split(b"\n")
    was_closed = _CLOSED in lines
    kill_sessions({int(pid): int(start_ticks) for pid, start_ticks in (line.split() for line in lines if line != _CLOSED)})
    if was_closed:  # the command is running, and deletes its folders itself
        return
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while not _ended(command_pid, started) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    remove(wait=True)


def _ended(pid: int, started: int) -> bool:
    try:
        return read_start_time(pid) != started
    except ProcessLookupError:
        return True


if __name__ == "__main__":
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    run_watchdog(int(sys.argv[1]), int(sys.argv[2]))
