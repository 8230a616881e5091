"""Finds the newest complete checkpoint of a run, and reports damage in newer ones. Does not import torch.

Checkpoints are ordered by the number in their listing, which counts the checkpoints of a run. Older checkpoints without a listing are
ordered by the progress of their run. Neither the file `latest` nor file times are used.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mtpctl.checkpoint.listing import LISTING, Damaged, check_listing, flush, read_listing, write_latest
from mtpctl.checkpoint.reading import METADATA, shard_sizes
from mtpctl.errors import UserError

ENGINE, RUN, BUFFER, FORMAT = "engine.json", "run.json", "buffer.jsonl", "metadata.json"
"""Files of a checkpoint: the engine's record, the run's state, groups of samples that are not trained yet, megatron-core's format."""
PARTIAL, REPLACED, DAMAGED = ".partial", ".replaced", ".damaged"
"""Suffixes of checkpoints that are being written, being replaced, or damaged."""
_SET_ASIDE = re.compile(rf"{re.escape(DAMAGED)}(-\d+)?$")

type Order = tuple[float, int, int, bool]
"""Sort key of a checkpoint: its number, and the run's progress (completed stages, step, whether the current stage had ended)."""


@dataclass(frozen=True)
class Choice:
    """The newest complete checkpoint of a folder.

    path: None if the folder has no checkpoint. damaged: newer checkpoints, each with its damage. verified: whether it has checksums.
    """

    path: Path | None
    damaged: list[tuple[Path, Damaged]] = field(default_factory=list)
    verified: bool = True

    @property
    def lines(self) -> list[str]:
        """Messages to the user about damaged and unverified checkpoints."""
        assert self.path is not None or not self.damaged
        lines = [f"{path}/{damage}; {self.path.name} is used instead" for path, damage in self.damaged if self.path is not None]
        if not self.verified and self.path is not None:
            lines.append(f"{self.path} was saved without checksums, by an earlier release: its contents are not verified")
        return lines


def list_checkpoints(root: Path) -> list[Path]:
    """All checkpoints under `root`, newest first; some may be damaged. Excludes those being written and those set aside."""
    return sorted(_folders(root), key=order_of, reverse=True)


def choose(root: Path, *, contents: bool) -> Choice:
    """Find the newest complete checkpoint under `root`. `contents`: compare files with their checksums, not only sizes.

    Raises UserError if every checkpoint is damaged.
    """
    damaged: list[tuple[Path, Damaged]] = []
    for path in list_checkpoints(root):
        try:
            return Choice(path, damaged, check(path, contents=contents, of_run=True))
        except Damaged as damage:
            if not path.exists():  # A running job has deleted it in the meantime.
                return choose(root, contents=contents)
            damaged.append((path, damage))
    if damaged:
        first, what = damaged[0]
        others = f", nor {'is' if len(damaged) == 2 else 'are'} the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise UserError(
            f"{first}/{what}: it is not whole{others}; restore the file, or begin the run again with `mtpctl train {root.parent} "
            "--start-over`, which keeps what is there"
        )
    return Choice(None)


def newest(root: Path) -> Path | None:
    """The newest checkpoint under `root` without missing, truncated or (if small) corrupted files; None if there is no checkpoint.

    Raises UserError if every checkpoint is damaged.
    """
    return choose(root, contents=False).path


def check(path: Path, *, contents: bool, of_run: bool = False) -> bool:
    """Check that a checkpoint is complete. Returns whether it has checksums. `of_run`: also require the files from which a run resumes.

    Raises Damaged if it is not complete, UserError if its metadata may run code.
    """
    listing = read_listing(path)
    if listing is not None:
        check_listing(path, listing, contents=contents)
        if contents and METADATA in listing.files:
            shard_sizes(path)  # Rejects unsafe pickles: a listing does not prove who wrote the file.
        return True
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # Reported below.
        if _number_in_record(path):
            raise Damaged(LISTING, "is missing")
    for name in (FORMAT, ENGINE, RUN):
        _check_json(path, name, needed=of_run or name == FORMAT)
    for name, least in shard_sizes(path).items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(name, f"cannot be read ({error.strerror})" if (path / name).exists() else "is missing") from error
        if size < least:
            raise Damaged(name, f"has {size:,} bytes, and {least:,} were saved")
    if contents:
        _check_lines(path, BUFFER)
    return False


def settle(root: Path) -> Choice:
    """Choose the checkpoint to resume from, and rename damaged ones so that they are not overwritten.

    The caller must hold the run's lock.
    """
    for path in root.glob(f"*{REPLACED}"):
        if not (own := path.with_name(path.name.removesuffix(REPLACED))).exists():
            path.rename(own)
    choice = choose(root, contents=True)
    for path, _ in choice.damaged:
        set_aside(path)
    if choice.path is not None:
        write_latest(choice.path)
    return choice


def publish_checkpoint(path: Path, *, keep: int, needed: Collection[str] = ()) -> None:
    """Point `latest` to `path`, and delete old checkpoints: `path`, the `keep - 1` newest before it and those in `needed` remain.

    Checkpoints that are newer than `path`, or were set aside as damaged, are never deleted.
    """
    write_latest(path)
    flush(path.parent)
    others = [other for other in list_checkpoints(path.parent) if other != path and is_older(other, path)]
    for old in [other for other in others[keep - 1 :] if other.name not in needed]:
        shutil.rmtree(old)
    for aside in path.parent.glob(f"*{REPLACED}"):
        if aside.with_name(aside.name.removesuffix(REPLACED)).exists():
            shutil.rmtree(aside)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is kept but never used. Returns its new path."""
    names = (f"{path.name}{DAMAGED}{'' if count == 1 else f'-{count}'}" for count in range(1, 1 << 16))
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(target)
    flush(target.parent)
    return target


def damaged_in(root: Path) -> list[Path]:
    """The checkpoints under `root` that were set aside."""
    return sorted(path for path in root.glob(f"*{DAMAGED}*") if path.is_dir() and _SET_ASIDE.search(path.name))


def next_number(root: Path) -> int:
    """The number for the next checkpoint in `root`: one more than the largest one there."""
    numbers = (order_of(path)[0] for path in root.iterdir() if path.is_dir() and _is_checkpoint(path)) if root.is_dir() else iter(())
    return 1 + int(max((number for number in numbers if number != math.inf), default=0))


def is_older(path: Path, than: Path) -> bool:
    """Whether the run saved `path` before `than`. Checkpoints without numbers are compared by progress."""
    one, other = order_of(path), order_of(than)
    if one[0] == other[0]:
        return one[1:] < other[1:]
    return one[0] < other[0] and (one[0] > 0 or one[1:] <= other[1:])


def order_of(path: Path) -> Order:
    """The sort key of a checkpoint. A checkpoint that cannot be read sorts as the newest, so that its damage is reported."""
    try:
        state = json.loads((path / RUN).read_bytes())
        stage, ended = str(state["stage"]), list(state["ended"])
        progress = len([each for each in ended if each != stage]), int(state["step"]), stage in ended
    except (OSError, ValueError, KeyError, TypeError):
        progress = None
    try:
        listing = read_listing(path)
        number = _number_in_record(path) if listing is None else listing.number
    except (Damaged, OSError, ValueError, TypeError, AttributeError):
        number = None
    if number is None or (number == 0 and progress is None):
        return math.inf, 0, 0, False
    return number, *(progress or (0, 0, False))


def _number_in_record(path: Path) -> int:
    """The number in the engine's record, a fallback if the listing is missing; 0 in older records.

    Raises OSError, ValueError, TypeError or AttributeError if the record cannot be read.
    """
    return int(json.loads((path / ENGINE).read_bytes()).get("number", 0))


def _folders(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        return
    for path in root.iterdir():
        own = path.with_name(path.name.removesuffix(REPLACED))
        if path.name.endswith(PARTIAL) or _SET_ASIDE.search(path.name) or (own != path and own.exists()):
            continue
        if path.is_dir() and _is_checkpoint(path):
            yield path


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder has any file of a checkpoint, so that damaged ones are recognized."""
    return any((path / name).exists() for name in (LISTING, ENGINE, RUN, FORMAT, METADATA))


def _check_json(path: Path, name: str, *, needed: bool) -> None:
    try:
        if not isinstance(json.loads((path / name).read_bytes()), dict):
            raise ValueError("not an object")
    except FileNotFoundError as error:
        if needed:
            raise Damaged(name, "is missing") from error
    except OSError as error:
        raise Damaged(name, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise Damaged(name, "is truncated or overwritten") from error


def _check_lines(path: Path, name: str) -> None:
    """Check that every line of a file is JSON. A missing file is valid."""
    try:
        with (path / name).open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    json.loads(line)
                except ValueError as error:
                    raise Damaged(name, f"is truncated or overwritten at line {number}") from error
    except FileNotFoundError:
        return
    except OSError as error:
        raise Damaged(name, f"cannot be read ({error.strerror})") from error
