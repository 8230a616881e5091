"""Actors print to files of the run: `logs/NAME.log` in its directory.

Ray's own files have no telling names and go with the session. An actor replaces stdout and stderr by its file when it starts, so that
native code and child processes write there too.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER_VARIABLE, NAME_VARIABLE = "MTPCTL_LOGS", "MTPCTL_LOG"
FILE_BYTES = 16 << 20
_LOOK_S = 10.0
_CLOCKS_S = 1.0
"""Seconds by which the clock of a file system may be behind."""
_MARK = "── "
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_WARNING = re.compile(r"\bwarnings?\.warn\(|Warning: ")
_TAIL_BYTES, _SHOWN = 8192, 120


def folder_for_all(folder: Path) -> dict[str, str]:
    """Environment variables that tell all actors of a Ray job the folder."""
    return {FOLDER_VARIABLE: str(folder.absolute())}


def name_for_one(actor: str) -> dict[str, str]:
    """Environment variables that tell an actor its name, such as `rollout replica 0`."""
    return {NAME_VARIABLE: _stem(actor)}


def newest_line(folder: Path, actor: str, *, since: float) -> str:
    """The last line that an actor has printed since a time, without control characters; of a progress bar, its newest state.

    Python's warnings are left out. Empty where there is no such line, or where the file is on another host.
    """
    try:
        with (folder / f"{_stem(actor)}.log").open("rb") as file:
            if os.fstat(file.fileno()).st_mtime < since - _CLOCKS_S:
                return ""
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # The line of the mark was not printed by the actor: it says when the actor started.
    _, mark, after = text.rpartition(_MARK)
    lines = [_CONTROL.sub("", line).strip() for line in re.split(r"[\r\n]", after)][bool(mark) :]
    return next((line[:_SHOWN] for line in reversed(lines) if line and not _WARNING.search(line)), "")


def _stem(actor: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", actor.lower()).strip("-")


def write_to_run() -> Path | None:
    """Have this process print to its file, to which it appends. Returns the file; None where it has none or this host lacks the folder.

    A file that has grown over `FILE_BYTES` is copied to `NAME.1.log` and emptied. Renaming it would not do: child processes have it open.
    """
    folder, name = os.environ.get(FOLDER_VARIABLE), os.environ.get(NAME_VARIABLE)
    if not folder or not name or not os.path.isdir(folder):
        return None
    path = Path(folder) / f"{name}.log"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"{path} cannot be written ({error.strerror}); Ray keeps what this actor prints", file=sys.stderr)
        return None
    os.write(file, f"{_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()} on {os.uname().nodename}\n".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    threading.Thread(target=_keep_small, args=(path, file), name="log size", daemon=True).start()
    return path


def _keep_small(path: Path, file: int) -> None:
    while True:
        time.sleep(_LOOK_S)
        empty_if_large(path, file)


def empty_if_large(path: Path, file: int) -> None:
    """Copy the file to `NAME.1.log` and empty it, where it is larger than `FILE_BYTES`.

    A process that appends to it continues at its beginning.
    """
    try:
        if os.fstat(file).st_size > FILE_BYTES:
            shutil.copyfile(path, path.with_suffix(".1.log"))
            os.ftruncate(file, 0)
    except OSError as error:
        # The disk is full, or the run's directory was moved away; what the actor does does not depend on it.
        print(f"{path} cannot be made smaller: {error}", file=sys.stderr)


def settle_heap() -> None:
    """Exclude all objects that exist now from garbage collection. Call it when everything that stays for good is loaded.

    A collection of the oldest generation visits every object. The modules of torch, transformers and vLLM alone make it last 0.4 s,
    in which nothing else in the process runs, and one happens every few hundred requests.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """Switch the collector off while the block imports, and exclude what it has imported from later collections.

    Modules stay for good, and collecting among them is a fifth of what importing vLLM or Megatron takes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
