"""A JSONL file of samples, written as they finish. A second run appends the missing ones.

Every line contains the recipe's name and a fingerprint of all settings that affect sampling, so a file never mixes samples of
different settings. An incomplete last line after a crash is dropped when the file is opened again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from mtpctl.errors import UserError
from mtpctl.rollout.protocol import SpecStats
from mtpctl.samples import Sample, Speculation

Key = tuple[str, int]
"""Prompt id, and index of the response."""
_LINE_START = b'{"prompt_id": '
"""Start of every line. It distinguishes an incomplete line from other text."""
Row = Mapping[str, Any]
"""A line of the file, parsed from JSON."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of samples: the recipe's name, and all settings that affect sampling, as JSON values."""

    recipe: str
    settings: Mapping[str, object]

    @property
    def fingerprint(self) -> str:
        """12 hex digits of a hash of name and settings."""
        text = json.dumps([self.recipe, dict(self.settings)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(slots=True)
class Tally:
    """Sums over samples. `num_rewarded` counts samples with a reward."""

    samples: int = 0
    tokens: int = 0
    num_rewarded: int = 0
    reward_sum: float = 0.0
    speculation: SpecStats = field(default_factory=SpecStats)
    finish_reasons: dict[str, int] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.samples += 1
        self.tokens += len(row["tokens"])
        self.speculation.add(Speculation(**row["speculation"]), len(row["tokens"]))
        self.finish_reasons[row["finish_reason"]] = self.finish_reasons.get(row["finish_reason"], 0) + 1
        if row["reward"] is not None:
            self.num_rewarded += 1
            self.reward_sum += row["reward"]


class SampleFile:
    """A file of samples, created by `SampleFile.open`. `keys` contains the keys of all its lines, `tally` their sums."""

    def __init__(self, path: Path, origin: Origin, file: FileIO) -> None:
        self.path, self.origin = path, origin
        self.keys: set[Key] = set()
        self.tally = Tally()
        self._file = file

    @classmethod
    def open(cls, path: Path, origin: Origin, prompts: Mapping[str, str]) -> SampleFile:
        """Create the file, or continue one with samples of the same origin. `prompts`: texts by prompt id.

        Raises UserError, without changing the file, if it cannot be written or another process writes it, and if a line is not a sample,
        has another origin, or belongs to a prompt that has changed.
        """
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"--out: {path} cannot be written ({error.strerror}); use another file") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"--out: another process is writing {path}; wait for it, or name another file") from None
        sample_file = cls(path, origin, file)
        try:
            sample_file._read(prompts)
        except BaseException:
            file.close()
            raise
        return sample_file

    def _read(self, prompts: Mapping[str, str]) -> None:
        complete_bytes = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    if line[: len(_LINE_START)] != _LINE_START[: len(line)]:
                        raise _not_a_sample(f"{self.path}:{number}")
                    break
                self._add_line(line, f"{self.path}:{number}", prompts)
                complete_bytes += len(line)
        self._file.truncate(complete_bytes)

    def _add_line(self, line: bytes, location: str, prompts: Mapping[str, str]) -> None:
        try:
            row = json.loads(line)
            origin, key = (row["recipe"], row["fingerprint"]), (row["prompt_id"], row["index"])
            prompt, _ = row["prompt"], hash(key)
            self.tally.add(row)
        except (ValueError, KeyError, TypeError) as error:
            raise _not_a_sample(location) from error
        if origin != (self.origin.recipe, self.origin.fingerprint):
            source = f"recipe {origin[0]}" if origin[0] != self.origin.recipe else "other weights or sampling settings of this recipe"
            raise UserError(f"{location}: was sampled from {source}; name another --out, or remove the file")
        if prompts.get(key[0], prompt) != prompt:
            raise UserError(f"{location}: the prompt {key[0]} has changed; name another --out, or remove the file")
        self.keys.add(key)

    def append(self, sample: Sample, prompt: str, text: str) -> None:
        """Append a finished sample. Raises UserError if the disk is full."""
        row: dict[str, object] = {
            "prompt_id": sample.prompt_id,
            "index": sample.index,
            "prompt": prompt,
            "text": text,
            "tokens": sample.response_ids.tolist(),
            "behaviour_logprobs": sample.behaviour_logprobs.tolist(),
            "loss_mask": sample.loss_mask.tolist(),
            "finish_reason": sample.finish_reason,
            "version_spans": [span.to_dict() for span in sample.version_spans],
            "speculation": asdict(sample.speculation),
            "reward": sample.reward,
            "recipe": self.origin.recipe,
            "fingerprint": self.origin.fingerprint,
        }
        if sample.environment is not None:
            row |= {"environment": asdict(sample.environment), "environment_reward": sample.environment_reward}
        if sample.earlier:
            row["earlier"] = [earlier.to_dict() for earlier in sample.earlier]
        try:
            line = memoryview(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); free disk space, then rerun the command") from error
        self.keys.add((sample.prompt_id, sample.index))
        self.tally.add(row)

    def close(self) -> None:
        """Flush to disk, and release the lock. A file without samples is deleted."""
        os.fsync(self._file.fileno())
        if not self.keys:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _not_a_sample(location: str) -> UserError:
    return UserError(f"{location}: is not a sample that mtpctl rollout wrote; fix or remove the line, or name another --out")
