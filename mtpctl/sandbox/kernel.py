"""System calls that Python does not provide. All functions raise OSError on failure."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

MACHINE = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}.get(platform.machine(), "")
"""The processor, if its system call numbers are known here; otherwise the sandbox does not work."""

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}

LIBC = ctypes.CDLL(None, use_errno=True)


class FilterProgram(ctypes.Structure):
    """A seccomp filter as `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def call(number: int, *arguments: object) -> int:
    """System call by number."""
    ctypes.set_errno(0)
    result: int = LIBC.syscall(ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    return _checked(result, f"system call {number}")


def prctl(option: int, *arguments: object) -> int:
    """`prctl(2)` with up to four arguments."""
    filled = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in (*arguments, 0, 0, 0, 0)[:4]]
    ctypes.set_errno(0)
    return _checked(int(LIBC.prctl(option, *filled)), f"prctl {option}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """`mount(2)`."""
    ctypes.set_errno(0)
    result: int = LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(result, f"mount {target}")


def unmount(target: str) -> None:
    """`umount2(2)` with MNT_DETACH: hide a mount at once."""
    ctypes.set_errno(0)
    _checked(int(LIBC.umount2(target.encode(), MNT_DETACH)), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """`pivot_root(2)`."""
    call(PIVOT_ROOT[MACHINE], new.encode(), old.encode())


def drop_capabilities() -> None:
    """Drop all capabilities permanently, including those of programs started later."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    call(CAPSET[MACHINE], ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def no_new_privileges() -> None:
    """Set `no_new_privs`, which a process needs to filter its own system calls."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Install a seccomp filter for this process and its future threads."""
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(FilterProgram(len(program) // 8, program)))


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


assert sys.byteorder == "little" or not MACHINE, "filters read the low half of an argument first"
