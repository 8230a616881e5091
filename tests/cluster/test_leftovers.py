"""Folders of killed processes are found and removed, and folders that may be in use are not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from mtpctl.cli.app import main
from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import MARK, Watchdog, find_session_members
from mtpctl.cluster.local import cluster
from mtpctl.recipe.schema import ClusterConfig
from tests.environment import with_tree
from tests.fakes.processes import runs

MAKES = """
import json, sys
from pathlib import Path
from mtpctl.cluster import leftovers
for folder in map(Path, json.loads(sys.stdin.readline())):
    leftovers.make_marked(folder)
    (folder / "v00000001").mkdir()
    (folder / "v00000001" / "target-00000.bin").write_bytes(bytes(1 << 16))
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that replace shared memory and the folder of Ray's sessions."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    leftovers.sessions_folder().mkdir(parents=True)
    return tmp_path / "shm"


@pytest.fixture
def run(memory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has created a folder of versions and one of a Ray session."""
    # Pass the folders on stdin, since a folder on a process's command line counts as in use.
    folders = json.dumps([str(memory / "mtpctl-run"), str(leftovers.sessions_folder() / "session_1")])
    process = subprocess.Popen([sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(folders + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "made\n"
    yield process
    process.kill()
    process.communicate()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)


def test_folders_are_removed_only_after_the_run_was_killed(run: subprocess.Popen[str], memory: Path) -> None:
    versions, session = memory / "mtpctl-run", leftovers.sessions_folder() / "session_1"
    assert leftovers.find() == leftovers.remove() == []
    assert versions.is_dir() and session.is_dir()
    kill(run)
    result = leftovers.find()
    assert [left.path for left in result] == [versions, session] and all(left.nbytes >= 1 << 16 for left in result)
    assert leftovers.remove() == result
    assert list(memory.iterdir()) == list(session.parent.iterdir()) == [] == leftovers.find()


def test_a_reused_process_id_is_not_the_owner(run: subprocess.Popen[str], memory: Path) -> None:
    folder = memory / "mtpctl-run"
    owner = json.loads((folder / MARK).read_text())
    (folder / MARK).write_text(json.dumps(owner | {"started": owner["started"] - 1}))
    assert [left.path for left in leftovers.remove()] == [folder]


@pytest.mark.parametrize("mark", [None, "", "[]", "{}"])
def test_folder_with_an_unreadable_marker_is_listed_and_not_removed(mark: str | None, memory: Path) -> None:
    folder = memory / "mtpctl-run"
    folder.mkdir()
    if mark is not None:
        (folder / MARK).write_text(mark)
    assert leftovers.remove() == [] and folder.is_dir()
    assert leftovers.find_unmarked() == [folder] and leftovers.find_foreign() == []


def change_mark(folder: Path, **changed: object) -> None:
    owner = json.loads((folder / MARK).read_text())
    (folder / MARK).write_text(json.dumps(owner | changed))


def test_folder_of_another_container_is_listed_and_not_removed(
    run: subprocess.Popen[str], memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process ids cannot be looked up here."""
    folder = memory / "mtpctl-run"
    kill(run)
    change_mark(folder, namespace="another")
    assert not leftovers.claim(folder) and not leftovers.vacate(folder)
    assert folder not in [left.path for left in leftovers.remove()] and (folder / "v00000001").is_dir()
    assert leftovers.find_foreign() == [folder] and leftovers.find_unmarked() == []
    with pytest.raises(SystemExit):
        main(["clean"])
    assert f"skipped: {folder} was created in another container" in capsys.readouterr().out


def test_shared_memory_of_an_earlier_boot_is_removed(run: subprocess.Popen[str], memory: Path) -> None:
    """Ray's folders may be on a disk shared by several machines, where another boot may be another machine."""
    versions, session = memory / "mtpctl-run", leftovers.sessions_folder() / "session_1"
    for folder in (versions, session):
        change_mark(folder, boot="another")
    assert [left.path for left in leftovers.remove()] == [versions]
    assert leftovers.find_foreign() == [session] and session.is_dir()


def test_an_interrupted_removal_is_continued_by_the_next(run: subprocess.Popen[str], memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(run)
    (memory / "mtpctl-run" / "zz").mkdir()
    removed = shutil.rmtree

    def breaks(folder: Path, **options: object) -> None:
        for path in sorted(Path(folder).rglob("*")):  # the mark's name comes first
            if path.is_file():
                path.unlink()
                raise KeyboardInterrupt
        removed(folder)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(leftovers.shutil, "rmtree", breaks)
        leftovers.remove()
    (aside,) = memory.iterdir()
    assert aside in [left.path for left in leftovers.find()]
    leftovers.remove()
    assert list(memory.iterdir()) == []


def test_a_partly_removed_folder_without_a_mark_is_listed(memory: Path) -> None:
    (memory / ".mtpctl-going-7-mtpctl-run").mkdir()
    assert leftovers.find_unmarked() == [memory / ".mtpctl-going-7-mtpctl-run"]


def test_only_one_process_removes_at_a_time(run: subprocess.Popen[str], memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kill(run)
    with leftovers._locked(wait=True):
        assert leftovers.remove() == []
        with pytest.raises(SystemExit):
            main(["clean"])
        assert f"not removed: {memory / 'mtpctl-run'}; another process is removing it" in capsys.readouterr().out
    assert len(leftovers.remove()) == 2


def test_a_claim_waits_for_a_removal(run: subprocess.Popen[str], memory: Path) -> None:
    folder = memory / "mtpctl-run"
    kill(run)
    claimed: list[bool] = []
    claiming = threading.Thread(target=lambda: claimed.append(leftovers.claim(folder)))
    with leftovers._locked(wait=True):
        claiming.start()
        claiming.join(0.3)
        assert claiming.is_alive() and (folder / "v00000001").is_dir()
    claiming.join(30)
    assert claimed == [True] and [path.name for path in folder.iterdir()] == [MARK]


def test_a_folder_that_was_claimed_again_is_not_removed(run: subprocess.Popen[str], memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine marks its adapters' folder without the lock, so a marked folder must not be moved."""
    folder = memory / "mtpctl-run"
    kill(run)
    result = leftovers.find()
    leftovers.mark(folder)
    monkeypatch.setattr(leftovers, "find", lambda: result)
    monkeypatch.setattr(Path, "rename", lambda *inputs: pytest.fail("it was moved") if inputs[0] == folder else os.rename(*inputs))
    assert folder not in [left.path for left in leftovers.remove()] and folder.is_dir()


def test_a_folder_of_another_user_is_not_removed(run: subprocess.Popen[str], memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(run)
    monkeypatch.setattr(os, "getuid", lambda: 1 + memory.stat().st_uid)
    assert leftovers.find() == leftovers.remove() == leftovers.find_unmarked() == []


def test_a_session_with_a_living_ray_process_is_not_removed(run: subprocess.Popen[str], memory: Path) -> None:
    kill(run)
    session = leftovers.sessions_folder() / "session_1"
    with subprocess.Popen([sys.executable, "-c", "input()", f"--session-dir={session}"], stdin=subprocess.PIPE) as raylet:
        assert session not in [left.path for left in leftovers.remove()]
        raylet.kill()
    assert [left.path for left in leftovers.remove()] == [session]


class Ray(types.ModuleType):
    """A fake of the Ray functions that `cluster` calls."""

    def __init__(self, session: Path) -> None:
        super().__init__("ray")
        self.session, self.ended = session, False

    def init(self, **options: object) -> types.SimpleNamespace:
        self.session.mkdir()
        return types.SimpleNamespace(address_info={"session_dir": str(self.session)})

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def ray(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    result = Ray(leftovers.sessions_folder() / "session_2")
    monkeypatch.setitem(sys.modules, "ray", result)
    monkeypatch.setattr("mtpctl.cluster.local.Daemons.start_in_sessions", lambda self: nullcontext())
    return result


@pytest.mark.parametrize("error", [None, RuntimeError("a rank died; look into Ray's logs"), KeyboardInterrupt()])
def test_a_session_that_ended_normally_keeps_its_logs(error: BaseException | None, ray: Ray) -> None:
    with suppress(RuntimeError, KeyboardInterrupt), cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0):
        assert (ray.session / MARK).is_file()
        if error is not None:
            raise error
    assert ray.ended and ray.session.is_dir() and not (ray.session / MARK).exists()


def test_a_run_starts_even_if_its_mark_cannot_be_written(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(leftovers, "mark", full)
    with cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0):
        ran = True
    assert ran and ray.ended


KILLED = """
import os, signal, sys
from pathlib import Path
from mtpctl.cluster.local import cluster
from mtpctl.recipe.schema import ClusterConfig
from mtpctl.sync.store import default_root
with cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0) as daemons:
    print(default_root(sys.argv[1], 1, Path("nowhere")), flush=True)
    daemons._watchdog._process.kill()  # as a container that is stopped does; it would remove everything
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_next_start_removes_leftovers_of_a_killed_run() -> None:
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # pytest's own are too deep for Ray's sockets
        environment = os.environ | {"RAY_TMPDIR": folder}
        command = [sys.executable, "-c", KILLED, f"test-{os.getpid()}"]
        sessions, versions = [], set()
        for _ in range(2):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=200, check=False)
            assert done.returncode == -signal.SIGKILL
            versions.add(Path(done.stdout.strip()))
            (session,) = (path for path in (Path(folder) / f"mtpctl-{os.getuid()}" / "ray").glob("session_2*"))
            sessions.append(session)
            ends = time.monotonic() + 60  # Ray's own processes take a moment to follow
            while leftovers._named_by_a_process(session.name) and time.monotonic() < ends:
                time.sleep(0.2)
        assert sessions[0] != sessions[1] and not sessions[0].exists()
        (left,) = versions
        assert left.parent == leftovers.SHARED_MEMORY
        assert left in [each.path for each in leftovers.remove()] and not left.exists()


def test_clean_prints_the_removed_folders(run: subprocess.Popen[str], memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (memory / "mtpctl-ipc-x").touch()
    kill(run)
    for said in (["removed " + str(memory / "mtpctl-run"), "removed "], ["found no leftovers of killed runs"]):
        with pytest.raises(SystemExit) as ended:
            main(["clean"])
        *lines, last = capsys.readouterr().out.splitlines()
        assert (
            not ended.value.code and len(lines) == len(said) and all(line.startswith(text) for line, text in zip(lines, said, strict=True))
        )
        assert last.startswith(f"skipped: {memory / 'mtpctl-ipc-x'} does not name its owner")


DEADLINE_S = 60.0

COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import Watchdog

watchdog = Watchdog()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = "import subprocess, sys; subprocess.Popen(sys.argv[1:]{}); subprocess.run(sys.argv[1:])"
daemon = subprocess.Popen([sys.executable, "-c", child.format(""), *sleep], preexec_fn=watchdog.register, start_new_session=True)
apart = [sys.executable, "-c", child.format(", start_new_session=True"), *sleep]
other = subprocess.Popen(apart, preexec_fn=watchdog.register, start_new_session=True)
bystander = subprocess.Popen(sleep, start_new_session=True)
forked = os.fork()  # holds the pipe
if not forked:
    time.sleep(600)
leftovers.make_marked(Path(os.environ["VERSIONS"]))  # a folder named on a command line counts as in use
print(watchdog._process.pid, daemon.pid, other.pid, bystander.pid, forked, flush=True)
end = input()
if end == "close":
    watchdog.close()
    print("closed", flush=True)
    input()
"""


def poll(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def versions() -> Path:
    return leftovers.SHARED_MEMORY / f"{leftovers.PREFIX}watchdog-{os.getpid()}-{time.monotonic_ns()}"


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_watchdog_ends_only_daemons_and_their_descendants(versions: Path, end: str) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=with_tree(VERSIONS=str(versions)),
    )
    assert command.stdin is not None and command.stdout is not None
    watchdog, daemon, other, bystander, forked = (psutil.Process(int(pid)) for pid in command.stdout.readline().split())
    try:
        poll(lambda: len(daemon.children()) == len(other.children()) == 2)
        ours = [each for leader in (daemon, other) for each in (leader, *leader.children(recursive=True))]
        if end == "close":
            command.stdin.write("close\n")
            command.stdin.flush()
            assert command.stdout.readline() == "closed\n"
        else:
            command.send_signal(signal.SIGKILL)
        # The command is not waited for: a parent may leave it a zombie.
        poll(lambda: not any(map(runs, (*ours, watchdog))))
        assert runs(bystander) and runs(forked)
        assert versions.exists() == (end == "close")
    finally:
        command.kill()
        bystander.kill()
        forked.kill()
        command.wait()
        leftovers.remove(wait=True)


def test_a_session_with_another_leader_has_no_members() -> None:
    """The id of a process that has ended may have been given to another one."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            started = leftovers.read_start_time(process.pid)
            poll(lambda: os.getsid(process.pid) == process.pid)
            assert [each.pid for each in find_session_members({process.pid: started})] == [process.pid]
            assert find_session_members({process.pid: started - 1}) == []
        finally:
            process.kill()


def test_the_command_ends_despite_a_killed_watchdog() -> None:
    watchdog = Watchdog()
    watchdog._process.kill()
    watchdog._process.wait()
    watchdog.close()
    watchdog.close()
