"""The report's section of samples: everything is there as text, and each filter hides what it leaves out."""

from __future__ import annotations

import re

from mtpctl.samples import Sample, Speculation
from mtpctl.telemetry.sample_log import Kind, SampleRow, sample_row
from mtpctl.telemetry.sample_page import ending, facts, of_spaced_steps, reward_bands, samples_section


def kept(step: int, reward: float | None, response: str = "a", *, kind: Kind = "update", note: str = "") -> SampleRow:
    sample = Sample("p", "g", [ord("?")], reward=reward, reward_parts={"format": 1.0}, finish_reason="stop")
    sample.append([ord(c) for c in response], [0.0] * len(response), 3)
    sample.append([ord("<")], [0.0], 4, trained=False)
    sample.speculation = Speculation(drafted=4, accepted=3, steps=2)
    return sample_row(sample, lambda ids: "".join(map(chr, ids)), step=step, kind=kind, answer="<b>", note=note)


def test_a_run_without_samples_has_no_section() -> None:
    assert samples_section([]) == ""


def test_texts_are_escaped_and_the_environments_are_marked() -> None:
    page = samples_section([kept(1, 0.5, "<script>")])
    assert '<span class="model">&lt;script&gt;</span><span class="environment" title="the environment, 1 tokens">&lt;</span>' in page
    assert "expected <b>&lt;b&gt;</b>" in page and "<script" not in page


def test_facts_of_a_sample() -> None:
    assert facts(kept(5, 0.5)) == [
        "update 5",
        "format 1",
        "2 tokens and 1 environment turn(s)",
        "ended by stop",
        "versions 3 to 4",
        "3 of 4 drafts accepted",
    ]
    assert facts(kept(5, None, kind="dropped"))[0] == "dropped before update 5"


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
    shown = of_spaced_steps(rows, 100)
    steps = sorted({row["step"] for row in shown})
    assert len(shown) == 100 and steps[0] == 0 and steps[-1] == 999
    assert "100 of 4000 samples of the run" not in samples_section(rows[:8]) and "8 samples" in samples_section(rows[:8])


def test_long_prompt_is_shortened_to_last_words() -> None:
    assert ending("what is\n 1 + 1?") == "what is 1 + 1?"
    message = ending("word " * 40 + "How many are left?")
    assert message.startswith("… word ") and message.endswith("How many are left?") and len(message) <= 92
