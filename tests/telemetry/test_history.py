"""A history is what was really trained: parts of a step merged, redone steps once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtpctl.telemetry.metrics_file import build_history, load_history


def row(session: int, phase: str, step: int, time: float, **metrics: float) -> dict[str, Any]:
    return {"session": session, "time": time, "phase": phase, "step": step, **metrics}


def test_parts_of_a_step_are_merged() -> None:
    history = build_history([row(1, "rl", 1, 0.0, loss=1.0), row(1, "rl", 2, 1.0, loss=2.0), row(1, "rl", 1, 2.0, accuracy=0.5)])
    assert [(r.step, r.metrics) for r in history.rows] == [(1, {"loss": 1.0, "accuracy": 0.5}), (2, {"loss": 2.0})]
    assert history.metric_names() == ["loss", "accuracy"]
    assert history.series("accuracy") == [(1, 0.5)]


def test_repeated_steps_of_resumed_session_replace_earlier_ones() -> None:
    first = [row(1, "rl", step, float(step), loss=step * 1.0) for step in (1, 2, 3, 4, 5)]
    second = [row(2, "rl", step, 100.0 + step, loss=step * 10.0) for step in (3, 4)]
    history = build_history([*first, *second])
    assert history.series("loss") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_an_evaluation_at_the_checkpoint_does_not_drop_the_checkpoints_own_step() -> None:
    history = build_history([row(1, "rl", 2, 0.0, loss=2.0), row(1, "rl", 3, 1.0, loss=3.0), row(2, "rl", 2, 9.0, accuracy=0.5)])
    assert [(r.step, r.metrics) for r in history.rows] == [(2, {"loss": 2.0, "accuracy": 0.5})]


def test_resuming_a_phase_keeps_the_order_and_rows_of_earlier_phases() -> None:
    history = build_history([row(1, "sft", 1, 0.0), row(1, "sft", 2, 1.0), row(1, "rl", 1, 2.0), row(2, "rl", 1, 9.0)])
    assert history.phases == ["sft", "rl"]
    assert [(r.phase, r.step) for r in history.rows] == [("sft", 1), ("sft", 2), ("rl", 1)]
    assert history.last_step("sft") == 2 and history.last_step("eval") == 0


def test_session_that_returns_to_an_earlier_phase_discards_later_rows() -> None:
    first = [row(1, "sft", 1, 0.0), row(1, "sft", 2, 1.0), row(1, "rl", 0, 2.0, accuracy=0.5), row(1, "rl", 1, 3.0)]
    history = build_history([*first, row(2, "sft", 2, 9.0)])
    assert [(r.phase, r.step) for r in history.rows] == [("sft", 1), ("sft", 2)]
    history = build_history([*first, row(2, "sft", 2, 9.0), row(2, "rl", 0, 9.5, accuracy=0.25)])
    assert history.series("accuracy") == [(0, 0.25)] and history.last_step("rl") == 0


def test_active_time_leaves_out_the_time_between_sessions() -> None:
    history = build_history([row(1, "rl", 1, 10.0), row(1, "rl", 2, 15.0), row(2, "rl", 3, 1000.0), row(2, "rl", 4, 1002.0)])
    assert history.active_s == 7.0


def test_events_are_separate_from_rows() -> None:
    history = build_history([{"session": 1, "time": 3.0, "event": "restart", "message": "rollout-0"}])
    assert [(e.kind, e.message) for e in history.events] == [("restart", "rollout-0")]
    assert history.rows == []


def test_a_directory_without_metrics(tmp_path: Path) -> None:
    assert load_history(tmp_path).rows == []
