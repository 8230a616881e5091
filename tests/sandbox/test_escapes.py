"""Attempts to escape from the sandbox, each with every isolation mechanism of this machine.

An attempt is a program that prints `reached` if it escapes. It prints `tried` at the end, so that a program that
fails for another reason is noticed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mtpctl.sandbox.isolation import Mechanism, scratch_path
from mtpctl.sandbox.sandbox import Sandbox
from mtpctl.sandbox.session import Limits, Result

BRIEF = Limits(cpu_s=2.0, wall_s=8.0)


def attempt(sandbox: Sandbox, *lines: str, limits: Limits = BRIEF) -> Result:
    """Run each line separately, so that a failure does not prevent the next one."""
    tries = "".join(
        f"try:\n    {line}\n    print('reached', {number})\nexcept (OSError, RuntimeError) as error: print(error)\n"
        for number, line in enumerate(lines)
    )
    result = sandbox.run(f"import ctypes, os, signal, socket, sys, time\n{tries}print('tried')", limits=limits)
    assert "reached" not in result.stdout
    assert result.stdout.endswith("tried\n"), result
    return result


def test_files_outside_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("of the caller")
    for path in ("/etc/passwd", "/etc/hostname", "/root/.bashrc", str(tmp_path / "own.txt"), __file__, "/proc/version", "/sys/kernel/mm"):
        attempt(
            sandbox,
            f"open({path!r}).read()",
            f"os.open({path!r}, os.O_RDONLY)",
            f"os.open('/tmp/../' + {path!r}, os.O_RDONLY)",
        )
    attempt(sandbox, *(f"os.listdir({folder!r})" for folder in ("/home", "/proc", "/sys", "/run", str(tmp_path))))


def test_files_outside_the_private_directory_cannot_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    (tmp_path / "file").write_text("unchanged")
    os.chmod(tmp_path / "file", 0o666)
    target, existing = str(tmp_path / "new"), str(tmp_path / "file")
    library = os.__file__
    attempt(
        sandbox,
        f"open({target!r}, 'w')",
        f"os.mkdir({target!r})",
        f"open({existing!r}, 'a')",
        f"os.open({existing!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.truncate({existing!r}, 0)",
        f"os.unlink({existing!r})",
        f"os.rename({existing!r}, {target!r})",
        f"os.chmod({existing!r}, 0)",
        f"os.utime({existing!r}, (0, 0))",
        f"os.setxattr({existing!r}, 'user.x', b'1')",
        f"os.link({existing!r}, {target!r})",
        f"os.symlink('/etc', {target!r})",
        f"open({library!r}, 'a')",
        f"os.unlink({library!r})",
        "open('/here', 'w')",
        "open('/dev/shm/here', 'w')",
        "os.mknod('/tmp/device', 0o600 | 0o020000, os.makedev(1, 1))",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert (tmp_path / "file").read_text() == "unchanged"


def test_link_in_the_private_directory_does_not_lead_outside(sandbox: Sandbox) -> None:
    attempt(
        sandbox,
        "os.symlink('/etc/passwd', '/tmp/link'); open('/tmp/link').read()",
        "os.symlink('/proc/1/root', '/tmp/root'); os.listdir('/tmp/root')",
        "os.chdir('/tmp'); os.chroot('.')",
        "open('/proc/self/root/etc/passwd')",
        "open('/tmp/../../../etc/passwd')",
    )


def test_private_directory_is_empty_at_first_and_limited(sandbox: Sandbox, mechanism: Mechanism) -> None:
    if mechanism not in ("namespaces", "user namespaces"):
        attempt(sandbox, "open('/tmp/x', 'w')")
        return
    directory = scratch_path()
    fill = f"""
import os
print(os.listdir({directory!r}))
total = 0
try:
    for n in range(1000):
        total += open(f'{directory}/{{n}}', 'wb').write(bytes(1 << 20))
except OSError as error:
    print(error)
print(total >> 20)
"""
    for _ in range(2):
        empty, error, written = sandbox.run(fill, limits=Limits(tmp_mb=8)).stdout.splitlines()
        assert (empty, "No space" in error) == ("[]", True)
        assert 6 <= int(written) <= 8


def test_there_is_no_network(sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local, socket.socket(socket.AF_UNIX) as abstract:
        path, name = str(tmp_path / "socket"), f"\0mtpctl-test-{os.getpid()}"
        local.bind(path)
        os.chmod(path, 0o777)
        local.listen()
        abstract.bind(name)
        abstract.listen()
        attempt(
            sandbox,
            f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 1)",
            "socket.create_connection(('1.1.1.1', 53), 1)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
            f"socket.socket(socket.AF_UNIX).connect({path!r})",
            f"socket.socket(socket.AF_UNIX).connect({name!r})",
            f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {path!r})",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
            "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
            "socket.create_server(('127.0.0.1', 0))",
            "socket.getaddrinfo('example.org', 80)",
        )


def test_processes_and_programs_cannot_be_started(sandbox: Sandbox) -> None:
    attempt(
        sandbox,
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/sh', ['sh'], {})",
        "os.execv('/bin/sh', ['sh', '-c', 'echo reached'])",
        "os.execv(sys.executable, [sys.executable, '-c', 'print(\"reached\")'])",
        "__import__('subprocess').run(['/bin/sh', '-c', 'echo reached'])",
        "__import__('multiprocessing').Process(target=print, args=('reached',)).start()",
    )
    assert sandbox.run("import os; print(os.system('echo reached'))", limits=BRIEF).stdout in ("-1\n", "32512\n", "65280\n")


def test_fork_bomb_and_daemon_cannot_fork(sandbox: Sandbox) -> None:
    before = children(sandbox)
    bomb = """
import os
count = 0
for _ in range(1000):
    try:
        if os.fork() == 0: os.setsid(); os.fork()
        count += 1
    except OSError: pass
print(count)
"""
    assert sandbox.run(bomb, limits=BRIEF).stdout == "0\n"
    raw = """
import ctypes
libc = ctypes.CDLL(None)
numbers = {'x86_64': (57, 58, 56, 435), 'aarch64': (220, 435)}[__import__('platform').machine()]
print([libc.syscall(n, 17, 0, 0, 0, 0) for n in numbers])
"""
    assert set(eval(sandbox.run(raw, limits=BRIEF).stdout)) == {-1}
    assert children(sandbox) == before


def test_threads_are_limited_in_number_or_by_memory(sandbox: Sandbox) -> None:
    code = """
import threading, time
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except (RuntimeError, MemoryError): print(count, flush=True)
__import__('os')._exit(0)
"""
    result = sandbox.run(code, limits=Limits(cpu_s=5, memory_mb=512, threads=16))
    assert int(result.stdout) < 100
    if sandbox.mechanism() == "namespaces":
        assert int(result.stdout) < 16


def test_memory_is_limited(sandbox: Sandbox) -> None:
    greedy = sandbox.run("x = []\nwhile True: x.append(bytearray(1 << 24))", limits=Limits(memory_mb=128))
    assert greedy.stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") and not greedy.ok
    mapped = "import mmap, os\ntry:\n    m = mmap.mmap(-1, 1 << 30)\n    print('mapped')\nexcept (OSError, MemoryError): print('refused')"
    assert sandbox.run(mapped, limits=Limits(memory_mb=128)).stdout == "refused\n"
    raised = """
import resource
try: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); print('raised')
except (OSError, ValueError): print('refused')
"""
    assert sandbox.run(raised).stdout == "refused\n"


def test_shared_memory_cannot_be_created(sandbox: Sandbox) -> None:
    attempt(
        sandbox, "os.memfd_create('x')", "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory(create=True, size=4096)"
    )


def test_proc_shows_no_other_process(sandbox: Sandbox) -> None:
    os.environ["MTPCTL_TEST_SECRET"] = "of the caller"
    try:
        for pid in (os.getpid(), os.getppid(), 1, "self"):
            attempt(sandbox, *(f"open('/proc/{pid}/{name}', 'rb').read(1)" for name in ("environ", "mem", "maps", "cmdline", "status")))
        attempt(sandbox, "os.listdir('/proc')[0]", "os.readlink(f'/proc/{os.getppid()}/cwd')", "os.listdir(f'/proc/{os.getppid()}/fd')")
    finally:
        del os.environ["MTPCTL_TEST_SECRET"]


def test_environment_of_the_caller_is_not_visible(sandbox: Sandbox) -> None:
    with Sandbox(only=sandbox.mechanism()) as fresh:
        os.environ["MTPCTL_TEST_SECRET"] = "of the caller"
        try:
            program = "import os, ctypes\nprint(dict(os.environ), ctypes.CDLL(None).getenv(b'MTPCTL_TEST_SECRET'))"
            result = fresh.run(program)
        finally:
            del os.environ["MTPCTL_TEST_SECRET"]
        assert "of the caller" not in result.stdout and result.stdout.endswith(" 0\n")


def test_no_descriptor_is_inherited(sandbox: Sandbox) -> None:
    inheritable, other = os.pipe()
    os.set_inheritable(inheritable, True)
    try:
        with Sandbox(only=sandbox.mechanism()) as fresh:
            listed = "import os\nfor n in range(4096):\n    try: os.fstat(n); print(n)\n    except OSError: pass"
            assert fresh.run(listed).stdout.split() == ["0", "1", "2"]
    finally:
        os.close(inheritable)
        os.close(other)


def test_no_other_process_can_be_signalled_or_traced(sandbox: Sandbox) -> None:
    before = zygote(sandbox)
    mine, parent = os.getpid(), before.pid
    pids = (mine, parent, -1, 0, 1, 2)
    attempt(
        sandbox,
        *(f"os.kill({pid}, {number})" for pid in pids for number in (0, 9)),
        "os.kill(os.getppid(), 9)",
        "os.killpg(os.getpgid(0), 9)",
        f"os.pidfd_open({mine})",
        "os.pidfd_open(1)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "__import__('resource').prlimit(1, __import__('resource').RLIMIT_CPU, (1, 1))",
        "__import__('fcntl').fcntl(0, 8, 1)",
        "os.sched_setaffinity(1, [0])",
    )
    assert zygote(sandbox) == before and before.is_running()


REFUSED = {
    # name: (x86_64, aarch64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "socket": (41, 198),
    "connect": (42, 203),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "execve": (59, 221),
    "execveat": (322, 281),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "io_uring_setup": (425, 425),
    "pidfd_open": (434, 434),
    "clone3": (435, 435),
    "openat2": (437, 437),
    "pidfd_getfd": (438, 438),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "personality": (135, 92),
    "setuid": (105, 146),
    "capset": (126, 91),
    "seccomp": (317, 277),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "settimeofday": (170, 170),
    "syslog": (103, 116),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
}


def test_raw_system_calls_are_refused(sandbox: Sandbox) -> None:
    index = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: pair[index] for name, pair in REFUSED.items()}
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers}.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    print(name, result, ctypes.get_errno())
"""
    lines = [line.split() for line in sandbox.run(code).stdout.splitlines()]
    assert [name for name, *_ in lines] == list(REFUSED)
    assert [name for name, result, error in lines if result != "-1" or error not in ("1", "38")] == []  # EPERM, ENOSYS


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 and 32-bit calls are those of x86-64")
@pytest.mark.parametrize("code", [bytes.fromhex("b827000040 0f05 c3"), bytes.fromhex("b814000000 cd80 c3")], ids=["x32", "32 bit"])
def test_system_calls_of_another_abi_kill_the_process(sandbox: Sandbox, code: bytes) -> None:
    program = f"""
import ctypes, mmap
m = mmap.mmap(-1, 4096, prot=7)
m.write({code!r})
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()
print('reached')
"""
    result = sandbox.run(program)
    assert result.exit == -31 and "reached" not in result.stdout  # SIGSYS


def test_program_that_ignores_signals_is_killed_in_time(sandbox: Sandbox) -> None:
    began, before = time.monotonic(), children(sandbox)
    deaf = "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    for ending in (
        "while True: pass",
        "import time\nwhile True: time.sleep(9)",
        "import threading\nfor _ in range(4): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    ):
        result = sandbox.run(deaf + ending, limits=Limits(cpu_s=60, wall_s=0.5))
        assert result.timed_out and not result.ok
    assert time.monotonic() - began < 60
    assert children(sandbox) == before


def test_cpu_time_is_limited_independently_of_the_clock(sandbox: Sandbox) -> None:
    busy = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    result = sandbox.run(busy, limits=Limits(cpu_s=1, wall_s=200))
    assert result.timed_out and result.cpu_s < 4


def test_endless_output_ends_the_run(sandbox: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 100000)", limits=Limits(cpu_s=60, output_bytes=1 << 16))
        assert result.too_much_output and not result.ok
        assert len(result.stdout) + len(result.stderr) == 1 << 16


def test_runs_end_with_the_caller(best: Sandbox) -> None:
    """The caller's end of the request socket is closed however the caller ends."""
    with Sandbox(only=best.mechanism()) as doomed:
        process = doomed.start({"kind": "program", "code": "import time\ntime.sleep(600)"}, Limits(wall_s=600))
        all_of_them = [zygote(doomed), *zygote(doomed).children(recursive=True)]
        while len(all_of_them) < 2 or not process._open_pipes:
            all_of_them = [zygote(doomed), *zygote(doomed).children(recursive=True)]
        assert doomed._control is not None
        doomed._control.close()
        _, alive = psutil.wait_procs(all_of_them, timeout=20)
        assert alive == []
        process.close()


def test_killed_zygote_ends_its_runs_and_is_replaced(best: Sandbox) -> None:
    with Sandbox(only=best.mechanism()) as box:
        session = box.session(Limits(wall_s=30))
        session.run("x = 1")
        family = zygote(box).children(recursive=True)
        zygote(box).kill()
        _, alive = psutil.wait_procs(family, timeout=20)
        assert alive == []
        assert session.run("x").ended
        assert box.run("print(2)").stdout == "2\n"
        session.close()


def test_run_cannot_see_data_of_another(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.run("open('/tmp/left', 'w').write('secret')" if sandbox.mechanism() in ("namespaces", "user namespaces") else "0")
    session.run("secret = 'SECRET-' + 'OF-ANOTHER'")
    seek = """
import gc, os
texts = [value for each in gc.get_objects() if isinstance(each, dict) for value in list(each.values()) if isinstance(value, str)]
print(os.path.exists('/tmp/left'), any('SECRET-' + 'OF-ANOTHER' in text for text in texts))
"""
    assert sandbox.run(seek).stdout == "False False\n"
    session.close()


def test_zygote_stores_neither_code_nor_input_of_a_run(sandbox: Sandbox) -> None:
    """Every fork has the zygote's memory, so data of one run would be visible to the next."""
    sandbox.run("first = 'marker-of-a-run'", stdin="marker-of-an-input")
    seek = """
import ctypes, gc
words = [b'marker-of-' + b'a-run', b'marker-of-' + b'an-input']
print([any(w.decode() in o for o in gc.get_objects() if isinstance(o, (str, dict, list))) for w in words])
"""
    assert sandbox.run(seek).stdout == "[False, False]\n"


def zygote(sandbox: Sandbox) -> psutil.Process:
    assert sandbox._process is not None
    return psutil.Process(sandbox._process.pid)


def children(sandbox: Sandbox) -> int:
    """Number of descendants of the zygote, after waiting for those that are ending."""
    deadline = time.monotonic() + 10
    expected = {"namespaces": 1, "user namespaces": 1, "bubblewrap": 2}.get(sandbox.mechanism(), 0)
    while (count := len(zygote(sandbox).children(recursive=True))) > expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return count


def test_mounts_below_a_readable_path_are_read_only(tmp_path: Path) -> None:
    """A bind mount is recursive, but its remount is not. The nested mount is writable for all users."""
    folder = tmp_path / "readable"
    (folder / "a b").mkdir(parents=True)
    program = f"""
import os
from mtpctl.sandbox import isolation
isolation._unshare(new_user=os.geteuid() != 0)
isolation.mount("none", "/", "", isolation.MS_REC | isolation.MS_PRIVATE)
isolation.mount("tmpfs", {str(folder / "a b")!r}, "tmpfs", 0, "mode=0777")
isolation.readable_paths = lambda: [{str(folder)!r}]
isolation._build_root()
try:
    open({str(folder / "a b" / "new")!r}, "w")
except OSError as error:
    print(error.strerror)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in result.stderr:
        pytest.skip("namespaces cannot be created here")
    assert result.stdout == "Read-only file system\n", result.stderr
