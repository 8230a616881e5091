"""Selection of the newest complete checkpoint, independent of damage, `latest` and the clock."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpctl.checkpoint.finding import (
    Choice,
    check_checkpoint,
    damaged_in,
    find_complete_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    next_number,
    prepare_resume,
)
from mtpctl.checkpoint.listing import LISTING, Damaged, Listing, write_latest
from mtpctl.errors import UserError
from tests.fakes.chaos_damage import WAYS, apply
from tests.fakes.checkpoint_folders import SHARD, flip, with_checksum, write_checkpoint

LINE = '{"number": 1}\n'


def names(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints, of which the newer one is `rl-000004`."""
    for name in ("rl-000002", "rl-000004"):
        write_latest(write_checkpoint(tmp_path / "run", name, buffer=LINE * 3))
    return tmp_path / "run"


@pytest.mark.parametrize("pointer", [None, "", "\x00\xff garbage", "rl-000009", "rl-000002", "../../etc"])
def test_lost_or_wrong_pointer_does_not_change_the_newest_checkpoint(run: Path, pointer: str | None) -> None:
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    if pointer is not None:
        latest.write_text(pointer)
    assert newest_checkpoint(run / "checkpoints") == run / "checkpoints" / "rl-000004"
    assert prepare_resume(run / "checkpoints").path == run / "checkpoints" / "rl-000004"
    assert latest.read_text() == "rl-000004"


def test_pointer_that_is_a_folder_is_ignored(run: Path) -> None:
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").mkdir()
    assert prepare_resume(run / "checkpoints").path == run / "checkpoints" / "rl-000004"


def test_order_does_not_depend_on_the_clock(run: Path) -> None:
    """The clock is set back between the two."""
    root = run / "checkpoints"
    for file in (root / "rl-000004").iterdir():
        os.utime(file, (0, 0))
    os.utime(root / "rl-000004", (0, 0))
    assert names(root) == ["rl-000004", "rl-000002"]


def test_order_is_by_save_if_a_run_went_back(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "rl-000004")
    write_checkpoint(run, "rl-000008")
    shutil.rmtree(run / "checkpoints" / "rl-000002")
    write_checkpoint(run, "rl-000003")
    assert names(run / "checkpoints") == ["rl-000003", "rl-000008"]
    assert next_number(run / "checkpoints") == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip(path / SHARD), rf"{SHARD} has changed since it was saved \(checksum xxh3:"),
        (lambda path: flip(path / "buffer.jsonl", 3), "buffer.jsonl has changed since it was saved"),
        (lambda path: flip(path / "run.json", 3), "run.json has changed since it was saved"),
        (lambda path: flip(path / "engine.json", 3), "engine.json has changed since it was saved"),
        (lambda path: flip(path / ".metadata", 9), ".metadata has changed since it was saved"),
        (lambda path: flip(path / "metadata.json", 9), "metadata.json has changed since it was saved"),
        (lambda path: os.truncate(path / SHARD, 2000), f"{SHARD} has 2,000 bytes, and 4,096 were saved"),
        (lambda path: os.truncate(path / "buffer.jsonl", 20), "buffer.jsonl has 20 bytes, and 42 were saved"),
        (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
        (lambda path: (path / "run.json").unlink(), "run.json is missing"),
        (lambda path: (path / LISTING).unlink(), "files.json is missing"),
        (lambda path: os.truncate(path / LISTING, 40), "files.json is truncated or overwritten"),
        (lambda path: (path / LISTING).write_text("[]"), "files.json is truncated or overwritten"),
        (lambda path: [file.unlink() for file in path.iterdir() if file.name != "run.json"], "files.json is missing"),
    ],
)
def test_damaged_newest_checkpoint_is_reported_and_the_previous_one_is_used(
    run: Path, damage: Callable[[Path], object], message: str
) -> None:
    root = run / "checkpoints"
    damage(root / "rl-000004")
    before = {file.name: file.read_bytes() for file in (root / "rl-000004").iterdir()}
    choice = prepare_resume(root)
    assert choice.path == root / "rl-000002"
    (line,) = choice.lines
    assert line.startswith(f"{root}/rl-000004/") and line.endswith("; rl-000002 is used instead") and "\n" not in line
    with pytest.raises(Damaged, match=message):
        raise choice.damaged[0][1]
    retained = root / "rl-000004.damaged"
    assert damaged_in(root) == [retained] and {file.name: file.read_bytes() for file in retained.iterdir()} == before
    assert names(root) == ["rl-000002"] and (root / "latest").read_text() == "rl-000002"
    assert prepare_resume(root) == Choice(root / "rl-000002"), "damage is reported once"


def test_every_flipped_bit_of_a_listing_is_damage(run: Path) -> None:
    saved = (run / "checkpoints" / "rl-000004" / LISTING).read_bytes()
    for at in range(8 * len(saved)):
        byte, bit = divmod(at, 8)
        with pytest.raises(Damaged):
            Listing.of(saved[:byte] + bytes([saved[byte] ^ 1 << bit]) + saved[byte + 1 :])


def test_checkpoint_of_another_version_is_an_error_that_renames_nothing(run: Path) -> None:
    path = run / "checkpoints" / "rl-000004" / LISTING
    listing = json.loads(path.read_text())
    path.write_text(json.dumps(with_checksum(listing | {"format": 4})))
    for read in (lambda: prepare_resume(path.parents[1]), lambda: check_checkpoint(path.parent, verify_checksums=True)):
        with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: was saved by another version of mtpctl \(format 4, .*; use that"):
            read()
    assert sorted(each.name for each in path.parents[1].iterdir()) == ["latest", "rl-000002", "rl-000004"]


def test_random_damage_of_any_file_is_detected(run: Path) -> None:
    draw, path = random.Random(0), run / "checkpoints" / "rl-000004"
    saved = {file: file.read_bytes() for file in sorted(path.iterdir())}
    for _ in range(100):
        damage = apply(draw.choice([*saved]), draw.choice(WAYS), draw)
        with pytest.raises(Damaged):
            check_checkpoint(path, verify_checksums=True)
            pytest.fail(f"{damage}: whole")
        for file, contents in saved.items():
            file.write_bytes(contents)


def test_flipped_number_of_a_listing_does_not_change_the_order(run: Path) -> None:
    root = run / "checkpoints"
    listing = root / "rl-000004" / LISTING
    listing.write_bytes(listing.read_bytes().replace(b'"number": 2', b'"number": 0'))
    choice = prepare_resume(root)
    assert choice.path == root / "rl-000002" and damaged_in(root) == [root / "rl-000004.damaged"]


def test_second_damaged_checkpoint_of_a_name_does_not_replace_the_first(run: Path) -> None:
    root = run / "checkpoints"
    for _ in range(3):
        flip(root / "rl-000004" / SHARD)
        prepare_resume(root)
        write_checkpoint(run, "rl-000004")
    assert [path.name for path in damaged_in(root)] == ["rl-000004.damaged", "rl-000004.damaged-2", "rl-000004.damaged-3"]
    assert names(root) == ["rl-000004", "rl-000002"]


def test_only_sizes_of_large_files_are_compared_without_checksums(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.checkpoint.listing._SMALL_BYTES", 1024)
    flip(run / "checkpoints" / "rl-000004" / SHARD)
    assert newest_checkpoint(run / "checkpoints") == run / "checkpoints" / "rl-000004"
    os.truncate(run / "checkpoints" / "rl-000004" / SHARD, 10)
    assert newest_checkpoint(run / "checkpoints") == run / "checkpoints" / "rl-000002"


@pytest.mark.parametrize("verify_checksums", [False, True])
def test_flipped_bit_in_the_state_of_the_newest_checkpoint_selects_the_one_before(run: Path, verify_checksums: bool) -> None:
    flip(run / "checkpoints" / "rl-000004" / "run.json", 5)
    assert find_complete_checkpoint(run / "checkpoints", verify_checksums=verify_checksums).path == run / "checkpoints" / "rl-000002"


def test_all_checkpoints_damaged_is_an_error_that_keeps_them(run: Path) -> None:
    root = run / "checkpoints"
    for path in list_checkpoints(root):
        os.truncate(path / SHARD, 10)
    with pytest.raises(
        UserError, match=r"rl-000004/__0_0\.distcp has 10 bytes, .* and so are all older ones \(1\); restore the file, or .* --start-over`"
    ) as lines:
        prepare_resume(root)
    assert "remove" not in str(lines.value) and "\n" not in str(lines.value)
    assert names(root) == ["rl-000004", "rl-000002"]


def test_folders_that_are_not_checkpoints_are_ignored(run: Path) -> None:
    root = run / "checkpoints"
    (root / "notes").mkdir()
    (root / "rl-000006.partial").mkdir()
    (root / "rl-000006.partial" / "run.json").write_text("{}")
    assert (
        names(root) == ["rl-000004", "rl-000002"] and newest_checkpoint(root / "notes") is None and newest_checkpoint(root / "none") is None
    )


def test_interrupted_replacement_of_a_checkpoint_is_undone(run: Path) -> None:
    """Killed between the two renames of a save at the same step."""
    root = run / "checkpoints"
    (root / "rl-000004").rename(root / "rl-000004.replaced")
    assert newest_checkpoint(root) == root / "rl-000004.replaced"
    assert prepare_resume(root).path == root / "rl-000004"
    shutil.copytree(root / "rl-000004", root / "rl-000004.replaced")
    assert names(root) == ["rl-000004", "rl-000002"], "unless the new one has it"


def test_lost_listing_is_damage(run: Path) -> None:
    """Otherwise its contents would not be verified."""
    path = run / "checkpoints" / "rl-000004"
    (path / LISTING).unlink()
    with pytest.raises(Damaged, match=r"files\.json is missing"):
        check_checkpoint(path, verify_checksums=True)


def test_file_that_cannot_be_read_is_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(Damaged, match=r"cannot be read \(Input/output error\)"):
        check_checkpoint(run / "checkpoints" / "rl-000004", verify_checksums=True)


def test_files_added_by_the_user_are_not_damage(run: Path) -> None:
    (run / "checkpoints" / "rl-000004" / "notes.txt").write_text("the good one")
    assert find_complete_checkpoint(run / "checkpoints", verify_checksums=True) == Choice(run / "checkpoints" / "rl-000004")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_listing_with_files_outside_its_folder_is_rejected(run: Path, name: str) -> None:
    path = run / "checkpoints" / "rl-000004" / LISTING
    listing = json.loads(path.read_text())
    listing["files"][name] = {"size": 1, "checksum": "xxh3:00"}
    path.write_text(json.dumps(with_checksum(listing)))
    assert prepare_resume(run / "checkpoints").path == run / "checkpoints" / "rl-000002"
