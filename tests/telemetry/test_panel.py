"""Progress output: lines without a terminal, a panel in a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import termios
import time

import pytest
from rich.console import Console

from mtpctl.telemetry.metrics_file import Row
from mtpctl.telemetry.panel import LivePanel, Pace, PlainLines, disable_echo, sparkline


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def screen(width: int = 200, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal, color_system=None), out


def test_time_left_follows_the_pace_of_the_latest_steps() -> None:
    clock = Clock()
    pace = Pace({"rl": 100}, clock)
    pace.mark(1, "rl")
    assert pace.remaining_s("rl") is None
    for step in range(2, 51):
        clock.now += 2.0 if step > 20 else 50.0
        pace.mark(step, "rl")
    assert pace.remaining_s("rl") == pytest.approx(100.0)
    clock.now += 1.0
    assert pace.remaining_s("rl") == pytest.approx(99.0)
    assert pace.remaining_s("sft") is None


def test_stage_draft_shows_the_acceptance_of_greedy_and_sampled_drafts() -> None:
    """Of as many as are trained."""
    metrics = {"mtp/loss_1": 2.5, "perf/tokens_per_s": 1200.0, "mtp/trunk_nll": 3.0}
    metrics |= {f"mtp/expected_rate{kind}_{k}": rate / k for kind, rate in (("", 0.2), ("_greedy", 0.5)) for k in (1, 2)}
    console, out = screen()
    PlainLines(console, {"draft": 4}, Clock()).row(1, metrics, "draft")
    assert out.getvalue().splitlines() == [
        "draft 1/4  mtp 2.5  greedy 1 50.0%  greedy 2 25.0%  sampled 1 20.0%  sampled 2 10.0%  trainer 1.2k tok/s"
    ]
    console, out = screen(terminal=True)
    panel = LivePanel(console, "x", {"draft": 4}, Clock(), draw=False)
    panel.row(1, metrics, "draft")
    console.print(panel.render())
    assert all(rate in out.getvalue() for rate in ("50.0%", "25.0%", "20.0%", "10.0%"))


def test_plain_output_is_one_line_per_row() -> None:
    console, out = screen(width=40)
    clock = Clock()
    lines = PlainLines(console, {"rl": 10}, clock)
    for step in (1, 2):
        clock.now += 30.0
        lines.row(step, {"reward/mean": 0.5, "rollout/spec_accept_rate": 0.812, "rollout/tokens_per_s": 2400.0, "other": 1.0}, "rl")
    lines.event("restart", "rollout-0 [died] was started again")
    assert out.getvalue().splitlines() == [
        "rl 1/10  reward 0.5  accept 81.2%  rollout 2.4k tok/s",
        "rl 2/10  reward 0.5  accept 81.2%  rollout 2.4k tok/s  left 4 min 00 s",
        "restart: rollout-0 [died] was started again",
    ]


def test_remaining_time_is_upper_bound_for_stage_that_may_end_early() -> None:
    console, out = screen(width=100)
    clock = Clock()
    early = ["sft"]
    lines = PlainLines(console, {"sft": 500, "rl": 10}, clock, early_stopping_stages=early)
    panel = LivePanel(console, "run", {"sft": 500, "rl": 10}, clock, early_stopping_stages=early, draw=False)
    for phase in ("sft", "rl"):
        for step in (1, 2):
            clock.now += 1.0
            lines.row(step, {}, phase)
            panel.row(step, {}, phase)
        console.print(panel.render())
    message = out.getvalue()
    assert "left at most 8 min 18 s" in message and "at most 8 min 18 s left of SFT" in message
    assert "left 8 s" in message and "about 8 s left of RL" in message


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_shows_both_sides_in_any_width(width: int) -> None:
    console, out = screen(width, terminal=True)
    clock = Clock()
    panel = LivePanel(console, "tiny [x]", {"sft": 5, "rl": 10}, clock, draw=False)
    console.print(panel.render())
    panel.row(5, {"sft/loss": 0.5}, "sft")
    for step in (1, 2, 3):
        clock.now += 10.0
        panel.row(step, {"reward/mean": step / 10, "rollout/spec_accept_rate": 0.8, "perf/tokens_per_s": 5200.0}, "rl")
    panel.event("checkpoint", "step 3 [saved]")
    out.seek(0)
    out.truncate()
    console.print(panel.render())
    text = out.getvalue()
    assert "tiny [x]" in text and "3/10" in text and "5/5" in text and "80.0%" in text and "checkpoint" in text
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 80:
        assert "about 1 min 10 s left of RL" in text and "step 3 [saved]" in text and "5.2k tok/s" in text


def test_unfiltered_reward_is_preferred() -> None:
    console, out = screen(100, terminal=True)
    panel = LivePanel(console, "run", {"rl": 2}, draw=False)
    panel.row(1, {"reward/mean": 0.5, "reward/unfiltered_mean": 0.875}, "rl")
    console.print(panel.render())
    assert "0.875" in out.getvalue() and "0.5 " not in out.getvalue()


def test_resumed_panel_starts_with_earlier_rows() -> None:
    console, out = screen(100, terminal=True)
    panel = LivePanel(console, "run", {"sft": 400, "rl": 20}, draw=False)
    rows = [Row("sft", step, 0.0, 1, {"sft/loss": 1.0}) for step in (62, 63)]
    panel.resume([*rows, *(Row("rl", step, 0.0, 1, {"reward/mean": step / 8}) for step in range(1, 8))], "rl")
    console.print(panel.render())
    text = out.getvalue()
    assert "63/63" in text and "7/20" in text and "▁▂▃▅▆▇█" in text.replace("▄", "") and "0.875" in text


def test_path_at_the_end_of_an_event_is_shown_whole() -> None:
    console, out = screen(80, terminal=True)
    panel = LivePanel(console, "run", {"rl": 10}, draw=False)
    path = "/scratch/users/someone/experiments/" + "long-name/" * 8 + "checkpoints/rl-000010"
    panel.event("checkpoint", f"saved {path}")
    console.print(panel.render())
    shown = "".join(line.strip("│ ") for line in out.getvalue().splitlines())
    assert path in shown


def test_waiting_reasons_are_shown_until_resolved() -> None:
    console, out = screen(60, terminal=True)
    panel = LivePanel(console, "run", {"rl": 2}, draw=False)
    panel.waiting(["rollout: starting, 34 s · Loading weights 50%" + " and more" * 9])
    console.print(panel.render())
    assert "waiting  rollout: starting, 34 s" in out.getvalue()
    assert all(len(line) <= 60 for line in out.getvalue().splitlines())
    out.truncate(0)
    panel.waiting([])
    console.print(panel.render())
    assert "waiting" not in out.getvalue()


def test_plain_output_repeats_what_it_waits_for_at_intervals() -> None:
    console, out = screen()
    clock = Clock()
    lines = PlainLines(console, {}, clock)
    for second in range(32):
        clock.now = float(second)
        lines.waiting([f"rollout: starting, {second} s", "trainer"])
    lines.waiting([])
    assert out.getvalue().splitlines() == [f"waiting: rollout: starting, {second} s; trainer" for second in (15, 30)]


def test_panel_is_redrawn_from_top_after_resize() -> None:
    """Its lines are folded then, and moving up by as many as there were leaves some of them."""
    console, out = screen(80, terminal=True)
    panel = LivePanel(console, "run", {"rl": 2})
    console.width = 60
    deadline = time.monotonic() + 20
    while "\x1b[H\x1b[J" not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    panel.close()
    fresh = out.getvalue().rpartition("\x1b[H\x1b[J")[2]
    assert out.getvalue().count("\x1b[H\x1b[J") == 1
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in fresh.splitlines()) == 60


def test_terminal_echo_is_disabled_during_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(theirs)[3]
        undo = disable_echo()
        assert before & termios.ECHO and not termios.tcgetattr(theirs)[3] & termios.ECHO
        undo()
        assert termios.tcgetattr(theirs)[3] == before
    os.close(ours)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    disable_echo()()  # where there is no terminal


def test_the_live_panel_starts_and_stops() -> None:
    console, out = screen(80, terminal=True)
    panel = LivePanel(console, "run", {"rl": 2})
    panel.row(1, {"reward/mean": 0.25}, "rl")
    panel.close()
    panel.close()
    assert "0.25" in out.getvalue()


def test_sparkline_scales_values_and_skips_nan() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 40) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0], 40) == "▁▁"
    assert sparkline([], 40) == ""
    assert sparkline([float("nan")], 40) == ""
    assert sparkline([0.0, float("nan"), 1.0], 40) == "▁ █"
    assert len(sparkline([float(i) for i in range(1000)], 40)) == 40
