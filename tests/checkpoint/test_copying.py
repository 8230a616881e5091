"""Copies of a run: after an interruption at any time, the newest complete checkpoint is fetched."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpctl.checkpoint.copying import COPY_URL_FIELD, CopyWriter, fetch_run, newest_copy
from mtpctl.checkpoint.finding import newest_checkpoint
from mtpctl.checkpoint.listing import LISTING
from mtpctl.cluster.object_store import ObjectStore, StoreFailed
from mtpctl.errors import UserError
from tests.fakes.copied_runs import contents, make_checkpoint, make_run, relist


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


class Faltering(ObjectStore):
    """A store in memory that fails after `left` changes; None: never."""

    def __init__(self, left: int | None = None) -> None:
        super().__init__(f"memory://{uuid.uuid4()}/run", COPY_URL_FIELD)
        self.left, self.changes = left, list[str]()

    def _change(self, name: str) -> None:
        if self.left is not None and len(self.changes) >= self.left:
            raise StoreFailed(f"cannot write {name}")
        self.changes.append(name)

    def write(self, name: str, contents: bytes) -> None:
        self._change(name)
        super().write(name, contents)

    def put(self, file: Path, name: str) -> None:
        self._change(name)
        super().put(file, name)

    def remove(self, names: object) -> None:
        assert isinstance(names, list)
        for name in names:
            self._change(name)
            super().remove([name])


def sent_of(checkpoint: Path) -> dict[str, bytes]:
    """The files that a copy sends: all except the listing."""
    return {name: text for name, text in contents(checkpoint).items() if name != LISTING}


def fetched(store: ObjectStore, place: Path, report: Callable[[str], None] = lambda line: None) -> str | None:
    """Fetch into a new run directory."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "checkpoints").mkdir(parents=True)
    return fetch_run(store, place, report)


def test_copied_run_is_fetched(run: Path, tmp_path: Path) -> None:
    store, lines, back = Faltering(), list[str](), tmp_path / "back"
    checkpoint = make_checkpoint(run, "rl-000002")
    CopyWriter(store, run, 2).copy(checkpoint)
    assert newest_copy(store) == "rl-000002"
    assert fetched(store, back, lines.append) == "rl-000002" and len(lines) == 1
    assert lines[0].startswith("fetching rl-000002, 0.0 MiB, from memory://")
    before, after = contents(run), contents(back)
    assert after.pop("metrics.jsonl") == b'{"step": 1}\n', "a line that was being written is not there"
    assert after == {name: text for name, text in before.items() if name != "metrics.jsonl"}
    assert newest_checkpoint(back / "checkpoints") == back / "checkpoints" / "rl-000002"


def test_empty_store_has_nothing_to_fetch(tmp_path: Path) -> None:
    assert fetched(Faltering(), tmp_path / "back") is None


@pytest.mark.parametrize("keep", [1, 2])
def test_interrupted_copy_keeps_a_complete_checkpoint_and_is_resumed(run: Path, tmp_path: Path, keep: int) -> None:
    def copied(store: Faltering) -> None:
        writer = CopyWriter(store, run, keep)
        for checkpoint in checkpoints:
            writer.copy(checkpoint)

    checkpoints = [make_checkpoint(run, f"rl-{step:06d}") for step in (2, 4, 6)]
    copied(store := Faltering())
    stored = [contents(each) for each in checkpoints]
    reached = -1
    for left in range(len(store.changes)):
        store = Faltering(left)
        with pytest.raises(StoreFailed):
            copied(store)
        name = fetched(store, tmp_path / "back")
        newer = -1 if name is None else [each.name for each in checkpoints].index(name)
        assert newer >= reached, "what was there once is not lost"
        reached = newer
        if name is not None:
            assert contents(tmp_path / "back" / "checkpoints" / name) == stored[newer]
        store.left = None
        CopyWriter(store, run, keep).copy(checkpoints[-1])
        assert fetched(store, tmp_path / "back") == "rl-000006"
        assert contents(tmp_path / "back" / "checkpoints" / "rl-000006") == stored[-1]
    assert reached == 2


def test_only_the_newest_copies_are_kept(run: Path) -> None:
    store = Faltering()
    store.write("checkpoints/rl-000001/engine.json", b"half of one")
    writer = CopyWriter(store, run, 2)
    for step in (2, 4, 6):
        writer.copy(make_checkpoint(run, f"rl-{step:06d}"))
    assert {name.split("/")[1] for name in store.names("checkpoints")} == {"rl-000004", "rl-000006", "latest"}
    assert store.read("checkpoints/latest") == b"rl-000006"


def test_unchanged_files_are_not_sent_again(run: Path) -> None:
    store = Faltering()
    checkpoint = make_checkpoint(run, "rl-000002")
    sent = CopyWriter(store, run, 2).copy(checkpoint)
    assert sent == sum(map(len, sent_of(checkpoint).values())) + sum(map(len, contents(run / "model").values()))
    assert CopyWriter(store, run, 2).copy(checkpoint) == 0, "nor by another start of the run"
    (checkpoint / "engine.json").write_text("another one of the same name")
    relist(checkpoint)
    assert CopyWriter(store, run, 2).copy(checkpoint) == sum(map(len, sent_of(checkpoint).values()))


def test_second_copy_sends_the_remaining_files(run: Path) -> None:
    store = Faltering()
    checkpoint, sends = make_checkpoint(run, "rl-000002"), list[str]()
    writer = CopyWriter(store, run, 2)
    store.left = 8
    with pytest.raises(StoreFailed):
        writer.copy(checkpoint)
    sends, store.left, store.changes = store.changes, None, []
    writer.copy(checkpoint)
    files = [name for name in (*sends, *store.changes) if name.startswith("checkpoints/rl-000002/") and not name.endswith(LISTING)]
    assert sorted(files) == sorted(f"checkpoints/rl-000002/{name}" for name in sent_of(checkpoint))


def test_checkpoint_replaced_during_the_copy_is_an_error(run: Path, tmp_path: Path) -> None:
    class Slow(Faltering):
        def put(self, file: Path, name: str) -> None:
            super().put(file, name)
            if name.endswith("__0_0.distcp"):
                (checkpoint / "deeper" / "__1_0.distcp").write_text("of another update")
                relist(checkpoint)

    store, checkpoint = Slow(), make_checkpoint(run, "rl-000002")
    writer = CopyWriter(store, run, 2)
    with pytest.raises(OSError, match=r"deeper/__1_0.distcp was replaced while it was copied"):
        writer.copy(checkpoint)
    assert fetched(store, tmp_path / "back") is None
    writer.copy(checkpoint)
    assert fetched(store, tmp_path / "back") == "rl-000002"


DAMAGES = {
    "a byte differs": lambda text: text[:-1] + b"!",
    "the end is missing": lambda text: text[:-1],
    "empty": lambda text: b"",
}


@pytest.mark.parametrize("file", ["engine.json", "deeper/__1_0.distcp", "files.json"])
@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
def test_fetch_skips_damaged_checkpoints(run: Path, tmp_path: Path, file: str, damage: str) -> None:
    store, lines = Faltering(), list[str]()
    writer = CopyWriter(store, run, 2)
    for step in (2, 4):
        writer.copy(make_checkpoint(run, f"rl-{step:06d}"))

    def spoil(name: str) -> None:
        place = f"checkpoints/{name}/{file}"
        before = store.read(place)
        assert before is not None
        store.remove([place]) if damage == "gone" else store.write(place, DAMAGES[damage](before))

    spoil("rl-000004")
    assert fetched(store, tmp_path / "back", lines.append) == "rl-000002"
    if file != "files.json":
        assert any(line.startswith(f"rl-000004 in {store.url} is damaged: {file} ") for line in lines)
        spoil("rl-000002")
        with pytest.raises(UserError, match=r"train.checkpoint_copy: every checkpoint in .* is damaged; restore their files, or"):
            fetched(store, tmp_path / "back")


def test_damaged_model_folder_of_a_copy_is_reported_in_one_line(run: Path, tmp_path: Path) -> None:
    store = Faltering()
    CopyWriter(store, run, 2).copy(make_checkpoint(run, "rl-000002"))
    store.write("model/config.json", b"[]")
    with pytest.raises(UserError, match=r"train.checkpoint_copy: memory://\S+/model/config.json .*; restore the file, or name another URL"):
        fetched(store, tmp_path / "back")


class FailingOnce(ObjectStore):
    """Fails at one file, after it has fetched `num_fetched` others."""

    def __init__(self, url: str, num_fetched: int) -> None:
        super().__init__(url, COPY_URL_FIELD)
        self.num_fetched, self.fetched, self.has_failed = num_fetched, list[str](), False

    def get(self, name: str, file: Path) -> None:
        if not self.has_failed and len(self.fetched) == self.num_fetched:
            self.has_failed = True
            raise StoreFailed("cannot read")
        super().get(name, file)
        self.fetched.append(name)


@pytest.mark.parametrize("num_fetched", range(7))
def test_interrupted_fetch_leaves_no_checkpoint_and_is_continued(run: Path, tmp_path: Path, num_fetched: int) -> None:
    """A checkpoint without the model's folder would be one to resume from."""
    copy = Faltering()
    CopyWriter(copy, run, 2).copy(make_checkpoint(run, "rl-000002"))
    store, back = FailingOnce(copy.url, num_fetched), tmp_path / "back"
    (back / "checkpoints").mkdir(parents=True)
    with pytest.raises(StoreFailed):
        fetch_run(store, back, lambda line: None)
    assert newest_checkpoint(back / "checkpoints") is None
    assert fetch_run(store, back, lambda line: None) == "rl-000002"
    assert len(store.fetched) == len(set(store.fetched)) == 6 + 1, "each file of the checkpoint once, and that of the model"
