"""Setup of an actor's process: its log file and the garbage collector.

Actors print to `logs/NAME.log` in the run directory, because Ray's own log files have no descriptive names and are deleted with the
session. An actor replaces the file descriptors of stdout and stderr, so that native code and child processes write to the file too.
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
"""Maximum size of a log file, in bytes."""
_CHECK_S = 10.0
_CLOCK_LAG_S = 1.0
"""Maximum lag of a file system's clock, in seconds."""
_MARK = "── "
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_WARNING = re.compile(r"^(.*Warning: .*(\n[ \t].*)?|W\d{4} \d\d:\d\d:\d\d.*)$", re.MULTILINE)
"""A Python warning with the line of source that follows it, or a warning in the format of torch's logs."""
_TAIL_BYTES, _MAX_CHARACTERS = 8192, 120


def make_log_folder_variables(folder: Path) -> dict[str, str]:
    """Environment variables with the log folder, for all actors of a Ray job."""
    return {FOLDER_VARIABLE: str(folder.absolute())}


def make_log_name_variables(actor: str) -> dict[str, str]:
    """Environment variables with an actor's name, such as `rollout replica 0`."""
    return {NAME_VARIABLE: _file_stem(actor)}


def read_newest_line(folder: Path, actor: str, *, start_time: float) -> str:
    """The last line that an actor has printed since a time, without control characters and warnings; of a progress bar, its latest state.

    Empty if there is no such line, or if the file is on another host.
    """
    try:
        with (folder / f"{_file_stem(actor)}.log").open("rb") as file:
            if os.fstat(file.fileno()).st_mtime < start_time - _CLOCK_LAG_S:
                return ""
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Lines before the last mark, which `redirect_output` writes, are from earlier processes.
    _, mark, newest_text = text.rpartition(_MARK)
    lines = [_CONTROL.sub("", line).strip() for line in re.split(r"[\r\n]", _WARNING.sub("", newest_text))][bool(mark) :]
    return next((line[:_MAX_CHARACTERS] for line in reversed(lines) if line), "")


def _file_stem(actor: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", actor.lower()).strip("-")


def redirect_output() -> Path | None:
    """Redirect the output of this process to its file, and return the file.

    Returns None if no file is configured, the folder does not exist on this host, or the file cannot be written.
    """
    folder, name = os.environ.get(FOLDER_VARIABLE), os.environ.get(NAME_VARIABLE)
    if not folder or not name or not os.path.isdir(folder):
        return None
    path = Path(folder) / f"{name}.log"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"{path} cannot be written ({error.strerror}); this actor's output is in Ray's logs", file=sys.stderr)
        return None
    os.write(file, f"{_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()} on {os.uname().nodename}\n".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    threading.Thread(target=_limit_size, args=(path, file), name="log size", daemon=True).start()
    return path


def _limit_size(path: Path, file: int) -> None:
    while True:
        time.sleep(_CHECK_S)
        rotate_if_large(path, file)


def rotate_if_large(path: Path, file: int) -> None:
    """If the file is larger than `FILE_BYTES`, copy it to `NAME.1.log` and empty it. It is not renamed: child processes have it open."""
    try:
        if os.fstat(file).st_size > FILE_BYTES:
            shutil.copyfile(path, path.with_suffix(".1.log"))
            os.ftruncate(file, 0)
    except OSError as error:
        # The disk is full, or the run directory was moved. The actor continues.
        print(f"{path} cannot be truncated: {error}", file=sys.stderr)


def freeze_heap() -> None:
    """Exclude all current objects from garbage collection. A collection of the objects of torch and vLLM blocks the process for 0.4 s."""
    gc.collect()
    gc.freeze()


@contextmanager
def gc_paused_for_imports() -> Iterator[None]:
    """Disable the collector while the block imports, and exclude the imported modules from later collections.

    Collections take a fifth of the time of importing vLLM or Megatron, and free nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
