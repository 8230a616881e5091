"""Copies a run to object storage, and fetches it. A copy has the layout of a run directory:

    recipe.resolved.yaml, metrics.jsonl, replicas.json           as of the newest checkpoint
    model/, tokenizer/, start/, reference/                       if the run has them; written once
    checkpoints/NAME/…                                           the `keep` newest checkpoints
    checkpoints/latest                                           the name of the newest checkpoint

Objects cannot be renamed atomically, so the listing (`mtpctl.checkpoint.listing`) marks a folder as complete: it is written last and
removed first. A folder that has no listing, or that differs from it, is not used. Checkpoints on disk have the same listing, so a damaged
checkpoint is not copied, and a fetched one can be verified again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.checkpoint.finding import mark_damaged
from mtpctl.checkpoint.listing import (
    LISTING,
    Damaged,
    Entry,
    Listing,
    entry_of,
    files_in,
    flush,
    pointer_of,
    read_listing,
    save_listing,
    write_latest,
)
from mtpctl.cluster.object_store import ObjectMissing, ObjectStore, UrlField
from mtpctl.errors import UserError

COPY_URL_FIELD = UrlField("train.checkpoint_copy", "remove the key")
CHECKPOINTS = "checkpoints"
_STATIC_FOLDERS = ("model", "tokenizer", "start", "reference")
"""Folders that do not change after a run has written them."""
_RUN_FILES = ("recipe.resolved.yaml", "metrics.jsonl", "replicas.json")


type Stamp = tuple[int, int, int]
"""Inode, size and modification time of a file, which change with its contents."""


@dataclass
class CopyWriter:
    """Updates the copy of the run in `run_dir`. Caches the entries of files, so unchanged files are read and sent only once."""

    store: ObjectStore
    run_dir: Path
    keep: int
    _entries: dict[Path, tuple[Stamp, Entry]] = field(default_factory=dict)
    _sent_entries: dict[str, Entry] = field(default_factory=dict)

    def copy(self, checkpoint: Path) -> int:
        """Copy a checkpoint and the run's other files, then delete all but the `keep` newest checkpoints of the copy.

        Older checkpoints are deleted only after the new one is complete. Returns the number of bytes sent, without `_RUN_FILES`.

        Raises:
            StoreFailed: if the store fails.
            OSError: if a file cannot be read, or is replaced while it is copied.
            Damaged: if the checkpoint differs from its listing.
        """
        sent_bytes = sum(self._copy_folder(name, 0) for name in _STATIC_FOLDERS if (self.run_dir / name).is_dir())
        for name in _RUN_FILES:
            if (file := self.run_dir / name).is_file():
                text = file.read_bytes()
                # An incomplete last line is not copied yet.
                self.store.write(name, text[: text.rfind(b"\n") + 1])
        name = f"{CHECKPOINTS}/{checkpoint.name}"
        other_listings = {
            other_name: listing for other_name, listing in _list_in_store(self.store).items() if other_name != checkpoint.name
        }
        number = 1 + max((listing.number for listing in other_listings.values()), default=0)
        sent_bytes += self._copy_folder(name, number)
        self.store.write(f"{CHECKPOINTS}/{pointer_of(checkpoint).name}", checkpoint.name.encode())
        newest = sorted(other_listings, key=lambda other_name: other_listings[other_name].number, reverse=True)[: self.keep - 1]
        self._delete_others({checkpoint.name, *newest})
        self._entries = {file: cached for file, cached in self._entries.items() if file.exists()}
        return sent_bytes

    def _copy_folder(self, name: str, number: int) -> int:
        """Copy a folder, unless the copy is identical. Returns the number of bytes sent."""
        folder = self.run_dir / name
        files = {file.relative_to(folder).as_posix(): file for file in files_in(folder)}
        try:
            saved_listing = read_listing(folder)
        except Damaged as error:
            raise Damaged(f"{name}/{error.file}", error.damage) from error
        current_listing = Listing(
            max(number, saved_listing.number if saved_listing else 0),
            {relative: self._file_entry(file) for relative, file in files.items()},
        )
        if saved_listing is not None:
            _check_unchanged(name, saved_listing, current_listing)
        marker = f"{name}/{LISTING}"
        try:
            stored = _read_listing_in_store(self.store, name)
        except Damaged:
            stored = None
        if stored is not None and stored.files == current_listing.files:
            return 0
        self.store.remove([marker])
        sent_bytes = 0
        for relative, entry in current_listing.files.items():
            if self._sent_entries.get(f"{name}/{relative}") != entry:
                self.store.put(files[relative], f"{name}/{relative}")
                self._sent_entries[f"{name}/{relative}"] = entry
                sent_bytes += entry.size
        if changed := [relative for relative, file in files.items() if self._file_entry(file) != current_listing.files[relative]]:
            self._sent_entries.pop(f"{name}/{changed[0]}")
            raise OSError(f"{files[changed[0]]} was replaced while it was copied")
        self.store.write(marker, current_listing.to_json())
        return sent_bytes

    def _file_entry(self, file: Path) -> Entry:
        stat = file.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if (cached := self._entries.get(file)) is None or cached[0] != stamp:
            self._entries[file] = cached = (stamp, entry_of(file))
        return cached[1]

    def _delete_others(self, keep: set[str]) -> None:
        folders: dict[str, list[str]] = {}
        for name in self.store.names(CHECKPOINTS):
            _, _, relative = name.partition("/")
            if "/" in relative and (folder := relative.partition("/")[0]) not in keep:
                folders.setdefault(folder, []).append(name)
        for folder, names in folders.items():
            self.store.remove([f"{CHECKPOINTS}/{folder}/{LISTING}", *names])
            self._sent_entries = {
                name: entry for name, entry in self._sent_entries.items() if not name.startswith(f"{CHECKPOINTS}/{folder}/")
            }


def newest_copy(store: ObjectStore) -> str | None:
    """The name of the newest checkpoint of the copy that has a listing; None if there is none."""
    checkpoints = _list_in_store(store)
    return max(checkpoints, key=lambda name: checkpoints[name].number, default=None)


def fetch_run(store: ObjectStore, run_dir: Path, report: Callable[[str], None]) -> str | None:
    """Fetch the newest intact checkpoint and the run's other files into a run directory without checkpoints.

    Damaged checkpoints are reported and skipped. The checkpoint comes last: if it is there, so is everything else. A retry reuses the files
    that were already fetched.

    Returns:
        The name of the checkpoint; None if the copy has none.

    Raises:
        UserError: if all checkpoints, or another folder of the copy, are damaged.
        StoreFailed: if the store fails.
    """
    checkpoints = _list_in_store(store)
    if not checkpoints:
        return None
    for folder in _STATIC_FOLDERS:
        try:
            if (listing := _read_listing_in_store(store, folder)) is not None and not (run_dir / folder).exists():
                _fetch_folder(store, folder, listing, run_dir)
        except Damaged as error:
            raise UserError(f"{COPY_URL_FIELD}: {store.url}/{folder}/{error}; restore the file, or name another URL") from error
    for file in _RUN_FILES:
        if (contents := store.read(file)) is not None:
            (run_dir / file).write_bytes(contents)
    for name in sorted(checkpoints, key=lambda name: checkpoints[name].number, reverse=True):
        report(f"fetching {name}, {checkpoints[name].nbytes / (1 << 20):,.1f} MiB, from {store.url}")
        try:
            _fetch_folder(store, f"{CHECKPOINTS}/{name}", checkpoints[name], run_dir)
        except Damaged as error:
            report(f"{name} in {store.url} is damaged: {error}")
            continue
        write_latest(run_dir / CHECKPOINTS / name)
        return name
    raise UserError(f"{COPY_URL_FIELD}: every checkpoint in {store.url} is damaged; restore their files, or name another URL")


def _fetch_folder(store: ObjectStore, name: str, listing: Listing, run_dir: Path) -> None:
    """Fetch a folder into a temporary folder, then rename it. Raises Damaged if a file is missing or differs from the listing."""
    target = run_dir / name
    partial = target.with_name(f"{target.name}.partial")
    for file, entry in listing.files.items():
        path = partial / file
        if path.is_file() and entry_of(path) == entry:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get(f"{name}/{file}", path)
        except ObjectMissing as error:
            raise Damaged(file, "is missing") from error
        if (fetched := entry_of(path)) != entry:
            path.unlink()
            raise Damaged(
                file, f"has {fetched.size:,} bytes with checksum {fetched.checksum}, and {entry.size:,} with {entry.checksum} were written"
            )
        flush(path)
    if name.partition("/")[0] in (CHECKPOINTS, "reference"):
        save_listing(partial, listing)
    if name.startswith(f"{CHECKPOINTS}/") and target.exists():
        mark_damaged(target)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    flush(target.parent)


def _check_unchanged(folder: str, saved: Listing, current: Listing) -> None:
    """Raise Damaged if the files of a folder differ from its saved listing."""
    for name, entry in saved.files.items():
        if (current_entry := current.files.get(name)) is None:
            raise Damaged(f"{folder}/{name}", "is missing")
        if current_entry != entry:
            raise Damaged(f"{folder}/{name}", "has changed since it was saved")


def _list_in_store(store: ObjectStore) -> dict[str, Listing]:
    """The checkpoints of the copy that have a listing."""
    checkpoints = {}
    for object_name in store.names(CHECKPOINTS):
        name, _, file = object_name.removeprefix(f"{CHECKPOINTS}/").rpartition("/")
        if file == LISTING and "/" not in name:
            try:
                listing = _read_listing_in_store(store, f"{CHECKPOINTS}/{name}")
            except Damaged:
                continue
            if listing is not None:
                checkpoints[name] = listing
    return checkpoints


def _read_listing_in_store(store: ObjectStore, folder: str) -> Listing | None:
    contents = store.read(f"{folder}/{LISTING}")
    return None if contents is None else Listing.of(contents, f"{store.url}/{folder}/{LISTING}")
