"""Logged samples: contents of a row, and writing that neither blocks nor grows without bound."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.samples import Sample, Speculation
from mtpctl.telemetry import sample_log
from mtpctl.telemetry.sample_log import (
    SampleLog,
    SampleRow,
    last_words,
    read_samples,
    response_text,
    reward_bands,
    rows_of_spaced_steps,
    sample_facts,
    sample_row,
    samples_section,
    shortened,
    spaced_by_reward,
)
from tests.fakes.sample_rows import kept


def sample(reward: float | None = 0.5, response: str = "a") -> Sample:
    created = Sample("p1", "g1", [ord(c) for c in "2+2="], reward=reward)
    created.append([ord(c) for c in response], [0.0] * len(response), 3)
    return created


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def row(step: int, response: str = "a", kind: sample_log.Kind = "update") -> SampleRow:
    return sample_row(sample(response=response), text, step=step, kind=kind)


def test_row_separates_turns_of_the_model_from_those_of_the_environment() -> None:
    created = sample(response="ask")
    created.append([ord(c) for c in "tool"], [0.0] * 4, 3, trained=False)
    created.append([ord("4")], [0.0], 4)
    created.speculation = Speculation(drafted=5, accepted=2, accepted_by_position=[2, 0], steps=3)
    created.reward_parts = {"exact": 1.0}
    retained = sample_row(created, text, step=7, kind="update", answer="4")
    assert [(part["by"], part["text"], part["tokens"]) for part in retained["parts"]] == [
        ("model", "ask", 3),
        ("environment", "tool", 4),
        ("model", "4", 1),
    ]
    assert response_text(retained) == "ask⟦tool⟧4"
    assert (retained["step"], retained["prompt"], retained["answer"], retained["reward"], retained["reward_parts"]) == (
        7,
        "2+2=",
        "4",
        0.5,
        {"exact": 1.0},
    )
    assert retained["versions"] == [[0, 7, 3], [7, 8, 4]]
    assert retained["drafts"] == {"drafted": 5, "accepted": 2, "accepted_by_position": [2, 0], "steps": 3}


def test_a_response_without_a_token_has_no_parts() -> None:
    assert sample_row(sample(response=""), text, step=1, kind="eval")["parts"] == []


def test_the_samples_that_are_kept_reach_from_the_lowest_reward_to_the_highest() -> None:
    samples = [sample(i / 10) for i in (7, 0, 3, 9, 5, 1)]
    assert [each.reward for each in spaced_by_reward(samples, 3)] == [0.0, 0.3, 0.9]
    assert [each.reward for each in spaced_by_reward(samples, 1)] == [0.0]
    assert len(spaced_by_reward(samples, 20)) == 6


def test_a_long_text_keeps_both_ends() -> None:
    short = shortened("a" * 50 + "b" * 50, 20)
    assert short == "a" * 10 + "\n[… 80 characters …]\n" + "b" * 10
    assert shortened("ab", 2) == "ab"


def test_samples_are_read_in_order_of_steps(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([row(2)])
    log.write([row(1, kind="eval")])  # A concurrent evaluation may end after the next update.
    log.close()
    assert [(each["step"], each["session"]) for each in read_samples(tmp_path)] == [(1, 1), (2, 1)]
    assert log.dropped == 0


def test_samples_of_a_repeated_step_replace_the_earlier_ones(tmp_path: Path) -> None:
    for session, steps in ((1, (1, 2, 3, 4)), (2, (3,))):
        log = SampleLog(tmp_path / "samples", session)
        for step in steps:
            log.write([row(step, f"session {session}")])
        log.close()
    assert [(each["step"], response_text(each)) for each in read_samples(tmp_path)] == [
        (1, "session 1"),
        (2, "session 1"),
        (3, "session 2"),
    ]


def test_groups_dropped_before_a_resume_remain_in_the_log(tmp_path: Path) -> None:
    """The checkpoint may have been taken after it."""
    for session in (1, 2):
        log = SampleLog(tmp_path / "samples", session)
        log.write([row(4, f"session {session}", "dropped")])
        log.write([row(5, f"session {session}", "dropped")])
        log.close()
    result = [(each["step"], response_text(each)) for each in read_samples(tmp_path)]
    assert result == [(4, "session 1"), (4, "session 2"), (5, "session 2")]


def test_samples_of_repeated_updates_replace_lost_ones(tmp_path: Path) -> None:
    """What was dropped meanwhile was not lost."""
    log = SampleLog(tmp_path / "samples", 1)
    log.write([row(1, "kept")])
    log.write([row(2, "lost"), row(2, "lost too")])
    log.write([row(3, "dropped", "dropped")])
    log.write([row(3, "lost"), row(3, "lost too")])
    log.write([row(3, "lost", "eval")])
    log.write([row(2, "again")])
    log.close()
    result = [(each["step"], response_text(each)) for each in read_samples(tmp_path)]
    assert result == [(1, "kept"), (2, "again"), (3, "dropped")]


def test_files_are_small_and_few_and_the_first_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "FILE_BYTES", 2000)
    monkeypatch.setattr(sample_log, "MAX_FILES", 3)
    log = SampleLog(tmp_path / "samples", 1)
    for step in range(60):
        while log._queue.full():
            time.sleep(0.001)
        log.write([row(step)])
    log.close()
    files = sorted((tmp_path / "samples").iterdir())
    assert len(files) == 3 and all(file.stat().st_size < 3000 for file in files)
    steps = [each["step"] for each in read_samples(tmp_path)]
    assert steps[0] == 0 and steps[-1] == 59 and len(steps) < 30


def test_slow_disk_does_not_block_and_dropped_rows_are_counted(tmp_path: Path) -> None:
    free = threading.Event()
    log = SampleLog(tmp_path / "samples", 1, [lambda rows: free.wait() and None])
    for step in range(200):  # would wait for `free` forever
        log.write([row(step)])
    free.set()
    log.close()
    assert 0 < log.dropped < 200 and len(read_samples(tmp_path)) == 200 - log.dropped
    reason = "they arrived faster than they could be written"
    assert log.warning == f"{log.dropped} samples are missing in samples/ or a table; the last one because {reason}"


def test_failing_table_is_reported_and_file_continues(tmp_path: Path) -> None:
    def table(rows: list[SampleRow]) -> None:
        raise ConnectionError("no network\nat all")

    log = SampleLog(tmp_path / "samples", 1, [table])
    log.write([row(1)])
    log.write([row(2)])
    log.close()
    assert len(read_samples(tmp_path)) == 2 and log.warning.endswith("the last one because ConnectionError: no network")


def test_incomplete_last_line_is_skipped_and_an_invalid_line_is_reported(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples", 1)
    log.write([row(1)])
    log.close()
    file = tmp_path / "samples" / "000000.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 2, "ki')
    log = SampleLog(tmp_path / "samples", 2)
    log.write([row(2)])
    log.close()
    assert [each["step"] for each in read_samples(tmp_path)] == [1, 2]
    file.write_text("{}\n" + whole)
    with pytest.raises(UserError, match=r"000000\.jsonl:1: not a sample; remove the line$"):
        read_samples(tmp_path)


TAMPERED: dict[str, list[Any]] = {
    "step": ["1", None, -1, 10**400, [1]],
    "kind": ["train", [], None],
    "prompt": [None, 5, "\ud800"],
    "answer": [{}, 7],
    "parts": [None, [5], [{"by": "unknown", "text": "a", "tokens": 1}], [{"by": "model", "text": None, "tokens": 1}], [{"by": "model"}]],
    "tokens": ["many", 10**400],
    "reward": ["1", float("nan"), float("inf"), 10**400, []],
    "reward_parts": [None, {"a": "b"}, {"a": None}],
    "environment_reward": ["x", float("nan")],
    "finish_reason": [5],
    "versions": [None, [[0, 1]], [["a", 1, 2]], [5]],
    "drafts": [None, {}, {"drafted": "1", "accepted": 0, "steps": 0, "accepted_by_position": []}],
    "note": [None],
    "session": ["a"],
    "batch": [None],
    "time": ["today"],
}


@pytest.mark.parametrize("key", TAMPERED)
def test_tampered_row_is_named_and_not_shown(key: str, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for value in TAMPERED[key]:
        whole = {"session": 1, "batch": 1, "time": 1.0, **row(1)}
        (tmp_path / "samples" / "000000.jsonl").write_text(f"{json.dumps(whole)}\n{json.dumps({**whole, key: value})}\n\n")
        with pytest.raises(UserError, match=r"000000\.jsonl:2: not a sample; remove the line$"):
            read_samples(tmp_path)


def test_deeply_nested_line_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "000000.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"000000\.jsonl:1: not a sample; remove the line$"):
        read_samples(tmp_path)


def test_a_run_without_samples_has_no_section() -> None:
    assert samples_section([]) == ""


def test_texts_are_escaped_and_the_environments_are_marked() -> None:
    page = samples_section([kept(1, 0.5, "<script>")])
    assert '<span class="model">&lt;script&gt;</span><span class="environment" title="the environment, 1 tokens">&lt;</span>' in page
    assert "expected <b>&lt;b&gt;</b>" in page and "<script" not in page


def test_facts_of_a_sample() -> None:
    assert sample_facts(kept(5, 0.5)) == [
        "update 5",
        "format 1",
        "2 tokens and 1 environment turn(s)",
        "ended by stop",
        "versions 3 to 4",
        "3 of 4 drafts accepted",
    ]
    assert sample_facts(kept(5, None, kind="dropped"))[0] == "dropped before update 5"


def test_every_choice_of_a_filter_has_its_rule_and_some_sample() -> None:
    page = samples_section([kept(1, 0.0), kept(2, 1.0), kept(2, 0.5, kind="eval"), kept(3, None, kind="dropped")])
    for name, values in (("step", {"1", "2", "3"}), ("kind", {"update", "eval", "dropped"}), ("band", {"0", "1", "2"})):
        select = re.search(rf'<select class="{name}">(.*?)</select>', page)
        assert select and set(re.findall(r'value="(\w+)"', select[1])) == values
        for value in values:
            assert (
                f'.samples:has(select.{name} option[value="{value}"]:checked) .sample:not([data-{name}="{value}"]){{display:none}}' in page
            )
        assert values <= set(re.findall(rf'<details class="sample"[^>]* data-{name}="(\w*)"', page))


def test_bands_are_values_if_few_and_quantiles_otherwise() -> None:
    assert reward_bands([1.0, 0.0, 1.0]) == [(0.0, "0"), (1.0, "1")]
    bands = reward_bands([i / 100 for i in range(100)])
    assert len(bands) == 5 and bands[0][1].startswith("0 to 0.2") and bands[-1] == (0.99, "0.8 to 0.99")
    ends = [end for end, _ in bands]
    assert [sum(low < i / 100 <= end for i in range(100)) for low, end in zip([-1.0, *ends], ends, strict=False)] == [21, 20, 19, 20, 20]


def test_of_a_long_run_some_steps_are_shown_with_all_their_samples() -> None:
    rows = [kept(step, 0.5) for step in range(1000) for _ in range(4)]
    shown = rows_of_spaced_steps(rows, 100)
    steps = sorted({row["step"] for row in shown})
    assert len(shown) == 100 and steps[0] == 0 and steps[-1] == 999
    assert "100 of 4000 samples of the run" not in samples_section(rows[:8]) and "8 samples" in samples_section(rows[:8])


def test_long_prompt_is_shortened_to_last_words() -> None:
    assert last_words("what is\n 1 + 1?") == "what is 1 + 1?"
    message = last_words("word " * 40 + "How many are left?")
    assert message.startswith("… word ") and message.endswith("How many are left?") and len(message) <= 92
