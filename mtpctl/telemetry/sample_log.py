"""Samples of a run as text, in `samples/*.jsonl` of the run directory and in the report.

A row is one response: its prompt, its parts (turns of the model and of the environment), reward, weight versions and drafts. A thread
writes the rows, so the run never waits for the disk; rows that arrive faster than the disk accepts them are dropped. The first and the
newest files are kept.

The report shows samples with filters by step, kind and reward, but without scripts: the filters are `<select>` elements, and a CSS rule for
each option hides the other samples. So the page works when it is opened from the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict, TypeGuard

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from mtpctl.errors import UserError
from mtpctl.samples import Sample
from mtpctl.telemetry.metrics_file import DISK_FULL_TIMEOUT_S

Kind = Literal["update", "eval", "dropped"]
"""`update`: trained on; `eval`: response to a held-out problem; `dropped`: its group is not trained on, for the reason in `note`."""


def _check_writable(text: str) -> str:
    text.encode()  # raises ValueError for a lone surrogate, which cannot be written to a file
    return text


Text = Annotated[str, AfterValidator(_check_writable)]
Count = Annotated[int, Field(ge=0, le=sys.maxsize)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
FILE_BYTES = 4 << 20
MAX_FILES = 8
MAX_CHARACTERS = 16_000
"""Maximum characters of a text; the middle of a longer one is removed."""
_MAX_QUEUED = 64
"""Maximum number of calls of `write` that wait for the disk."""
_RETRY_S = 1.0
"""Seconds between attempts to write rows to a full disk."""


class Part(TypedDict):
    """Consecutive tokens of a response that come from the model or from the environment: their text and count."""

    by: Literal["model", "environment"]
    text: Text
    tokens: Count


class Drafts(TypedDict):
    """Counts of a response's draft tokens; engines do not report which tokens were drafted. `steps`: verification steps."""

    drafted: Count
    accepted: Count
    accepted_by_position: list[Count]
    steps: Count


class SampleRow(TypedDict):
    """One response. `set`: the held-out set of an evaluation. `versions`: [begin, end, version] over the response's tokens.

    `session` counts the starts of the run, and `batch` the calls of `write` in one session; the rows of an update are one batch.
    """

    step: Count
    kind: Kind
    set: Text
    prompt_id: Text
    group: Text
    index: int
    prompt: Text
    answer: Text
    parts: list[Part]
    tokens: Count
    reward: Finite | None
    reward_parts: dict[Text, Finite]
    environment_reward: Finite | None
    finish_reason: Text | None
    versions: list[Annotated[list[int], Field(min_length=3, max_length=3)]]
    drafts: Drafts
    note: Text
    session: NotRequired[Count]
    batch: NotRequired[Count]
    time: NotRequired[Finite]


def sample_row(
    sample: Sample, decode: Callable[[Sequence[int]], str], *, step: int, kind: Kind, answer: str = "", held_out: str = "", note: str = ""
) -> SampleRow:
    """The row of one sample. `answer`: the answer of its problem. `held_out`: the name of its held-out set."""
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
        "parts": split_by_author(sample, decode),
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


def split_by_author(sample: Sample, decode: Callable[[Sequence[int]], str]) -> list[Part]:
    """The response split by its loss mask: 1 for the model, 0 for the environment."""
    parts: list[Part] = []
    begin, ids, mask = 0, sample.response_ids, sample.loss_mask
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[begin]:
            text = shortened(decode(ids[begin:end]))
            parts.append({"by": "model" if mask[begin] else "environment", "text": text, "tokens": end - begin})
            begin = end
    return parts


def spaced_by_reward(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` of the samples, evenly spaced by reward rank, including the lowest and the highest."""
    return evenly_spaced(sorted(samples, key=lambda sample: sample.reward or 0.0), count)


def evenly_spaced[T](items: list[T], count: int) -> list[T]:
    """`count` of the items, including the first and the last."""
    if count <= 1 or len(items) <= count:
        return items[:count]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def shortened(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text, or its two ends if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


def response_text(row: SampleRow) -> str:
    """The response as one text, with parts of the environment in ⟦ ⟧."""
    return "".join(part["text"] if part["by"] == "model" else f"⟦{part['text']}⟧" for part in row["parts"])


LogTable = Callable[[list[SampleRow]], None]
"""Logs rows of one step to a tracker, as a table."""


class SampleLog:
    """Appends rows to the newest file of a folder and passes them to `tables`, in its own thread.

    `dropped` counts rows that arrived too fast, or could not be written to the file or to one of the tables. `warning` reports them.
    """

    def __init__(self, folder: Path, session: int, tables: Sequence[LogTable] = ()) -> None:
        self.folder, self.session, self.dropped, self.warning = folder, session, 0, ""
        self._tables = tables
        self._batches = 0
        self._queue: queue.Queue[list[SampleRow] | None] = queue.Queue(_MAX_QUEUED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="samples", daemon=True)
        self._thread.start()

    def write(self, rows: list[SampleRow]) -> None:
        """Write the rows asynchronously."""
        try:
            self._queue.put_nowait(rows)
        except queue.Full:
            self._drop(rows, "they arrived faster than they could be written")

    def close(self) -> None:
        """Wait until all rows are written, as far as the disk accepts them. A second call does nothing."""
        if self._thread.is_alive():
            self._closing.set()
            self._queue.put(None)
            self._thread.join()

    def _write_all(self) -> None:
        while (rows := self._queue.get()) is not None:
            try:
                self._batches += 1
                stamp = {"session": self.session, "batch": self._batches, "time": time.time()}
                self._append_retrying("".join(json.dumps({**stamp, **row}) + "\n" for row in rows))
                for table in self._tables:
                    table(rows)
            except Exception as error:
                # A failure to write samples does not abort the run; it is reported at the end.
                self._drop(rows, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _drop(self, rows: list[SampleRow], reason: str) -> None:
        self.dropped += len(rows)
        self.warning = f"{self.dropped} samples are missing in samples/ or a table; the last one because {reason}"

    def _append_retrying(self, lines: str) -> None:
        """Append the lines, waiting for space on a full disk. Raises OSError after `DISK_FULL_TIMEOUT_S`, or if the log closes first."""
        deadline = time.monotonic() + DISK_FULL_TIMEOUT_S
        while True:
            try:
                return self._append(lines)
            except OSError:
                if self._closing.wait(_RETRY_S) or time.monotonic() >= deadline:
                    raise

    def _append(self, lines: str) -> None:
        self.folder.mkdir(exist_ok=True)
        files = _files(self.folder)
        number = int(files[-1].stem) if files else 0
        if files and (files[-1].stat().st_size >= FILE_BYTES or not _is_complete(files[-1])):
            number += 1
        path = self.folder / f"{number:06d}.jsonl"
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, size)  # the lines will be written again
            raise
        for path in _files(self.folder)[1 : 1 - MAX_FILES]:
            path.unlink()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())


def _is_complete(path: Path) -> bool:
    """Whether the last line is complete; a killed process may leave an incomplete one."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read_samples(run_dir: Path) -> list[SampleRow]:
    """The samples of a run in order of their steps. A repeated step has only the samples of its last repetition.

    An incomplete last line is skipped. Raises UserError for any other invalid line.
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
            if is_sample_row(row):
                rows.append(row)
            elif line and number < len(lines):
                raise UserError(f"{path}:{number}: not a sample; remove the line")
    return sorted(_without_repeats(rows), key=lambda row: (row["step"], row["kind"] == "eval"))


@cache
def _row_adapter() -> TypeAdapter[SampleRow]:
    return TypeAdapter(SampleRow)


def is_sample_row(row: object) -> TypeGuard[SampleRow]:
    """Whether a value read from a file is a sample, with finite numbers and without lone surrogates, which cannot be written."""
    try:
        _row_adapter().validate_python(row, strict=True)
    except ValidationError:
        return False
    return True


def _without_repeats(rows: list[SampleRow]) -> list[SampleRow]:
    """Remove the rows of steps that a later session repeated, and of updates and evaluations that a restarted trainer repeated.

    A dropped group has the step of the next update. If that is the first step of a later session, the group may have been dropped before
    the checkpoint, so it is kept.
    """
    first_steps: dict[int, int] = {}
    last_session: dict[tuple[int, str, str], int] = {}
    repeated_from = _repeated_from(rows)
    for row in rows:
        session = row.get("session", 0)
        first_steps[session] = min(first_steps.get(session, row["step"]), row["step"])
        key = (row["step"], row["kind"], row["set"])
        last_session[key] = max(last_session.get(key, 0), session)

    def is_current(row: SampleRow) -> bool:
        session, step = row.get("session", 0), row["step"]
        repeated = last_session[step, row["kind"], row["set"]] > session or repeated_from[_batch_of(row)] <= step
        if repeated and row["kind"] != "dropped":
            return False
        return not any(later > session and first_step < step for later, first_step in first_steps.items())

    return [row for row in rows if is_current(row)]


def _repeated_from(rows: list[SampleRow]) -> dict[tuple[int, int], int]:
    """For each (session, batch), the smallest step of the later updates in that session; `sys.maxsize` if there are none.

    After a restart of the trainer, later updates of the session repeat steps. A batch was repeated if its step is not below this one.
    """
    trained = {_batch_of(row): row["step"] for row in rows if row["kind"] == "update"}
    repeated_from: dict[tuple[int, int], int] = {}
    smallest_so_far: dict[int, int] = {}  # by session, from its last batch backwards
    for session, batch in sorted(set(map(_batch_of, rows)), reverse=True):
        repeated_from[session, batch] = smallest_so_far.setdefault(session, sys.maxsize)
        smallest_so_far[session] = min(smallest_so_far[session], trained.get((session, batch), sys.maxsize))
    return repeated_from


def _batch_of(row: SampleRow) -> tuple[int, int]:
    return row.get("session", 0), row.get("batch", 0)


MAX_SAMPLES = 320
MAX_SHOWN_CHARACTERS = 4000
MAX_BANDS = 5
SHOWN_PROMPT_CHARACTERS = 90
"""Number of last characters of the prompt that a collapsed sample shows."""
KINDS = {"update": "trained on", "eval": "held-out", "dropped": "dropped"}


def samples_section(rows: Sequence[SampleRow]) -> str:
    """The section as HTML; empty without samples. If there are many steps, evenly spaced ones are shown."""
    shown_rows = rows_of_spaced_steps(rows, MAX_SAMPLES)
    if not shown_rows:
        return ""
    steps = list(dict.fromkeys(row["step"] for row in shown_rows))
    bands = reward_bands([row["reward"] for row in shown_rows if row["reward"] is not None])
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in shown_rows)]
    filters = (
        _select("step", "Step", [(str(step), str(step)) for step in reversed(steps)])
        + _select("kind", "Kind", [(kind, KINDS[kind]) for kind in kinds])
        + _select("band", "Reward", [(str(index), label) for index, (_, label) in enumerate(bands)])
    )
    rules = _filter_rules("step", map(str, steps)) + _filter_rules("kind", kinds) + _filter_rules("band", map(str, range(len(bands))))
    count = f", {len(shown_rows)} of {len(rows)} samples of the run" if len(shown_rows) < len(rows) else f", {len(shown_rows)} samples"
    newest_first = sorted(shown_rows, key=lambda row: -row["step"])
    return (
        f'<section class="card samples" id="samples"><h2>Samples{count}</h2>'
        f"<style>{rules}</style>"
        f'<div class="filters">{filters}</div><div class="list">{"".join(_article(row, bands) for row in newest_first)}</div></section>'
    )


def rows_of_spaced_steps(rows: Sequence[SampleRow], limit: int) -> list[SampleRow]:
    """About `limit` rows: all rows of evenly spaced steps."""
    steps = sorted({row["step"] for row in rows})
    count = max(2, limit * len(steps) // max(len(rows), 1))
    if len(rows) <= limit:
        return list(rows)
    selected_steps = set(evenly_spaced(steps, count))
    return [row for row in rows if row["step"] in selected_steps]


def reward_bands(rewards: Sequence[float]) -> list[tuple[float, str]]:
    """Reward bands as (upper end, label), lowest first: single values if there are few, else quantiles."""
    values = sorted(set(rewards))
    if len(values) <= MAX_BANDS:
        return [(value, f"{value:g}") for value in values]
    ordered = sorted(rewards)
    bands: list[tuple[float, str]] = []
    begin = values[0]
    for end in sorted({ordered[round((i + 1) * (len(ordered) - 1) / MAX_BANDS)] for i in range(MAX_BANDS)}):
        bands.append((end, f"{begin:.3g} to {end:.3g}" if begin < end else f"{end:.3g}"))
        begin = min((value for value in values if value > end), default=end)
    return bands


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options)
    return f'<label>{label} <select class="{name}"><option value="">all</option>{rows}</select></label>'


def _filter_rules(name: str, values: Iterable[str]) -> str:
    return "".join(
        f'.samples:has(select.{name} option[value="{value}"]:checked) .sample:not([data-{name}="{value}"]){{display:none}}'
        for value in values
    )


def _article(row: SampleRow, bands: Sequence[tuple[float, str]]) -> str:
    reward = row["reward"]
    band = "" if reward is None else str(next((i for i, (end, _) in enumerate(bands) if reward <= end), len(bands) - 1))
    titles = {"model": "", "environment": ' title="the environment, {} tokens"'}
    parts = "".join(
        f'<span class="{part["by"]}"{titles[part["by"]].format(part["tokens"])}>{_text(part["text"])}</span>' for part in row["parts"]
    )
    head = " · ".join(escape(fact) for fact in sample_facts(row))
    answer = f'<p class="asked">expected <b>{_text(row["answer"])}</b></p>' if row["answer"] else ""
    note = f'<p class="asked">{escape(row["note"])}</p>' if row["note"] else ""
    value = "–" if reward is None else f"{reward:.3g}"
    return (
        f'<details class="sample" data-step="{row["step"]}" data-kind="{row["kind"]}" data-band="{band}"><summary><b>{value}</b> {head}'
        f"<em>{escape(last_words(row['prompt']))}</em></summary>"
        f'<div class="prompt">{_text(row["prompt"])}</div><div class="response">{parts}</div>{answer}{note}</details>'
    )


def last_words(text: str) -> str:
    """The last words of a prompt in one line, because a prompt usually ends with its question."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_PROMPT_CHARACTERS else "… " + line[-SHOWN_PROMPT_CHARACTERS:].partition(" ")[2]


def _text(text: str) -> str:
    return escape(shortened(text, MAX_SHOWN_CHARACTERS), quote=False)


def sample_facts(row: SampleRow) -> list[str]:
    """The sample's origin, reward parts, length, end, weight versions and drafts, in a few words each."""
    origins = {"update": f"update {row['step']}", "eval": f"held-out {row['set']}".strip() + f" at {row['step']}"}
    parts = [origins.get(row["kind"], f"dropped before update {row['step']}")]
    parts += [f"{name} {value:.3g}" for name, value in row["reward_parts"].items()]
    if row["environment_reward"] is not None:
        parts.append(f"environment reward {row['environment_reward']:.3g}")
    turns = sum(part["by"] == "environment" for part in row["parts"])
    parts.append(f"{row['tokens']} tokens" + (f" and {turns} environment turn(s)" if turns else ""))
    if row["finish_reason"]:
        parts.append(f"ended by {row['finish_reason']}")
    versions = list(dict.fromkeys(version for _, _, version in row["versions"]))
    if versions:
        parts.append(f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}")
    drafts = row["drafts"]
    if drafts["drafted"]:
        parts.append(f"{drafts['accepted']} of {drafts['drafted']} drafts accepted")
    return parts
