"""A run directory is created completely or not at all, and is used by one run at a time."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.telemetry import run_directory
from mtpctl.telemetry.run_directory import Answer, RunDirectory, pop_requests, request_replicas


def test_new_run_directory_has_recipe_versions_and_folders(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a" / "run", "name: x\n") as run:
        assert run.recipe.read_text() == "name: x\n"
        run.record("name: x\n")
        assert json.loads(run.versions.read_text())["packages"]["torch"]
        assert all(folder.is_dir() for folder in (run.checkpoints, run.logs, run.tensorboard))
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["run"]


def test_resuming_keeps_everything_and_the_earlier_recipe(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "steps: 1\n") as run:
        run.metrics.write_text("kept\n")
    changes = []
    for text in ("steps: 2\n", "steps: 3\n", "steps: 3\n"):
        with RunDirectory.create(tmp_path / "run", text) as run:
            changes.append(run.record(text))
    assert changes == [["steps: 1 → 2"], ["steps: 2 → 3"], []]
    assert run.metrics.read_text() == "kept\n"
    assert run.recipe.read_text() == "steps: 3\n"
    assert [p.read_text() for p in sorted(run.logs.iterdir())] == ["steps: 1\n", "steps: 2\n"]
    (run.logs / "recipe.1.yaml").unlink()
    with RunDirectory.create(tmp_path / "run", "steps: 4\n") as run:
        run.record("steps: 4\n")
    assert {p.name: p.read_text() for p in run.logs.iterdir()} == {"recipe.2.yaml": "steps: 2\n", "recipe.3.yaml": "steps: 3\n"}


def test_existing_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunDirectory.create(tmp_path / "run", "a: 1\n") as run:
        assert not run.recipe.exists(), "what runs there is not known yet"
        run.record("a: 1\n")
        assert run.recipe.read_text() == "a: 1\n"


@pytest.mark.parametrize("contents", [b"", b"- 1\n", b"a: [", b"a: \xff\n", b"a: \x00\n"])
def test_damaged_recipe_is_reported_with_its_file_and_replaced_by_the_next_start(tmp_path: Path, contents: bytes) -> None:
    with RunDirectory.create(tmp_path / "run", "a: 1\n") as run:
        assert run.read_recipe() == {"a": 1}
        run.recipe.write_bytes(contents)
        with pytest.raises(UserError, match=r"recipe\.resolved\.yaml.*; restore the file, or remove it") as caught:
            run.read_recipe()
        assert "\n" not in str(caught.value)
        run.record("a: 1\n")
        assert run.read_recipe() == {"a": 1}
        run.recipe.unlink()
        assert run.read_recipe() is None


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "a: 1\n") as run:
        with pytest.raises(UserError, match="another run is writing"):
            RunDirectory.create(tmp_path / "run", "a: 2\n")
        assert run.recipe.read_text() == "a: 1\n"
    RunDirectory.create(tmp_path / "run", "a: 2\n").close()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"^run_dir: cannot write") as caught:
            RunDirectory.create(place, "a: 1\n")
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_failed_creation_of_a_run_directory_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(UserError, match=r"^run_dir: cannot write .*" + os.strerror(number)):
        RunDirectory.create(tmp_path / "run", "a: 1\n")
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_cannot_be_rewritten_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDirectory.create(tmp_path / "run", "a: 1\n").close()

    def refuse(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", refuse)
    with RunDirectory.create(tmp_path / "run", "a: 2\n") as run, pytest.raises(UserError, match="free space or choose another directory"):
        run.record("a: 2\n")
    monkeypatch.undo()
    assert (tmp_path / "run" / "recipe.resolved.yaml").read_text() == "a: 1\n"
    assert not [p for p in (tmp_path / "run").rglob(".*") if p.name != ".lock"]
    RunDirectory.create(tmp_path / "run", "a: 2\n").close()


def test_a_disk_with_no_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 40, 1 << 40, 1000))
    with pytest.raises(UserError, match="No space left"):
        RunDirectory.create(tmp_path / "run", "a: 1\n")
    assert list(tmp_path.iterdir()) == []


def test_a_place_is_tried_without_making_anything(tmp_path: Path) -> None:
    RunDirectory.check_writable(tmp_path / "runs" / "a")
    assert not list(tmp_path.iterdir())
    for place in ("/proc/no/place", str(tmp_path / "file" / "run")):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=r"^run_dir: cannot write .*; choose a writable directory$"):
            RunDirectory.check_writable(place)


def test_locked_directory_is_reported_and_unchanged(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "name: a\n"), pytest.raises(UserError, match=r"^run_dir: another run is writing"):
        RunDirectory.check_writable(tmp_path / "run")
    RunDirectory.check_writable(tmp_path / "run")
    with RunDirectory.create(tmp_path / "run", "name: a\n"):
        pass


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A running run."""
    return RunDirectory.create(tmp_path / "run", "name: t\n")


def answering(run: RunDirectory, answer: Callable[[int], Answer], count: int) -> threading.Thread:
    """A run that answers so many requests."""

    def work() -> None:
        left, end = count, time.monotonic() + 10
        while left and time.monotonic() < end:
            for request in pop_requests(run):
                request.answer(answer(request.replicas))
                left -= 1
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_concurrent_requests_get_their_own_answers(run: RunDirectory) -> None:
    result: dict[int, Answer] = {}
    asking = [threading.Thread(target=lambda n=n: result.update({n: request_replicas(run, n)})) for n in range(4)]
    answers = answering(run, lambda n: Answer(f"{n} it is", refused=n == 2), len(asking))
    for thread in asking:
        thread.start()
    for thread in (*asking, answers):
        thread.join(15)
    assert result == {n: Answer(f"{n} it is", refused=n == 2) for n in range(4)}
    assert not list(run.requests.iterdir()), "nothing is left"


def test_request_to_stopped_run_is_rejected(run: RunDirectory) -> None:
    run.close()
    with pytest.raises(UserError, match=r"^RUN: .*/run is not running; start it with mtpctl train "):
        request_replicas(run, 2)
    assert not run.requests.exists()


def test_request_without_answer_times_out_and_is_removed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "ANSWER_S", 0.1)
    with pytest.raises(RuntimeFailure, match=r"no answer within 0\.1 s; check logs/run\.log"):
        request_replicas(run, 2)
    assert not list(pop_requests(run))


def test_run_that_ends_before_answer_is_reported(run: RunDirectory) -> None:
    threading.Timer(0.3, run.close).start()
    with pytest.raises(RuntimeFailure, match="the run ended before it answered"):
        request_replicas(run, 2)


def test_earlier_and_invalid_requests_are_removed(run: RunDirectory) -> None:
    run.requests.mkdir()
    (run.requests / "1.json").write_text('{"replicas": 3}')
    run.record("name: t\n")
    assert not list(pop_requests(run))
    for name, text in (("2", "{"), ("3", "[]"), ("4", '{"replicas": true}'), ("5", '{"replicas": "9"}'), ("6", '{"replicas": 2}')):
        (run.requests / f"{name}.json").write_text(text)
    assert [request.replicas for request in pop_requests(run)] == [2]
    assert not list(run.requests.iterdir())


def test_directory_that_another_start_creates_at_the_same_time_is_locked_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream, others = Path.rename, list[RunDirectory]()

    def create_first(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", upstream)
        others.append(RunDirectory.create(target, "a: 1\n"))
        return upstream(self, target)

    monkeypatch.setattr(Path, "rename", create_first)
    with pytest.raises(UserError, match="another run is writing"):
        RunDirectory.create(tmp_path / "run", "a: 1\n")
    others[0].close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_run_owns_the_folder_of_requests(tmp_path: Path) -> None:
    """Otherwise it could not remove the requests of another user."""
    with RunDirectory.create(tmp_path / "run", "a: 1\n") as run:
        run.record("a: 1\n")
        assert run.requests.is_dir()
