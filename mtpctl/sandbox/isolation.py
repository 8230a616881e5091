"""Isolation of model-written code: a system call filter, and either namespaces with a root that contains only the interpreter, or Landlock.

Landlock restricts a process to reading some directories. It needs no privileges, and kernel 5.13 or newer. The existence, size and owner
of other files remain visible.

The filter is an allow-list of the calls that Python needs. It excludes, for example, sockets, exec, fork, kill of another process,
ptrace, mount, bpf, keyrings, io_uring, user namespaces, memfd, System V shared memory, and changes of owners and permissions. A refused
call fails with EPERM (EACCES for `open` and `openat`); a call newer than the list fails with ENOSYS, so that the C library falls back to
an older one. Calls of another architecture (32-bit code) kill the process. A filter sees the integer arguments of a call, but not the
memory that pointers refer to, so paths are restricted by Landlock or mounts.

Functions raise OSError on failure.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import sysconfig
from dataclasses import dataclass
from errno import EACCES, ENOSYS, EPERM
from typing import Literal

Mechanism = Literal["namespaces", "user namespaces", "bubblewrap", "landlock", "closed", "none"]
MECHANISMS_BY_STRENGTH: tuple[Mechanism, ...] = ("namespaces", "user namespaces", "bubblewrap", "landlock", "closed")
"""Isolation mechanisms, strongest first. `closed`: the system call filter forbids opening files."""

_NEW_ROOT = "/tmp"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", *_DEVICES)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file access rights of each Landlock version. A ruleset revokes all of them, except where its rules grant them."""
_READ_FILE, _READ_DIRECTORY, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_TCP_RIGHTS = 3
_SCOPES = 3
"""Scopes that block abstract unix sockets and signals of processes outside the sandbox."""


def readable_paths() -> list[str]:
    """Paths that a sandboxed process may read: standard library, packages, shared libraries, time zones and three devices.

    No path contains another.
    """
    python = sysconfig.get_paths()
    paths = {python[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")} | {f"{sys.base_prefix}/lib", *_SYSTEM_PATHS}
    # If /lib is a link to /usr/lib, the new root gets the same link (`library_links`).
    existing = sorted(os.path.normpath(path) for path in paths if os.path.exists(path) and path not in library_links())
    outermost: list[str] = []
    for path in existing:
        if not outermost or os.path.commonpath([outermost[-1], path]) != outermost[-1]:
            outermost.append(path)
    return outermost


def library_links() -> dict[str, str]:
    """The targets of /lib and /lib64, if they are symbolic links."""
    return {path: os.readlink(path) for path in ("/lib", "/lib64") if os.path.islink(path)}


def prepare_isolation(mechanism: Mechanism) -> int:
    """Enter the namespaces, or create Landlock's rules. Returns the descriptor of these rules, or -1 with other mechanisms.

    With namespaces this forks, and returns in the child, which is process 1 of the new namespace. The caller's process waits for the child
    and exits with its exit code. Landlock's rules take effect in each process that calls `apply_landlock_rules`. Other mechanisms need
    no preparation. Raises OSError if the kernel or container does not allow it.
    """
    if mechanism in ("namespaces", "user namespaces"):
        _unshare(new_user=mechanism == "user namespaces")
        _build_root()
    return create_landlock_rules(readable_paths()) if mechanism == "landlock" else -1


def scratch_path() -> str:
    """The private directory of a sandboxed process: /tmp, or /scratch if the interpreter itself is below /tmp."""
    return "/scratch" if any(path.startswith("/tmp/") for path in readable_paths()) else "/tmp"


def mount_scratch(megabytes: int) -> None:
    """Mount an empty directory of this size at `scratch_path`. Only this process sees it, and it disappears when the process ends."""
    os.unshare(os.CLONE_NEWNS)
    options = f"size={megabytes}m,nr_inodes={64 * megabytes},mode=0777"
    mount("tmpfs", scratch_path(), "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


def create_landlock_rules(paths: list[str]) -> int:
    """Create Landlock rules that only allow reading below `paths`, and return their descriptor. Raises OSError without Landlock."""
    try:
        version = system_call(_CREATE_RULESET, 0, 0, 1)
    except OSError:
        version = 0
    rights = _RIGHTS_BY_VERSION[min(max(version, 1), 5)]
    handled = [rights]
    if version >= 4:
        handled.append(_TCP_RIGHTS)
    if version >= 6:
        handled.append(_SCOPES)
    attributes = struct.pack(f"<{len(handled)}Q", *handled)
    rules = system_call(_CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    for path in paths:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        path_rights = _READ_FILE | _EXECUTE | (_READ_DIRECTORY if os.path.isdir(path) else 0)
        system_call(_ADD_RULE, rules, 1, ctypes.c_char_p(struct.pack("<Qi", path_rights, descriptor)), 0)
        os.close(descriptor)
    return rules


def apply_landlock_rules(rules: int) -> None:
    """Apply Landlock's rules to this process. Requires `no_new_privileges`. Raises OSError on failure."""
    system_call(_RESTRICT_SELF, rules, 0)


def _unshare(*, new_user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWPID
    os.unshare(flags | (os.CLONE_NEWUSER if new_user else 0))
    if new_user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    # The fork is process 1 of the new namespace. When it ends, the kernel kills all other processes of the namespace.
    if pid := os.fork():
        os.closerange(0, 1 << 16)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the fork is killed when its parent ends


def _mount_points_below(folder: str) -> list[str]:
    """The mount points below a folder. A bind mount copies them, but a remount changes only the outermost one."""
    points = []
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            point = line.split()[4]
            for escaped, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                point = point.replace(escaped, character)
            points.append(point)
    return [point for point in points if point.startswith(f"{folder}/")]


def _make_read_only(mount_point: str, flags: int) -> None:
    """Remount read-only and without setuid programs, with additional `flags`."""
    # A remount must repeat the flags of a mount from another user namespace. `statvfs` returns them as MS_* flags, except for relatime.
    current = os.statvfs(mount_point).f_flag
    locked = current & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    relatime = MS_RELATIME if current & ST_RELATIME and not locked & (MS_NOATIME | MS_NODIRATIME) else 0
    mount("none", mount_point, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags | locked | relatime)


def _build_root() -> None:
    """Replace the root by a tmpfs with bind mounts of the `readable_paths`. It has no /proc and no /sys."""
    sources = [(path, os.open(path, os.O_PATH)) for path in readable_paths()]  # the new root may be mounted over some of them
    symlinks, scratch = library_links(), scratch_path()
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", _NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    for path, source in sources:
        target = _NEW_ROOT + path
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{source}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{source}", target, "", MS_BIND | MS_REC)
        for mount_point in [target, *_mount_points_below(target)]:
            _make_read_only(mount_point, 0 if path in _DEVICES else MS_NODEV)
        os.close(source)
    for path, link_target in symlinks.items():
        os.symlink(link_target, _NEW_ROOT + path)
    os.makedirs(_NEW_ROOT + scratch, exist_ok=True)
    os.chdir(_NEW_ROOT)
    pivot_root(".", ".")
    unmount(".")
    os.chdir("/")
    mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


ARCHITECTURE = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}.get(platform.machine(), "")
"""The processor architecture; empty if the sandbox does not support it."""

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOATIME, MS_NODIRATIME, MS_RELATIME, ST_RELATIME = 1024, 2048, 1 << 21, 4096
MNT_DETACH = 2

PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}

LIBC = ctypes.CDLL(None, use_errno=True)


class FilterProgram(ctypes.Structure):
    """A seccomp filter as `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def system_call(number: int, *arguments: object) -> int:
    ctypes.set_errno(0)
    result: int = LIBC.syscall(
        ctypes.c_long(number), *(ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    )
    return _check_result(result, f"system call {number}")


def prctl(option: int, *arguments: object) -> int:
    """`prctl(2)` with up to four arguments."""
    padded = [ctypes.c_ulong(argument) if isinstance(argument, int) else argument for argument in (*arguments, 0, 0, 0, 0)[:4]]
    ctypes.set_errno(0)
    return _check_result(int(LIBC.prctl(option, *padded)), f"prctl {option}")


def mount(source: str, target: str, filesystem: str, flags: int, options: str = "") -> None:
    ctypes.set_errno(0)
    result: int = LIBC.mount(source.encode(), target.encode(), filesystem.encode(), ctypes.c_ulong(flags), options.encode())
    _check_result(result, f"mount {target}")


def unmount(target: str) -> None:
    """`umount2(2)` with MNT_DETACH: detach a mount immediately."""
    ctypes.set_errno(0)
    _check_result(int(LIBC.umount2(target.encode(), MNT_DETACH)), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    system_call(PIVOT_ROOT[ARCHITECTURE], new.encode(), old.encode())


def drop_capabilities() -> None:
    """Drop all capabilities permanently, including those of programs started later."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    system_call(CAPSET[ARCHITECTURE], ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def no_new_privileges() -> None:
    """Set `no_new_privs`, which a process needs to filter its own system calls."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Install a seccomp filter for this process and its future threads."""
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(FilterProgram(len(program) // 8, program)))


def _check_result(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


assert sys.byteorder == "little" or not ARCHITECTURE, (
    "filters read the low 32 bits of an argument at the offset of the argument, which is right on little-endian machines only"
)


FileAccess = Literal["mounts", "landlock", "closed"]
"""File access of a sandboxed process: a private file system, the paths that Landlock allows, or none."""

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
"""Opcodes of classic BPF. Comparisons are jumps."""
_FIRST_UNIFIED_NUMBER = 424
"""First system call number that is equal on all architectures. From here, calls that are not listed fail with ENOSYS."""

# fmt: off
_X86_64 = {
    "read": 0, "write": 1, "readv": 19, "writev": 20, "pread64": 17, "pwrite64": 18, "preadv": 295, "pwritev": 296, "lseek": 8, "close": 3,
    "close_range": 436, "dup": 32, "dup2": 33, "dup3": 292, "pipe": 22, "pipe2": 293, "flock": 73, "fsync": 74, "fdatasync": 75,
    "ftruncate": 77, "fadvise64": 221, "stat": 4, "fstat": 5, "lstat": 6, "newfstatat": 262, "statx": 332, "statfs": 137, "fstatfs": 138,
    "access": 21, "faccessat": 269, "getdents": 78, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81, "readlink": 89,
    "readlinkat": 267, "umask": 95, "poll": 7, "ppoll": 271, "select": 23, "pselect6": 270, "epoll_create1": 291, "epoll_ctl": 233,
    "epoll_wait": 232, "epoll_pwait": 281, "eventfd2": 290, "recvfrom": 45, "shutdown": 48, "getsockopt": 55, "getsockname": 51,
    "getpeername": 52, "mmap": 9, "munmap": 11, "mprotect": 10, "mremap": 25, "madvise": 28, "brk": 12, "msync": 26, "mincore": 27,
    "membarrier": 324, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "pause": 34, "alarm": 37, "setitimer": 38, "getitimer": 36, "nanosleep": 35,
    "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229, "gettimeofday": 96, "time": 201, "times": 100, "getrusage": 98,
    "sysinfo": 99, "uname": 63, "getpid": 39, "getppid": 110, "gettid": 186, "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108,
    "getgroups": 115, "getpgrp": 111, "getresuid": 118, "getresgid": 120, "getcpu": 309, "getrandom": 318, "sched_yield": 24,
    "sched_getaffinity": 204, "set_tid_address": 218, "set_robust_list": 273, "rseq": 334, "futex": 202, "arch_prctl": 158, "exit": 60,
    "exit_group": 231, "restart_syscall": 219, "getrlimit": 97, "setrlimit": 160, "wait4": 61, "waitid": 247,
    # only with a private file system
    "mkdir": 83, "mkdirat": 258, "rmdir": 84, "unlink": 87, "unlinkat": 263, "rename": 82, "renameat": 264, "renameat2": 316,
    "truncate": 76, "fallocate": 285,
    # only with some arguments
    "open": 2, "openat": 257, "kill": 62, "tgkill": 234, "clone": 56, "prlimit64": 302, "fcntl": 72, "ioctl": 16, "prctl": 157,
    "socketpair": 53, "sendto": 44,
}
_AARCH64 = {
    "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "preadv": 69, "pwritev": 70, "lseek": 62,
    "close": 57, "close_range": 436, "dup": 23, "dup3": 24, "pipe2": 59, "flock": 32, "fsync": 82, "fdatasync": 83, "ftruncate": 46,
    "fadvise64": 223, "fstat": 80, "newfstatat": 79, "statx": 291, "statfs": 43, "fstatfs": 44, "faccessat": 48, "getdents64": 61,
    "getcwd": 17, "chdir": 49, "fchdir": 50, "readlinkat": 78, "umask": 166, "ppoll": 73, "pselect6": 72, "epoll_create1": 20,
    "epoll_ctl": 21, "epoll_pwait": 22, "eventfd2": 19, "recvfrom": 207, "shutdown": 210, "getsockopt": 209, "getsockname": 204,
    "getpeername": 205, "mmap": 222, "munmap": 215, "mprotect": 226, "mremap": 216, "madvise": 233, "brk": 214, "msync": 227,
    "mincore": 232, "membarrier": 283, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "rt_sigpending": 136,
    "rt_sigtimedwait": 137, "rt_sigsuspend": 133, "sigaltstack": 132, "setitimer": 103, "getitimer": 102, "nanosleep": 101,
    "clock_nanosleep": 115, "clock_gettime": 113, "clock_getres": 114, "gettimeofday": 169, "times": 153, "getrusage": 165, "sysinfo": 179,
    "uname": 160, "getpid": 172, "getppid": 173, "gettid": 178, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177,
    "getgroups": 158, "getresuid": 148, "getresgid": 150, "getcpu": 168, "getrandom": 278, "sched_yield": 124, "sched_getaffinity": 123,
    "set_tid_address": 96, "set_robust_list": 99, "rseq": 293, "futex": 98, "exit": 93, "exit_group": 94, "restart_syscall": 128,
    "getrlimit": 163, "setrlimit": 164, "wait4": 260, "waitid": 95,
    "mkdirat": 34, "unlinkat": 35, "renameat": 38, "renameat2": 276, "truncate": 45, "fallocate": 47,
    "openat": 56, "kill": 129, "tgkill": 131, "clone": 220, "prlimit64": 261, "fcntl": 25, "ioctl": 29, "prctl": 167, "socketpair": 199,
    "sendto": 206,
}
# fmt: on
_WRITING_CALLS = {"mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2", "truncate", "fallocate"}

_THREAD_FLAGS = 0x00010000 | 0x00000100
"""CLONE_THREAD and CLONE_VM: a thread instead of a process."""
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Allowed commands of fcntl. F_SETOWN and F_SETSIG are excluded, because they make the kernel signal another process."""
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed requests of ioctl: terminal check and size, bytes available, blocking mode, inheritance."""
_PRCTL_THREAD_NAME = (15, 16)
_AF_UNIX = 1
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class _Rule:
    """Condition for a system call: its argument is one of `values`, has all or none of the bits of `values[0]`, or is NULL."""

    argument: int
    kind: Literal["one of", "all of", "none of", "null"]
    values: tuple[int, ...] = ()
    error: int = EPERM


def build_filter(pid: int, files: FileAccess) -> bytes:
    """The filter as classic BPF instructions of 8 bytes. `pid`: the filtered process, which may signal only itself."""
    numbers = _X86_64 if ARCHITECTURE == "x86_64" else _AARCH64
    rules = {
        "kill": _Rule(0, "one of", (pid,)),
        "tgkill": _Rule(0, "one of", (pid,)),
        "clone": _Rule(0, "all of", (_THREAD_FLAGS,)),
        "prlimit64": _Rule(0, "one of", (0,)),
        "fcntl": _Rule(1, "one of", _FCNTL_COMMANDS),
        "ioctl": _Rule(1, "one of", _IOCTL_REQUESTS),
        "prctl": _Rule(0, "one of", _PRCTL_THREAD_NAME),
        "socketpair": _Rule(0, "one of", (_AF_UNIX,)),
        "sendto": _Rule(4, "null"),
    }
    if files == "landlock":
        rules |= {"open": _Rule(1, "none of", (_WRITE_FLAGS,), EACCES), "openat": _Rule(2, "none of", (_WRITE_FLAGS,), EACCES)}
    elif files == "closed":
        rules |= {name: _Rule(0, "one of", (), EACCES) for name in ("open", "openat")}
    refused_calls = frozenset() if files == "mounts" else frozenset(_WRITING_CALLS)
    instructions = [_load(4), _jump(_EQUAL, _AUDIT_ARCHITECTURE[ARCHITECTURE], 1, 0), _return(_KILL), _load(0)]
    if ARCHITECTURE == "x86_64":
        instructions += [_jump(_AT_LEAST, 0x40000000, 0, 1), _return(_KILL)]  # calls of the x32 ABI
    for name, number in numbers.items():
        if name in refused_calls:
            continue
        rule = rules.get(name)
        check = [_return(_ALLOW)] if rule is None else _check_argument(rule)
        instructions += [_jump(_EQUAL, number, 0, len(check)), *check]
    instructions += [_jump(_AT_LEAST, _FIRST_UNIFIED_NUMBER, 0, 1), _return(_ERRNO | ENOSYS), _return(_ERRNO | EPERM)]
    return b"".join(instructions)


def _check_argument(rule: _Rule) -> list[bytes]:
    offset = 16 + 8 * rule.argument
    refuse, allow = _return(_ERRNO | rule.error), _return(_ALLOW)
    if rule.kind == "null":
        return [_load(offset), _jump(_EQUAL, 0, 0, 2), _load(offset + 4), _jump(_EQUAL, 0, 1, 0), refuse, allow]
    if rule.kind == "one of":
        last = len(rule.values) - 1
        comparisons = [_jump(_EQUAL, value, last - index + 1, 0) for index, value in enumerate(rule.values)]
        return [_load(offset), *comparisons, refuse, allow]
    expected = rule.values[0] if rule.kind == "all of" else 0
    return [_load(offset), struct.pack("<HBBI", _AND, 0, 0, rule.values[0]), _jump(_EQUAL, expected, 1, 0), refuse, allow]


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", _LOAD, 0, 0, offset)


def _jump(opcode: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("<HBBI", opcode, if_true, if_false, value & 0xFFFFFFFF)


def _return(value: int) -> bytes:
    return struct.pack("<HBBI", _RETURN, 0, 0, value)
