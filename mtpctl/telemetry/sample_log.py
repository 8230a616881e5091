"""Samples of a run to read: what the model wrote, in `samples/*.jsonl` of the run directory.

A row is one response: its prompt, its parts (the model's turns and the environment's answers), reward, weight versions and drafts. Rows
are written by a thread of their own, so that the loop of the run never waits for the disk; where they come faster than the disk takes
them, some are left out. Files are small and there are few of them: the first one stays, so that the beginning can be compared with, and of
the others the newest.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, get_args

from mtpctl.errors import UserError
from mtpctl.samples import Sample

Kind = Literal["update", "eval", "dropped"]
"""`update`: trained on; `eval`: an answer to a held-out problem; `dropped`: of a group that no update is made with, `note` says why."""
FILE_BYTES = 4 << 20
MOST_FILES = 8
MOST_CHARACTERS = 16_000
"""Of one text. The middle of a longer one is left out."""
_WAITING = 64
"""Calls that may wait for the disk."""


class Part(TypedDict):
    """A stretch of a response: `by` the model or the environment, its text, and how many tokens it has."""

    by: Literal["model", "environment"]
    text: str
    tokens: int


class Drafts(TypedDict):
    """Draft tokens of a response: counts, since no engine says which of its tokens were drafted. `steps`: verification steps."""

    drafted: int
    accepted: int
    accepted_by_position: list[int]
    steps: int


class KeptSample(TypedDict):
    """One response to read. `set` is the held-out set of an evaluation; `versions` are [begin, end, version] over the response's tokens."""

    step: int
    kind: Kind
    set: str
    prompt_id: str
    group: str
    index: int
    prompt: str
    answer: str
    parts: list[Part]
    tokens: int
    reward: float | None
    reward_parts: dict[str, float]
    environment_reward: float | None
    finish_reason: str | None
    versions: list[list[int]]
    drafts: Drafts
    note: str
    session: NotRequired[int]
    time: NotRequired[float]


def keep(
    sample: Sample, decode: Callable[[Sequence[int]], str], *, step: int, kind: Kind, answer: str = "", held_out: str = "", note: str = ""
) -> KeptSample:
    """The row of one sample. `answer` is what the problem asked for, `held_out` the name of its set."""
    spec = sample.speculation
    return {
        "step": step,
        "kind": kind,
        "set": held_out,
        "prompt_id": sample.prompt_id,
        "group": sample.group_id,
        "index": sample.index,
        "prompt": shortened(decode(sample.prompt_ids)),
        "answer": shortened(answer),
        "parts": parts_of(sample, decode),
        "tokens": len(sample.response_ids),
        "reward": sample.reward,
        "reward_parts": dict(sample.reward_parts),
        "environment_reward": sample.environment_reward,
        "finish_reason": sample.finish_reason,
        "versions": [[span.start, span.end, span.version] for span in sample.version_spans],
        "drafts": {
            "drafted": spec.drafted,
            "accepted": spec.accepted,
            "accepted_by_position": list(spec.accepted_by_position),
            "steps": spec.steps,
        },
        "note": note,
    }


def parts_of(sample: Sample, decode: Callable[[Sequence[int]], str]) -> list[Part]:
    """The response cut where the loss mask changes: 1 is the model's, 0 the environment's."""
    parts: list[Part] = []
    begin, ids, mask = 0, sample.response_ids, sample.loss_mask
    for place in range(1, len(ids) + 1):
        if place == len(ids) or mask[place] != mask[begin]:
            text = shortened(decode(ids[begin:place]))
            parts.append({"by": "model" if mask[begin] else "environment", "text": text, "tokens": place - begin})
            begin = place
    return parts


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` of the samples, evenly spread over their rewards from the lowest to the highest, both ends among them."""
    ordered = sorted(samples, key=lambda sample: sample.reward or 0.0)
    if count <= 1 or len(ordered) <= count:
        return ordered[:count]
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text, or where it is longer than `most` characters its two ends."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


def response_text(row: KeptSample) -> str:
    """The response as one text, in which what the environment said is between brackets of its own."""
    return "".join(part["text"] if part["by"] == "model" else f"⟦{part['text']}⟧" for part in row["parts"])


Tables = Callable[[list[KeptSample]], None]
"""Shows rows of one step elsewhere, as a table."""


class SampleLog:
    """Appends rows to the newest file of a folder and hands them to `tables`, from a thread of its own.

    `left_out` counts rows that came too fast, found no room on the disk, or were not taken by a table; `told` says so in one line.
    """

    def __init__(self, folder: Path, session: int, tables: Sequence[Tables] = ()) -> None:
        self.folder, self.session, self.left_out, self.told = folder, session, 0, ""
        self._tables = tables
        self._queue: queue.Queue[list[KeptSample] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="samples", daemon=True)
        self._thread.start()

    def write(self, rows: list[KeptSample]) -> None:
        """Have the rows written. Returns at once."""
        try:
            self._queue.put_nowait(rows)
        except queue.Full:
            self._leave_out(rows, "they came faster than they could be written")

    def close(self) -> None:
        """Wait until everything is written. A second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _write_all(self) -> None:
        while (rows := self._queue.get()) is not None:
            try:
                self._append("".join(json.dumps({"session": self.session, "time": time.time(), **row}) + "\n" for row in rows))
                for table in self._tables:
                    table(rows)
            except Exception as error:
                # Samples are no reason to end a run. A full disk ends it by its metrics; the rest is told at the end.
                self._leave_out(rows, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _leave_out(self, rows: list[KeptSample], why: str) -> None:
        self.left_out += len(rows)
        self.told = f"{self.left_out} samples were left out of samples/ or a table; the last, {why}"

    def _append(self, lines: str) -> None:
        self.folder.mkdir(exist_ok=True)
        files = _files(self.folder)
        number = int(files[-1].stem) if files else 0
        if files and (files[-1].stat().st_size >= FILE_BYTES or not _whole(files[-1])):
            number += 1
        with (self.folder / f"{number:06d}.jsonl").open("a", encoding="utf-8") as file:
            file.write(lines)
        for old in _files(self.folder)[1 : 1 - MOST_FILES]:
            old.unlink()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())


def _whole(path: Path) -> bool:
    """Whether the last line is complete: a process that is killed may leave one that is not, and nothing is to be appended to it."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read_samples(run_dir: Path) -> list[KeptSample]:
    """The samples of a run in the order of their steps; of a step that was done twice, after a resume, those of the later one.

    A line that was not written completely is left out. Raises UserError for any other line that is no row.
    """
    rows: list[KeptSample] = []
    for path in _files(run_dir / "samples"):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line else None
            except ValueError:
                row = None
            if isinstance(row, dict) and KeptSample.__required_keys__ <= row.keys() and row["kind"] in get_args(Kind):
                rows.append(row)  # type: ignore[arg-type]
            elif line and number < len(lines):
                raise UserError(f"{path}:{number}: not a sample; remove the line")
    return sorted(_without_repeats(rows), key=lambda row: (row["step"], row["kind"] == "eval"))


def _without_repeats(rows: list[KeptSample]) -> list[KeptSample]:
    begins: dict[int, int] = {}
    done: dict[tuple[int, str, str], int] = {}
    for row in rows:
        session = row.get("session", 0)
        begins[session] = min(begins.get(session, row["step"]), row["step"])
        key = (row["step"], row["kind"], row["set"])
        done[key] = max(done.get(key, 0), session)

    def stands(row: KeptSample) -> bool:
        session, step = row.get("session", 0), row["step"]
        if done[step, row["kind"], row["set"]] > session:
            return False
        return not any(later > session and begin < step for later, begin in begins.items())

    return [row for row in rows if stands(row)]
