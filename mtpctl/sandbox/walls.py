"""The walls that the zygote puts itself behind before it forks: namespaces, and a file system with the interpreter alone."""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Literal

from mtpctl.sandbox import kernel, landlock

Walls = Literal["namespaces", "user namespaces", "bubblewrap", "landlock", "closed", "none"]
ORDER: tuple[Walls, ...] = ("namespaces", "user namespaces", "bubblewrap", "landlock", "closed")
"""Ways to take the files away, best first. `closed`: no file can be opened at all, by the filter of system calls."""

_NEW_ROOT = "/tmp"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", *_DEVICES)


def readable() -> list[str]:
    """What a run may read: standard library, installed packages, shared libraries of the system, time zones, and three devices.

    No folder of it is in another one.
    """
    python = sysconfig.get_paths()
    wanted = {python[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")} | {f"{sys.base_prefix}/lib", *_SYSTEM}
    # A system that keeps /lib as a link to /usr/lib gets the link again (`links`).
    present = sorted(os.path.normpath(path) for path in wanted if os.path.exists(path) and path not in links())
    kept: list[str] = []
    for path in present:
        if not kept or os.path.commonpath([kept[-1], path]) != kept[-1]:
            kept.append(path)
    return kept


def links() -> dict[str, str]:
    """Folders at the root that are links to others there, with where they lead."""
    return {path: os.readlink(path) for path in ("/lib", "/lib64") if os.path.islink(path)}


def enter(walls: Walls) -> int:
    """Go behind the walls, and return the descriptor of Landlock's rules, -1 where the walls are others.

    With namespaces this process is process 1 of its own when it returns: another one waits for it. Raises OSError where the kernel or the
    container does not allow it.
    """
    if walls in ("namespaces", "user namespaces"):
        _unshare(own_user=walls == "user namespaces")
        _build_root()
    return landlock.rules(readable()) if walls == "landlock" else -1


def scratch() -> str:
    """Where a run has its private folder: /tmp, or beside it where the interpreter itself is below /tmp."""
    return "/scratch" if any(path.startswith("/tmp/") for path in readable()) else "/tmp"


def private_folder(megabytes: int) -> None:
    """Give this process an empty folder `scratch` of this size that no other one sees, and that goes with it."""
    os.unshare(os.CLONE_NEWNS)
    options = f"size={megabytes}m,nr_inodes={64 * megabytes},mode=0777"
    kernel.mount("tmpfs", scratch(), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)


def _unshare(*, own_user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWPID
    os.unshare(flags | (os.CLONE_NEWUSER if own_user else 0))
    if own_user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    _become_first()


def _become_first() -> None:
    """Go on as process 1 of the new namespace: when that one ends, the kernel kills all others in it."""
    pid = os.fork()
    if pid:
        os.closerange(0, 1 << 16)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(1, 9)  # PR_SET_PDEATHSIG: killed with the one that waits


def _build_root() -> None:
    """Make a tmpfs the root, with what is `readable` bound into it. /proc and /sys are not there."""
    sources = [(path, os.open(path, os.O_PATH)) for path in readable()]  # the new root may be mounted over some of them
    linked, private = links(), scratch()
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    for path, source in sources:
        target = _NEW_ROOT + path
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{source}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{source}", target, "", kernel.MS_BIND | kernel.MS_REC)
        # A mount that came from another user's namespace keeps the flags that it has; most of ST_* are numbered like MS_*.
        held = os.statvfs(target).f_flag & (kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | 1024 | 2048)
        device = 0 if path in _DEVICES else kernel.MS_NODEV
        flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | device | held
        kernel.mount("none", target, "", flags | (0 if held & 3072 else 1 << 21 if os.statvfs(target).f_flag & 4096 else 0))
        os.close(source)
    for path, leads_to in linked.items():
        os.symlink(leads_to, _NEW_ROOT + path)
    os.makedirs(_NEW_ROOT + private, exist_ok=True)
    os.chdir(_NEW_ROOT)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount("none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
