"""The copy of a run in object storage: what is in it, when a checkpoint there counts as whole, and the way back.

A copy has the layout of a run directory, so that whoever downloads it has a run:

    recipe.resolved.yaml, metrics.jsonl, replicas.json           as they were at the newest checkpoint
    model/, tokenizer/, start/, reference/                       those that the run has, once
    checkpoints/NAME/…                                           the newest `keep`
    checkpoints/latest                                           the name of the newest one

Objects cannot be renamed, so a folder is complete only if it has its listing (`mtpctl.checkpoint.listing`), which is written last and
removed first. A folder without a listing, or with a file that differs from it, is not used. A checkpoint has the same listing on disk, so
that a checkpoint that is damaged on disk is not copied, and a fetched one can be verified again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.checkpoint.finding import set_aside
from mtpctl.checkpoint.listing import (
    LISTING,
    Damaged,
    Entry,
    Listing,
    entry_of,
    files_in,
    flush,
    point_to,
    pointer_of,
    read_listing,
    save_listing,
)
from mtpctl.checkpoint.object_store import FIELD, Absent, ObjectStore
from mtpctl.errors import UserError

CHECKPOINTS = "checkpoints"
_ONCE = ("model", "tokenizer", "start", "reference")
"""Folders that a run writes once. All but the policy that RL began with could be made again, but not everywhere to the last bit."""
_TEXTS = ("recipe.resolved.yaml", "metrics.jsonl", "replicas.json")


type Stamp = tuple[int, int, int]
"""Inode, size and time of change of a file: it holds the same for as long as they are the same."""


@dataclass
class CopyWriter:
    """Brings the copy of the run in `run_dir` up to date.

    It remembers what it has read and sent, so that a second try is short and folders that stay as they are are read once.
    """

    store: ObjectStore
    run_dir: Path
    keep: int
    _read: dict[Path, tuple[Stamp, Entry]] = field(default_factory=dict)
    _sent: dict[str, Entry] = field(default_factory=dict)

    def copy(self, checkpoint: Path) -> int:
        """Copy a checkpoint and what belongs to it, and drop all but the `keep` newest. Returns the bytes of files that were sent.

        Raises StoreFailed where the store does, OSError where a file cannot be read or is replaced meanwhile, and Damaged if the checkpoint
        differs from its listing. The copy then has the checkpoints that it had.
        """
        sent = sum(self._folder(name, 0) for name in _ONCE if (self.run_dir / name).is_dir())
        for name in _TEXTS:
            if (file := self.run_dir / name).is_file():
                text = file.read_bytes()
                # A line that is just being written is left for the next time.
                self.store.write(name, text[: text.rfind(b"\n") + 1])
        there = _checkpoints(self.store)
        name = f"{CHECKPOINTS}/{checkpoint.name}"
        others = {other: listing for other, listing in there.items() if other != checkpoint.name}
        number = 1 + max((listing.number for listing in others.values()), default=0)
        sent += self._folder(name, number)
        self.store.write(f"{CHECKPOINTS}/{pointer_of(checkpoint).name}", checkpoint.name.encode())
        kept = sorted(others, key=lambda other: others[other].number, reverse=True)[: self.keep - 1]
        self._drop_all_but({checkpoint.name, *kept})
        self._read = {file: known for file, known in self._read.items() if file.exists()}
        return sent

    def _folder(self, name: str, number: int) -> int:
        """Copy a folder, unless it is there as it is here. Returns the bytes that were sent."""
        folder = self.run_dir / name
        files = {file.relative_to(folder).as_posix(): file for file in files_in(folder)}
        try:
            saved = read_listing(folder)
        except Damaged as damage:
            raise Damaged(f"{name}/{damage.file}", damage.what) from damage
        here = Listing(max(number, 0 if saved is None else saved.number), {relative: self._known(file) for relative, file in files.items()})
        if saved is not None:
            _check_same(name, saved, here)
        marker = f"{name}/{LISTING}"
        try:
            there = _listing(self.store, name)
        except Damaged:
            there = None
        if there is not None and there.files == here.files:
            return 0
        self.store.remove([marker])
        count = 0
        for relative, entry in here.files.items():
            if self._sent.get(f"{name}/{relative}") != entry:
                self.store.put(files[relative], f"{name}/{relative}")
                self._sent[f"{name}/{relative}"] = entry
                count += entry.size
        if changed := [relative for relative, file in files.items() if self._known(file) != here.files[relative]]:
            self._sent.pop(f"{name}/{changed[0]}")
            raise OSError(f"{files[changed[0]]} was replaced while it was copied")
        self.store.write(marker, here.to_json())
        return count

    def _known(self, file: Path) -> Entry:
        stat = file.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if (known := self._read.get(file)) is None or known[0] != stamp:
            self._read[file] = known = (stamp, entry_of(file))
        return known[1]

    def _drop_all_but(self, kept: set[str]) -> None:
        folders: dict[str, list[str]] = {}
        for name in self.store.names(CHECKPOINTS):
            _, _, below = name.partition("/")
            if "/" in below and (folder := below.partition("/")[0]) not in kept:
                folders.setdefault(folder, []).append(name)
        for folder, names in folders.items():
            self.store.remove([f"{CHECKPOINTS}/{folder}/{LISTING}", *names])
            self._sent = {name: entry for name, entry in self._sent.items() if not name.startswith(f"{CHECKPOINTS}/{folder}/")}


def newest_copy(store: ObjectStore) -> str | None:
    """The name of the newest checkpoint that the copy has in whole, by its listing; None where it has none."""
    found = _checkpoints(store)
    return max(found, key=lambda name: found[name].number, default=None)


def fetch(store: ObjectStore, run_dir: Path, tell: Callable[[str], None]) -> str | None:
    """Bring the newest whole checkpoint of the copy into a run directory that has none, and what belongs to it. Returns its name.

    None where the copy has no checkpoint. One that is damaged is told of, and the one before it is taken. A second try goes on with the
    files that the first one got. Raises UserError where all are damaged, StoreFailed where the store does not answer.
    """
    found = _checkpoints(store)
    for name in sorted(found, key=lambda name: found[name].number, reverse=True):
        tell(f"fetching {name}, {found[name].nbytes / (1 << 20):,.1f} MiB, from {store.url}")
        try:
            _fetch_folder(store, f"{CHECKPOINTS}/{name}", found[name], run_dir)
        except Damaged as damage:
            tell(f"{name} in {store.url} is damaged: {damage}")
            continue
        for other in _ONCE:
            if (listing := _listing(store, other)) is not None and not (run_dir / other).exists():
                _fetch_folder(store, other, listing, run_dir)
        for text in _TEXTS:
            if (contents := store.read(text)) is not None:
                (run_dir / text).write_bytes(contents)
        point_to(run_dir / CHECKPOINTS / name)
        return name
    if found:
        raise UserError(f"{FIELD}: every checkpoint in {store.url} is damaged; restore their files, or name another place")
    return None


def _fetch_folder(store: ObjectStore, name: str, listing: Listing, run_dir: Path) -> None:
    """Get the files of a folder under another name, and rename it. Raises Damaged where a file is missing or differs."""
    target = run_dir / name
    aside = target.with_name(f"{target.name}.partial")
    for file, entry in listing.files.items():
        place = aside / file
        if place.is_file() and entry_of(place, entry) == entry:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get(f"{name}/{file}", place)
        except Absent as error:
            raise Damaged(file, "is missing") from error
        if (fetched := entry_of(place, entry)) != entry:
            place.unlink()
            what = f"has {fetched.size:,} bytes with checksum {fetched.checksum}, and {entry.size:,} with {entry.checksum} were written"
            raise Damaged(file, what)
        flush(place)
    if name.partition("/")[0] in (CHECKPOINTS, "reference"):
        save_listing(aside, listing)
    if name.startswith(f"{CHECKPOINTS}/") and target.exists():
        set_aside(target)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    flush(target.parent)


def _check_same(folder: str, saved: Listing, here: Listing) -> None:
    """Raise Damaged if files of the run's folder differ from the listing that was saved with them."""
    for name, entry in saved.files.items():
        if (now := here.files.get(name)) is None:
            raise Damaged(f"{folder}/{name}", "is missing")
        # A checkpoint that was fetched from an older copy has checksums of another algorithm.
        comparable = now.checksum.partition(":")[0] == entry.checksum.partition(":")[0]
        if now.size != entry.size or (comparable and now != entry):
            raise Damaged(f"{folder}/{name}", "has changed since it was saved")


def _checkpoints(store: ObjectStore) -> dict[str, Listing]:
    """The checkpoints of the copy that have a listing."""
    found = {}
    for object_name in store.names(CHECKPOINTS):
        name, _, file = object_name.removeprefix(f"{CHECKPOINTS}/").rpartition("/")
        if file == LISTING and "/" not in name:
            try:
                listing = _listing(store, f"{CHECKPOINTS}/{name}")
            except Damaged:
                continue
            if listing is not None:
                found[name] = listing
    return found


def _listing(store: ObjectStore, folder: str) -> Listing | None:
    contents = store.read(f"{folder}/{LISTING}")
    return None if contents is None else Listing.of(contents)
