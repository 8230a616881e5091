"""Landlock: a process gives up the file system but for some folders that it may read. Needs no rights, and a kernel of 5.13 or newer.

It does not hide that a path exists, nor its size and owner.
"""

from __future__ import annotations

import ctypes
import os
import struct

from mtpctl.sandbox import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights over files that a release of Landlock knows; all are taken away."""
_READ_FILE, _READ_FOLDER, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_TCP = 3
_SCOPES = 3
"""Abstract unix sockets and signals, of processes outside."""


def version() -> int:
    """The release of Landlock's interface that the kernel has, 0 where it has none."""
    try:
        return kernel.call(_CREATE, 0, 0, 1)
    except OSError:
        return 0


def rules(readable: list[str]) -> int:
    """A descriptor of rules by which the files under `readable` can be read, and nothing else. Raises OSError without Landlock."""
    release = version()
    rights = _RIGHTS_BY_VERSION[min(max(release, 1), 5)]
    attributes = struct.pack("<QQQ", rights, _TCP if release >= 4 else 0, _SCOPES if release >= 6 else 0)
    attributes = attributes[: 24 if release >= 6 else 16 if release >= 4 else 8]
    made = kernel.call(_CREATE, ctypes.c_char_p(attributes), len(attributes), 0)
    for path in readable:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | _EXECUTE | (_READ_FOLDER if os.path.isdir(path) else 0)
        kernel.call(_ADD, made, 1, ctypes.c_char_p(struct.pack("<Qi", allowed, at)), 0)
        os.close(at)
    return made


def restrict(made: int) -> None:
    """Put this process behind the rules. Needs `no_new_privileges`. Raises OSError where it fails."""
    kernel.call(_RESTRICT, made, 0)
