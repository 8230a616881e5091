"""Samples of a run to read: what the model wrote, in `samples/*.jsonl` of the run directory.

A row is one response: its prompt, its parts (the model's turns and the environment's answers), reward, weight versions and drafts. A
thread writes the rows, so that the run never waits for the disk; rows that come faster than the disk takes them are left out. Of the files
the first and the newest ones are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, TypeGuard, get_args

from mtpctl.errors import UserError
from mtpctl.samples import Sample
from mtpctl.telemetry.metrics_file import PATIENCE_S

Kind = Literal["update", "eval", "dropped"]
"""`update`: trained on; `eval`: of a held-out problem; `dropped`: of a group that is not trained on, for the reason in `note`."""
FILE_BYTES = 4 << 20
MOST_FILES = 8
MOST_CHARACTERS = 16_000
"""Characters of one text; the middle of a longer one is left out."""
_WAITING = 64
"""Calls that may wait for the disk."""
_AGAIN_S = 1.0
"""Seconds after which rows that the disk did not take are tried again."""


class Part(TypedDict):
    """Consecutive tokens of a response by the model or by the environment: their text and count."""

    by: Literal["model", "environment"]
    text: str
    tokens: int


class Drafts(TypedDict):
    """Draft tokens of a response: counts, since no engine says which of its tokens were drafted. `steps`: verification steps."""

    drafted: int
    accepted: int
    accepted_by_position: list[int]
    steps: int


class SampleRow(TypedDict):
    """One response to read. `set` is the held-out set of an evaluation; `versions` are [begin, end, version] over the response's tokens.

    `session` counts the starts of the run, and `batch` what was written together in one: the rows of an update are of one batch.
    """

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
    batch: NotRequired[int]
    time: NotRequired[float]


def sample_row(
    sample: Sample, decode: Callable[[Sequence[int]], str], *, step: int, kind: Kind, answer: str = "", held_out: str = "", note: str = ""
) -> SampleRow:
    """The row of one sample. answer: the problem's; held_out: the name of its set."""
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
    """`count` of the samples, evenly spread over their rewards, the lowest and the highest among them."""
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


def response_text(row: SampleRow) -> str:
    """The response as one text, with the environment's parts between ⟦ and ⟧."""
    return "".join(part["text"] if part["by"] == "model" else f"⟦{part['text']}⟧" for part in row["parts"])


Tables = Callable[[list[SampleRow]], None]
"""Shows rows of one step elsewhere, as a table."""


class SampleLog:
    """Appends rows to the newest file of a folder and hands them to `tables`, from a thread of its own.

    `left_out` counts rows that came too fast, or that the disk or a table did not take; `told` says so in one line.
    """

    def __init__(self, folder: Path, session: int, tables: Sequence[Tables] = ()) -> None:
        self.folder, self.session, self.left_out, self.told = folder, session, 0, ""
        self._tables = tables
        self._batches = 0
        self._queue: queue.Queue[list[SampleRow] | None] = queue.Queue(_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="samples", daemon=True)
        self._thread.start()

    def write(self, rows: list[SampleRow]) -> None:
        """Have the rows written. Returns at once."""
        try:
            self._queue.put_nowait(rows)
        except queue.Full:
            self._leave_out(rows, "they came faster than they could be written")

    def close(self) -> None:
        """Wait until everything is written that the disk takes. A second call does nothing."""
        if self._thread.is_alive():
            self._closing.set()
            self._queue.put(None)
            self._thread.join()

    def _write_all(self) -> None:
        while (rows := self._queue.get()) is not None:
            try:
                self._batches += 1
                stamp = {"session": self.session, "batch": self._batches, "time": time.time()}
                self._append_patiently("".join(json.dumps({**stamp, **row}) + "\n" for row in rows))
                for table in self._tables:
                    table(rows)
            except Exception as error:
                # Samples are no reason to end a run. A disk that stays full ends it by its metrics; the rest is told at the end.
                self._leave_out(rows, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _leave_out(self, rows: list[SampleRow], why: str) -> None:
        self.left_out += len(rows)
        self.told = f"{self.left_out} samples were left out of samples/ or a table; the last, {why}"

    def _append_patiently(self, lines: str) -> None:
        """Append the lines, once a disk that is full has room for them. Raises OSError after `PATIENCE_S`, or where it is closed before."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._append(lines)
            except OSError:
                if self._closing.wait(_AGAIN_S) or time.monotonic() >= end:
                    raise

    def _append(self, lines: str) -> None:
        self.folder.mkdir(exist_ok=True)
        files = _files(self.folder)
        number = int(files[-1].stem) if files else 0
        if files and (files[-1].stat().st_size >= FILE_BYTES or not _whole(files[-1])):
            number += 1
        path = self.folder / f"{number:06d}.jsonl"
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, size)  # of these lines, which will be written again, none are left
            raise
        for old in _files(self.folder)[1 : 1 - MOST_FILES]:
            old.unlink()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())


def _whole(path: Path) -> bool:
    """Whether the last line is complete; a killed process may leave one that is not."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read_samples(run_dir: Path) -> list[SampleRow]:
    """The samples of a run in the order of their steps; of a step that was done again, by a resume or not, those of the last time.

    A line that was not written completely is left out. Raises UserError for any other line that is no row.
    """
    rows: list[SampleRow] = []
    for path in _files(run_dir / "samples"):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line else None
            except (ValueError, RecursionError):
                row = None
            if is_row(row):
                rows.append(row)
            elif line and number < len(lines):
                raise UserError(f"{path}:{number}: not a sample; remove the line")
    return sorted(_without_repeats(rows), key=lambda row: (row["step"], row["kind"] == "eval"))


def is_row(row: object) -> TypeGuard[SampleRow]:
    """Whether a value read from a file has the keys and types of a sample, with finite numbers and writable text."""
    if not isinstance(row, dict) or not SampleRow.__required_keys__ <= row.keys() or row["kind"] not in get_args(Kind):
        return False
    drafts, versions, parts = row["drafts"], row["versions"], row["parts"]
    return (
        all(map(_is_count, [row["step"], row["tokens"], row.get("session", 0), row.get("batch", 0)]))
        and isinstance(row["index"], int)
        and all(map(_is_text, [row["set"], row["prompt_id"], row["group"], row["prompt"], row["answer"], row["note"]]))
        and (row["finish_reason"] is None or _is_text(row["finish_reason"]))
        and all(value is None or _is_number(value) for value in (row["reward"], row["environment_reward"], row.get("time")))
        and isinstance(row["reward_parts"], dict)
        and all(_is_text(name) and _is_number(value) for name, value in row["reward_parts"].items())
        and isinstance(parts, list)
        and all(isinstance(part, dict) and Part.__required_keys__ <= part.keys() for part in parts)
        and all(part["by"] in ("model", "environment") and _is_text(part["text"]) and _is_count(part["tokens"]) for part in parts)
        and isinstance(versions, list)
        and all(isinstance(span, list) and len(span) == 3 and all(map(_is_number, span)) for span in versions)
        and isinstance(drafts, dict)
        and all(_is_count(drafts.get(name)) for name in ("drafted", "accepted", "steps"))
        and isinstance(accepted := drafts.get("accepted_by_position"), list)
        and all(map(_is_count, accepted))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= sys.maxsize


def _is_text(value: object) -> bool:
    """Whether it is text without lone surrogates, which cannot be written to a file."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _without_repeats(rows: list[SampleRow]) -> list[SampleRow]:
    """Without what a later session did again, and without updates and evaluations that were lost with a trainer and made again.

    A group that was dropped before the update at which a later session began may have been dropped before the checkpoint: it stays.
    """
    begins: dict[int, int] = {}
    done: dict[tuple[int, str, str], int] = {}
    again = _made_again(rows)
    for row in rows:
        session = row.get("session", 0)
        begins[session] = min(begins.get(session, row["step"]), row["step"])
        key = (row["step"], row["kind"], row["set"])
        done[key] = max(done.get(key, 0), session)

    def stands(row: SampleRow) -> bool:
        session, step = row.get("session", 0), row["step"]
        made_again = done[step, row["kind"], row["set"]] > session or again[_place(row)] <= step
        if made_again and row["kind"] != "dropped":
            return False
        return not any(later > session and begin < step for later, begin in begins.items())

    return [row for row in rows if stands(row)]


def _made_again(rows: list[SampleRow]) -> dict[tuple[int, int], int]:
    """For each session and batch the least step that a later batch of the session trained: what was trained from there on was lost."""
    trained = {_place(row): row["step"] for row in rows if row["kind"] == "update"}
    least: dict[tuple[int, int], int] = {}
    later: dict[int, int] = {}  # of each session, from its last batch back
    for session, batch in sorted(set(map(_place, rows)), reverse=True):
        least[session, batch] = later.setdefault(session, sys.maxsize)
        later[session] = min(later[session], trained.get((session, batch), sys.maxsize))
    return least


def _place(row: SampleRow) -> tuple[int, int]:
    return row.get("session", 0), row.get("batch", 0)
