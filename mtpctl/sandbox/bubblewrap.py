"""Walls by bubblewrap, for systems that allow namespaces to it and not to any process."""

from __future__ import annotations

import os
import shutil
import sys

from mtpctl.sandbox import walls


def command(inner: list[str], source: str) -> list[str] | None:
    """The command that runs `inner` in bubblewrap; None where that is not installed.

    It has no network, and sees the files that a run may read, the interpreter and `source`. Nothing is writable, since all runs of a zygote
    share these walls.
    """
    program = shutil.which("bwrap")
    if program is None:
        return None
    # Links are followed here, and paths stay as they are: sys.executable of a virtual environment is one.
    interpreter = {sys.executable, os.path.realpath(sys.executable), f"{sys.prefix}/pyvenv.cfg", f"{source}/mtpctl"}
    shown = [*walls.readable(), *sorted(path for path in interpreter if os.path.exists(path))]
    bound = [each for path in shown for each in (("--dev-bind" if path.startswith("/dev/") else "--ro-bind"), path, path)]
    linked = [each for path, leads_to in walls.links().items() for each in ("--symlink", leads_to, path)]
    private = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    return [program, *private, *linked, *bound, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--", *inner]
