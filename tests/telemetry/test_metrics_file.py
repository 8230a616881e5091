"""`metrics.jsonl`: appended line by line, read whole after any crash."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.telemetry.metrics_file import DISK_FULL_TIMEOUT_S, MetricsFile, read_rows
from tests.fakes.full_disk import full_disk


def row(step: int, **metrics: Any) -> dict[str, Any]:
    return {"time": float(step), "phase": "rl", "step": step, **metrics}


def test_rows_are_readable_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append(row(1, **{"reward/mean": 0.5}))
    assert read_rows(tmp_path / "m.jsonl") == [{"session": 1, **row(1, **{"reward/mean": 0.5})}], "readable before it is closed"
    file.close()


def test_non_finite_values_survive_as_valid_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append(row(1, a=math.nan, b=math.inf, c=-math.inf))
    file.append({"time": 2.0, "event": "note", "message": "NaN"})
    file.close()
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = read_rows(tmp_path / "m.jsonl")
    assert math.isnan(first["a"]) and first["b"] == math.inf and first["c"] == -math.inf
    assert second["message"] == "NaN"


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_incomplete_last_line_is_skipped_and_removed_by_the_next_session(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    for step in (1, 2):
        file.append(row(step))
    file.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert [r["step"] for r in read_rows(path)] == [1]
    again = MetricsFile(path)
    again.append(row(2))
    again.close()
    assert [(r["session"], r["step"]) for r in read_rows(path)] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("line", [b"\xfb", b"[" * 100_000, b"", b'{"step": 1}'])
def test_next_session_moves_a_damaged_line_to_another_file(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    rows = [json.dumps({"session": 1, **row(step)}).encode() + b"\n" for step in (1, 2)]
    path.write_bytes(rows[0] + line + b"\n" + rows[1])
    file = MetricsFile(path)
    file.append(row(3))
    file.close()
    assert file.damaged == [2] and (tmp_path / "m.jsonl.damaged").read_bytes() == line + b"\n"
    assert [(r["session"], r["step"]) for r in read_rows(path)] == [(1, 1), (1, 2), (2, 3)]
    MetricsFile(path).close()
    assert (tmp_path / "m.jsonl.damaged").read_bytes() == line + b"\n", "it is set aside once"


def test_rows_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from mtpctl.telemetry.metrics_file import MetricsFile\n"
        "f = MetricsFile(Path(sys.argv[1])); f.append({'time': 0.0, 'phase': 'rl', 'step': 7}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert [r["step"] for r in read_rows(path)] == [7]


@pytest.mark.parametrize("broken", ["{", "[]", "3", '{"step": 1}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"session": 1, **row(1)}) + f"\n{broken}\n" + json.dumps({"session": 1, **row(2)}) + "\n")
    with pytest.raises(UserError, match=r"m\.jsonl:2: "):
        read_rows(path)


def test_rows_wait_for_room_on_a_disk_that_is_full(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append(row(1))
    size = file.path.stat().st_size
    with full_disk(size + 5):
        for step in (2, 3):
            file.append(row(step))
        assert file.path.stat().st_size == size + 5, "the begin of a line"
        assert [r["step"] for r in read_rows(file.path)] == [1]
    file.append(row(4))
    assert [r["step"] for r in read_rows(file.path)] == [1, 2, 3, 4]
    with full_disk(size):
        file.append(row(5))
    file.close()
    assert [r["step"] for r in read_rows(file.path)] == [1, 2, 3, 4, 5]


def test_full_disk_is_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    now = [0.0]
    monkeypatch.setattr("mtpctl.telemetry.metrics_file.time", SimpleNamespace(monotonic=lambda: now[0]))
    with full_disk():
        file.append(row(1))
        now[0] = DISK_FULL_TIMEOUT_S - 1
        file.append(row(2))
        now[0] = DISK_FULL_TIMEOUT_S
        with pytest.raises(RuntimeFailure, match=r"cannot write .*m\.jsonl: File too large; free space"):
            file.append(row(3))
        file.close()
    assert not file.path.read_text()
