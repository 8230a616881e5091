"""Damage to the files of a run, for the events of `chaos`: flipped bytes, truncated and removed files, a lost pointer."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtpctl.checkpoint.finding import check_checkpoint, damaged_in, list_checkpoints
from mtpctl.checkpoint.listing import LISTING, Damaged, pointer_of

WAYS = ("flip", "flip", "truncate", "remove")
RECORDS = ("recipe.resolved.yaml", "recipe.resolved.yaml", "metrics.jsonl", "metrics.jsonl", "versions.json")
"""Files of a run directory that a start of the run reads, or writes again."""


@dataclass(frozen=True)
class Damage:
    """Damage to a file of the run directory, with the length of the log at that time.

    remedy: the path that the message names for removal or repair if the run does not start with the damage.
    """

    file: Path
    way: str
    logged: int
    remedy: Path | None = None

    @property
    def name(self) -> str:
        """How a line of the log names the file: with its folder, if that is a checkpoint or the model."""
        return f"{self.file.parent.name}/{self.file.name}" if self.file.parent.name != "run" else self.file.name

    def lines(self, log: str) -> list[str]:
        """The lines after the damage that name the file."""
        return [line for line in log[self.logged :].splitlines() if self.name in line]

    def remove(self) -> None:
        """Apply the fix that the error message suggests."""
        assert self.remedy is not None
        if self.remedy.is_dir():
            shutil.rmtree(self.remedy)
        else:
            self.remedy.unlink(missing_ok=True)


def apply(file: Path, way: str, draw: random.Random) -> str:
    """Damage a file. Returns what was done. The times of the file stay, so that only its contents and its size differ."""
    stat, contents = file.stat(), bytearray(file.read_bytes())
    if way == "remove" or not contents:
        file.unlink()
        return "removed"
    if way == "truncate":
        size = draw.randrange(len(contents))
        os.truncate(file, size)
        message = f"truncated to {size} of {len(contents)} bytes"
    else:
        offsets = draw.sample(range(len(contents)), min(len(contents), draw.choice((1, 20))))
        for offset in offsets:
            contents[offset] ^= 1 << draw.randrange(8)
        file.write_bytes(contents)
        message = f"a bit flipped in {len(offsets)} bytes, the first at {min(offsets)}"
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return message


def whole_in(root: Path) -> list[Path]:
    """The checkpoints whose files are as they were saved, the newest first."""
    whole = []
    for path in list_checkpoints(root):
        with suppress(Damaged, OSError):
            check_checkpoint(path, verify_checksums=True)
            whole.append(path)
    return whole


def damage_checkpoint(root: Path, draw: random.Random, logged: int) -> tuple[str, Damage | None]:
    """Damage a file of the newest whole checkpoint, if the one before is whole. Returns what was done."""
    whole = whole_in(root)
    if len(whole) < 2:
        return "no target was there: no second whole checkpoint", None
    file = draw.choice(sorted(path for path in whole[0].iterdir() if path.is_file()))
    way = draw.choice(WAYS)
    try:
        message = apply(file, way, draw)
    except FileNotFoundError:
        return "no target was there: a newer one has taken its place", None
    return f"{whole[0].name}/{file.name}: {message}", Damage(file, way, logged)


def damage_model(run: Path, draw: random.Random, logged: int) -> tuple[str, Damage | None]:
    """Damage a file of the model that the run has created. Removing the folder makes the run create it again."""
    files = sorted(path for path in (run / "model").glob("*") if path.name != LISTING)
    if not files:
        return "no target was there", None
    file, way = draw.choice(files), draw.choice(WAYS)
    return f"model/{file.name}: {apply(file, way, draw)}", Damage(file, way, logged, run / "model")


def damage_record(run: Path, draw: random.Random, logged: int) -> tuple[str, Damage | None]:
    """Damage a file that describes the run. Metrics keep most of their lines, which the tests read."""
    files = [file for name in RECORDS if (file := run / name).exists() and file.stat().st_size]
    if not files:
        return "no target was there", None
    file, way = draw.choice(files), draw.choice(("flip", "truncate"))
    if file.suffix == ".jsonl" and way == "truncate":
        lost = draw.randrange(1, 20)
        os.truncate(file, file.stat().st_size - lost)
        return f"{file.name}: {lost} bytes cut off", None
    if file.suffix == ".jsonl":
        contents = bytearray(file.read_bytes())
        begins = [0, *(match.end() for match in re.finditer(b"\n", contents))][:-1]
        contents[draw.choice(begins)] ^= 1
        file.write_bytes(contents)
        return f"{file.name}: a bit flipped in a line", Damage(file, way, logged)
    message = apply(file, way, draw)
    return f"{file.name}: {message}", Damage(file, way, logged, file) if file.suffix == ".yaml" else None


def damage_pointer(root: Path, draw: random.Random) -> str:
    """Lose the file `latest`, or its contents."""
    pointer, way = pointer_of(root), draw.choice(("removed", "emptied", "overwritten"))
    if way == "removed":
        pointer.unlink(missing_ok=True)
    else:
        pointer.write_text("" if way == "emptied" else "sft-000001")
    return f"latest {way}"


def unnoticed(damages: Sequence[Damage], root: Path, log: str) -> list[str]:
    """What the run should have reported and did not: a line with the file and with what is used instead, and the damaged folder kept.

    A checkpoint that a newer one has replaced before the run went back to any is not looked at. Nor is a recipe that could still be read:
    the run compares it with its own, and writes it again.
    """
    retained = [re.sub(r"\.damaged(-\d+)?$", "", path.name) for path in damaged_in(root)]
    mistakes = []
    for damage in damages:
        folder, lines = damage.file.parent, damage.lines(log)
        if folder.parent.name != "checkpoints":
            if not lines and damage.file.suffix != ".yaml":
                mistakes.append(f"{damage.name}: {damage.way} was not reported")
            continue
        message = any(f"{folder.name}/" in line and "is used instead" in line for line in log[damage.logged :].splitlines())
        if re.search(rf"from {folder.name}\b", log[damage.logged :]) and not message:
            mistakes.append(f"{damage.name}: {damage.way} was not reported, and the run went on from it")
        elif message and folder.name not in retained:
            mistakes.append(f"{folder.name} was damaged, and is not kept")
    return mistakes
