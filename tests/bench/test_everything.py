"""Measurements on the cards of one machine: in order, side by side where there is room, each on cards of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from mtpctl.bench import everything
from mtpctl.bench.arms import Experiment
from mtpctl.bench.cycle_model import write_cycle_model
from mtpctl.bench.everything import Outcome, Task, chosen, exit_code, run_all, table
from mtpctl.bench.plans import ON_A_LAPTOP, ON_CARDS
from mtpctl.bench.rollout_engines import TINY
from mtpctl.cli import bench
from mtpctl.cli.app import main
from mtpctl.errors import UserError


def task(name: str, cards: int = 1, *, minutes: float = 1.0, after: tuple[str, ...] = ()) -> Task:
    return Task(name, cards, minutes, f"fake {name} {{out}}", after)


@pytest.fixture(autouse=True)
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In mtpctl's place: notes when it began and ended and on which cards; a name says what it does."""
    script = tmp_path / "python"
    script.write_text(
        f"""#!{sys.executable}
import os, pathlib, signal, subprocess, sys, time
name, out = sys.argv[4], pathlib.Path(sys.argv[5])
note = lambda what: open(out / "notes", "a").write(f"{{what}} {{name}} {{os.environ.get('CUDA_VISIBLE_DEVICES', '-')}}\\n")
note("begin")
if name == "stuck":
    child = subprocess.Popen(["sleep", "600"])
    (out / "child").write_text(str(child.pid))
    time.sleep(600)
if name == "polite":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(600)
time.sleep(0.3)
print("{{}}")
note("end")
sys.exit({{"missed": 6, "broken": 5}}.get(name, 0))
"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(everything.sys, "executable", str(script))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def run(tmp_path: Path, plan: list[Task], cards: int, minutes: float | None = None) -> tuple[list[Outcome], list[list[str]]]:
    outcomes = asyncio.run(run_all(plan, cards=cards, out=tmp_path / "out", minutes=minutes, say=lambda line: None))
    notes = tmp_path / "out" / "notes"
    return outcomes, [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []


def test_what_there_is_room_for_runs_side_by_side_on_cards_of_its_own(tmp_path: Path) -> None:
    outcomes, notes = run(tmp_path, [task("a", 2), task("b"), task("c")], cards=4)
    assert [kind for kind, *_ in notes] == ["begin"] * 3 + ["end"] * 3
    used = {name: cards for kind, name, cards in notes}
    assert used == {"a": "0,1", "b": "2", "c": "3"}
    assert all(o.code == 0 and 0.3 <= o.seconds < 30 for o in outcomes)
    assert (tmp_path / "out" / "a.json").read_text() == "{}\n"


def test_nothing_overtakes_what_waits_for_more_cards(tmp_path: Path) -> None:
    _, notes = run(tmp_path, [task("a"), task("b", 2), task("c")], cards=2)
    assert [(kind, name) for kind, name, _ in notes][:4] == [("begin", "a"), ("end", "a"), ("begin", "b"), ("end", "b")]


def test_on_a_processor_they_run_one_at_a_time_and_see_no_card(tmp_path: Path) -> None:
    _, notes = run(tmp_path, [task("a", 0), task("b", 0)], cards=0)
    assert [(kind, name, cards) for kind, name, cards in notes] == [(kind, name, "-") for name in "ab" for kind in ("begin", "end")]


def test_what_comes_after_another_waits_for_it_and_is_left_out_where_it_failed(tmp_path: Path) -> None:
    outcomes, notes = run(
        tmp_path, [task("first"), task("then", after=("first",)), task("broken"), task("never", after=("broken",))], cards=4
    )
    assert notes.index(["end", "first", "0"]) < [note[:2] for note in notes].index(["begin", "then"])
    assert [o.verdict for o in outcomes] == ["ok", "ok", "failed (5)", "comes after broken"]
    assert exit_code(outcomes) == 5 and "comes after broken" in table(outcomes)


def test_what_does_not_fit_is_left_out_by_name(tmp_path: Path) -> None:
    outcomes, notes = run(tmp_path, [task("wide", 4), task("long", minutes=9), task("short", minutes=0.5)], cards=2, minutes=1)
    assert [o.verdict for o in outcomes] == ["needs 4 cards", "its 9 minutes do not fit any more", "ok"]
    assert {name for _, name, _ in notes} == {"short"}


def test_a_missed_bound_is_a_result(tmp_path: Path) -> None:
    outcomes, _ = run(tmp_path, [task("missed"), task("then", after=("missed",))], cards=1)
    assert [o.verdict for o in outcomes] == ["a bound was missed", "ok"] and exit_code(outcomes) == 6


def test_one_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    (outcome,), _ = run(tmp_path, [task("stuck", minutes=0.02)], cards=1)
    assert outcome.verdict == "ended after its 0.02 minutes" and exit_code([outcome]) == 5
    child = int((tmp_path / "out" / "child").read_text())
    for _ in range(50):
        if not _alive(child):
            return
        time.sleep(0.1)
    pytest.fail("a process that it had started goes on")


def test_one_that_stops_cleanly_when_its_time_is_up_did_not_succeed(tmp_path: Path) -> None:
    outcomes, _ = run(tmp_path, [task("polite", minutes=0.02), task("then", after=("polite",))], cards=1)
    assert [o.verdict for o in outcomes] == ["ended after its 0.02 minutes", "comes after polite"]
    assert exit_code(outcomes) == 5


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_choice_brings_what_it_needs() -> None:
    plan = [task("model"), task("a", after=("model",)), task("b")]
    assert [each.name for each in chosen(plan, ["a"])] == ["model", "a"]
    assert chosen(plan, []) == plan
    with pytest.raises(UserError, match="--only: there is no c; there are model, a, b"):
        chosen(plan, ["c"])


@pytest.mark.parametrize("each", [*ON_CARDS, *ON_A_LAPTOP], ids=lambda each: each.name)
def test_our_commands_are_commands_and_their_recipes_fit(each: Task, tmp_path: Path) -> None:
    group, name, *arguments = each.words(tmp_path)
    assert group == "bench"
    benches: Any = typer.main.get_command(bench.app)
    options = benches.commands[name].make_context(each.name, arguments).params
    if "recipe" not in options:
        return
    if "/cycle7b" in each.command:
        write_cycle_model(tmp_path / "cycle7b", TINY, acceptance=0.75, device="cpu")
    Experiment(options["recipe"], options["overlay"] or [], options["sets"] or [], tmp_path).load("probe", 0)


def test_the_plan_is_printed_as_one_would_type_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "all", "--plan", "--only", "mtp", "--out", "here"])
    assert "mtpctl bench mtp tiny_mtp --out here/mtp" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "all", "--plan", "--on", "cards", "--only", "mtp-0"])
    assert capsys.readouterr().out.startswith("mtp-0 (1 card, 10 min): mtpctl bench mtp mimo_small_mtp")


def test_what_cards_measure_is_not_run_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="5"):
        main(["bench", "all", "--on", "cards", "--only", "logprob", "--out", str(tmp_path)])
    assert "logprob: needs 1 card;" in capsys.readouterr().err


def test_the_model_of_known_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "cycle-model", str(tmp_path / "m"), "--shape", "tiny", "--acceptance", "0.5"])
    assert (tmp_path / "m" / "config.json").is_file() and "right with 50%" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "cycle-model", str(tmp_path / "m"), "--shape", "huge"])


def test_a_model_of_known_answers_that_was_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of another one lies in the folder then."""

    def made(acceptance: float) -> dict[str, bytes]:
        write_cycle_model(tmp_path / "m", TINY, acceptance=acceptance, device="cpu")
        return {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    first = made(0.75)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made(0.25)
    assert made(0.75) == first
