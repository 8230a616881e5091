"""File system isolation of the zygote: namespaces with a root that contains only the interpreter, or Landlock.

Landlock restricts a process to reading some directories. It needs no privileges, and kernel 5.13 or newer. It does not hide the existence,
size and owner of other files.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig
from typing import Literal

from mtpctl.sandbox import kernel

Mechanism = Literal["namespaces", "user namespaces", "bubblewrap", "landlock", "closed", "none"]
ORDER: tuple[Mechanism, ...] = ("namespaces", "user namespaces", "bubblewrap", "landlock", "closed")
"""Isolation mechanisms, best first. `closed`: the system call filter allows no file to be opened."""

_NEW_ROOT = "/tmp"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", *_DEVICES)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file access rights of each Landlock version. A ruleset revokes them, except those that its rules grant."""
_READ_FILE, _READ_DIRECTORY, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_TCP = 3
_SCOPES = 3
"""Scopes that block abstract unix sockets and signals of processes outside the sandbox."""


def readable() -> list[str]:
    """Paths that a run may read: standard library, packages, shared libraries, time zones and three devices. No path contains another."""
    python = sysconfig.get_paths()
    paths = {python[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")} | {f"{sys.base_prefix}/lib", *_SYSTEM}
    # If /lib is a link to /usr/lib, the new root gets the same link (`links`).
    existing = sorted(os.path.normpath(path) for path in paths if os.path.exists(path) and path not in links())
    outermost: list[str] = []
    for path in existing:
        if not outermost or os.path.commonpath([outermost[-1], path]) != outermost[-1]:
            outermost.append(path)
    return outermost


def links() -> dict[str, str]:
    """Library directories at the root that are links, with their targets."""
    return {path: os.readlink(path) for path in ("/lib", "/lib64") if os.path.islink(path)}


def enter(mechanism: Mechanism) -> int:
    """Isolate this process. Returns the descriptor of Landlock's rules, or -1 with other mechanisms.

    With namespaces this process becomes process 1 of its namespace, and its parent waits for it. Raises OSError if the kernel or
    container does not allow it.
    """
    if mechanism in ("namespaces", "user namespaces"):
        _unshare(own_user=mechanism == "user namespaces")
        _build_root()
    return landlock_rules(readable()) if mechanism == "landlock" else -1


def scratch() -> str:
    """The private directory of a run: /tmp, or /scratch if the interpreter itself is below /tmp."""
    return "/scratch" if any(path.startswith("/tmp/") for path in readable()) else "/tmp"


def mount_scratch(megabytes: int) -> None:
    """Mount an empty directory of this size at `scratch`. Only this process sees it, and it disappears when the process ends."""
    os.unshare(os.CLONE_NEWNS)
    options = f"size={megabytes}m,nr_inodes={64 * megabytes},mode=0777"
    kernel.mount("tmpfs", scratch(), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)


def landlock_rules(paths: list[str]) -> int:
    """Create Landlock rules that only allow reading below `paths`, and return their descriptor. Raises OSError without Landlock."""
    try:
        version = kernel.call(_CREATE_RULESET, 0, 0, 1)
    except OSError:
        version = 0
    rights = _RIGHTS_BY_VERSION[min(max(version, 1), 5)]
    attributes = struct.pack("<QQQ", rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = kernel.call(_CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    for path in paths:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | _EXECUTE | (_READ_DIRECTORY if os.path.isdir(path) else 0)
        kernel.call(_ADD_RULE, rules, 1, ctypes.c_char_p(struct.pack("<Qi", allowed, descriptor)), 0)
        os.close(descriptor)
    return rules


def restrict(rules: int) -> None:
    """Apply Landlock's rules to this process. Requires `no_new_privileges`. Raises OSError on failure."""
    kernel.call(_RESTRICT_SELF, rules, 0)


def _unshare(*, own_user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWPID
    os.unshare(flags | (os.CLONE_NEWUSER if own_user else 0))
    if own_user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    # The fork is process 1 of the new namespace. When it ends, the kernel kills all other processes of the namespace.
    if pid := os.fork():
        os.closerange(0, 1 << 16)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(1, 9)  # PR_SET_PDEATHSIG: killed with the process that waits


def _build_root() -> None:
    """Replace the root by a tmpfs into which the `readable` paths are bound. It has no /proc and no /sys."""
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
        # A mount from another user namespace must keep its flags. Most ST_* flags have the values of MS_*.
        flags = os.statvfs(target).f_flag
        locked = flags & (kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | 1024 | 2048)
        relatime = 0 if locked & 3072 else 1 << 21 if flags & 4096 else 0
        device = 0 if path in _DEVICES else kernel.MS_NODEV
        readonly = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
        kernel.mount("none", target, "", readonly | device | locked | relatime)
        os.close(source)
    for path, link_target in linked.items():
        os.symlink(link_target, _NEW_ROOT + path)
    os.makedirs(_NEW_ROOT + private, exist_ok=True)
    os.chdir(_NEW_ROOT)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount("none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
