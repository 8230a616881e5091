"""Finds the newest complete checkpoint of a run, and reports damage in newer ones. Does not import torch.

Checkpoints are ordered by the number in their listing, which counts the checkpoints of a run. Neither the file `latest` nor file times are
used.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.checkpoint.listing import LISTING, Damaged, check_listing, flush, read_listing, write_latest
from mtpctl.checkpoint.reading import DCP_METADATA, shard_sizes
from mtpctl.errors import UserError

ENGINE_FILE, RUN_FILE, BUFFER_FILE, FORMAT_FILE = "engine.json", "run.json", "buffer.jsonl", "metadata.json"
"""Files of a checkpoint. ENGINE_FILE: the trainer's record. RUN_FILE: the state of the run. BUFFER_FILE: groups of samples that are not
trained on yet. FORMAT_FILE: megatron-core's description of the format."""
PARTIAL, REPLACED, DAMAGED = ".partial", ".replaced", ".damaged"
"""Suffixes of checkpoints that are being written, being replaced, or damaged."""
_DAMAGED_NAME = re.compile(rf"{re.escape(DAMAGED)}(-\d+)?$")


@dataclass(frozen=True)
class Choice:
    """The newest complete checkpoint of a folder.

    path: None if the folder has no checkpoint. damaged: newer checkpoints, each with its damage.
    """

    path: Path | None
    damaged: list[tuple[Path, Damaged]] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Messages to the user about damaged checkpoints."""
        return [f"{path}/{error}; {self.path.name} is used instead" for path, error in self.damaged if self.path is not None]


def list_checkpoints(root: Path) -> list[Path]:
    """All checkpoints under `root`, newest first; some may be damaged. Excludes those being written and those marked as damaged."""
    return sorted(_checkpoint_folders(root), key=number_of, reverse=True)


def find_complete_checkpoint(root: Path, *, verify_checksums: bool) -> Choice:
    """Find the newest complete checkpoint under `root`. `verify_checksums`: compare files with their checksums, not only sizes.

    Raises UserError if every checkpoint is damaged.
    """
    damaged: list[tuple[Path, Damaged]] = []
    for path in list_checkpoints(root):
        try:
            check_checkpoint(path, verify_checksums=verify_checksums)
            return Choice(path, damaged)
        except Damaged as error:
            if not path.exists():  # A running job has deleted it in the meantime.
                return find_complete_checkpoint(root, verify_checksums=verify_checksums)
            damaged.append((path, error))
    if damaged:
        newest_path, newest_error = damaged[0]
        older = f", and so are all older ones ({len(damaged) - 1})" if len(damaged) > 1 else ""
        raise UserError(
            f"{newest_path}/{newest_error}: the checkpoint is incomplete{older}; restore the file, or begin the run again with "
            f"`mtpctl train {root.parent} --start-over`, which keeps the existing files"
        )
    return Choice(None)


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint under `root` whose files all have their saved sizes; None without checkpoints.

    Compares sizes, and checksums of small files. Raises UserError if every checkpoint is damaged.
    """
    return find_complete_checkpoint(root, verify_checksums=False).path


def check_checkpoint(path: Path, *, verify_checksums: bool) -> None:
    """Raise Damaged if a checkpoint is incomplete or damaged, and UserError if its listing has another format.

    With `verify_checksums`, also raises UserError if its metadata is a pickle that may run code.
    """
    listing = read_listing(path)
    if listing is None:
        raise Damaged(LISTING, "is missing")
    check_listing(path, listing, verify_checksums=verify_checksums)
    if verify_checksums and DCP_METADATA in listing.files:
        shard_sizes(path)  # Rejects unsafe pickles: a listing does not prove who wrote the file.


def prepare_resume(root: Path) -> Choice:
    """Find the checkpoint to resume from, rename damaged ones so that they are not overwritten, and write `latest`.

    If a crash interrupted the replacement of a checkpoint, the replaced checkpoint gets its name back. The caller must hold the run's lock.
    """
    for path in root.glob(f"*{REPLACED}"):
        if not (final := path.with_name(path.name.removesuffix(REPLACED))).exists():
            path.rename(final)
    choice = find_complete_checkpoint(root, verify_checksums=True)
    for path, _ in choice.damaged:
        mark_damaged(path)
    if choice.path is not None:
        write_latest(choice.path)
    return choice


def publish_checkpoint(path: Path, *, keep: int, needed: Collection[str] = ()) -> None:
    """Point `latest` to `path`, and delete old checkpoints, except the `keep - 1` newest before `path` and those in `needed`.

    Checkpoints that are newer than `path`, or were marked as damaged, are never deleted.
    """
    write_latest(path)
    flush(path.parent)
    older = [checkpoint for checkpoint in list_checkpoints(path.parent) if checkpoint != path and number_of(checkpoint) < number_of(path)]
    for path_to_delete in [checkpoint for checkpoint in older[keep - 1 :] if checkpoint.name not in needed]:
        shutil.rmtree(path_to_delete)
    for replaced in path.parent.glob(f"*{REPLACED}"):
        if replaced.with_name(replaced.name.removesuffix(REPLACED)).exists():
            shutil.rmtree(replaced)


def mark_damaged(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is kept but never used."""
    names = (f"{path.name}{DAMAGED}{'' if count == 1 else f'-{count}'}" for count in range(1, 1 << 16))
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(target)
    flush(target.parent)


def damaged_in(root: Path) -> list[Path]:
    """The checkpoints under `root` that were marked as damaged."""
    return sorted(path for path in root.glob(f"*{DAMAGED}*") if path.is_dir() and _DAMAGED_NAME.search(path.name))


def next_number(root: Path) -> int:
    """The number for the next checkpoint in `root`: one more than the largest one there."""
    folders = root.iterdir() if root.is_dir() else ()
    numbers = (number_of(path) for path in folders if path.is_dir() and _is_checkpoint(path))
    return 1 + int(max((number for number in numbers if number != math.inf), default=0))


def number_of(path: Path) -> float:
    """The number of a checkpoint. One that cannot be read sorts as the newest, so that its damage is reported.

    Raises UserError if another version of mtpctl saved it.
    """
    try:
        listing = read_listing(path)
        return int(json.loads((path / ENGINE_FILE).read_bytes())["number"]) if listing is None else listing.number
    except (Damaged, OSError, ValueError, TypeError, KeyError):
        return math.inf


def _checkpoint_folders(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        return
    for path in root.iterdir():
        final = path.with_name(path.name.removesuffix(REPLACED))
        if path.name.endswith(PARTIAL) or _DAMAGED_NAME.search(path.name) or (final != path and final.exists()):
            continue
        if path.is_dir() and _is_checkpoint(path):
            yield path


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder has any file of a checkpoint, so that damaged ones are recognized."""
    return any((path / name).exists() for name in (LISTING, ENGINE_FILE, RUN_FILE, FORMAT_FILE, DCP_METADATA))
