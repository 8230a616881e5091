"""The report: one file that needs no other, with every figure from the run's own metrics."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.telemetry.report import write_comparison, write_report
from mtpctl.telemetry.run_directory import RunDirectory

RECIPE = "name: tiny <mtp>\nseed: 3\nrollout:\n  engine: vllm\n  speculation:\n    num_tokens: 2\n"


def metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.3 + step / 100,
        "rollout/spec_accept_rate": 0.7 + step / 500,
        "actor/entropy": 0.2,
        "rollout_corr/abs_diff": 2e-6,
        "async/staleness_mean": 0.5,
        "async/staleness_max": 2.0,
        "perf/tokens_per_s": 5000.0,
        "rollout/tokens_per_s": 2000.0,
        "mtp/loss_1": math.exp(-step / 50),
        "timing_s/step": 3.0,
        **{f"timing_s/part_{i}": 1.0 / (i + 1) for i in range(9)},
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with RunDirectory.create(tmp_path / "run", RECIPE) as run:
        run.record(RECIPE)
        rows: list[dict[str, Any]] = [{"phase": "sft", "step": s, "sft/loss": 5 / s, "mtp/loss_1": 6 / s} for s in range(1, 31)]
        rows.append({"phase": "rl", "step": 0, "eval/accuracy": 0.25})
        rows += [{"phase": "rl", "step": s, **metrics(s)} for s in range(1, 51)]
        rows.append({"phase": "rl", "step": 50, "eval/accuracy": 0.75})
        rows.append({"event": "restart", "message": "rollout-0 <died>"})
        run.metrics.write_text("".join(json.dumps({"session": 1, "time": 1.7e9 + i, **row}) + "\n" for i, row in enumerate(rows)))
    return run.path


class Page(HTMLParser):
    """Collects text and addresses, and sees that tags close in order."""

    VOID = ("meta", "path", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    page.close()
    assert page.open == []
    return page


def test_page_is_complete_and_self_contained(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = read(path)
    assert page.addresses == [] and not {"script", "link", "img", "iframe"} & page.tags
    style = re.search(r"<style>(.*?)</style>", path.read_text(), re.S)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    assert "prefers-color-scheme: dark" in style[1]


def test_headline_figures_are_those_of_the_metrics(run_dir: Path) -> None:
    text = " ".join(read(write_report(run_dir)).text)
    tiles = text[: text.index("Supervised loss")]
    for figure in ("75.0%", "25.0%", "+50.0 points", "2e-6", "5k", "2k"):
        assert figure in tiles
    after = sum(0.3 + s / 100 for s in range(46, 51)) / 5
    assert f"{after:.2f}" in tiles
    assert "30 SFT steps · 50 RL steps · vllm, 2 draft tokens a step · seed 3" in tiles


def test_report_has_exactly_the_charts_with_data(run_dir: Path) -> None:
    html = write_report(run_dir).read_text()
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert titles == [
        "Held-out accuracy",
        "Reward",
        "Draft acceptance",
        "Supervised loss",
        "MTP loss",
        "Entropy",
        "Mismatch",
        "Staleness",
        "Throughput",
        "Time of an update",
    ]


def figure(html: str, title: str) -> str:
    """The part of the page that is one chart."""
    return html[html.index(f"<h3>{title}</h3>") :].split("</figure>")[0]


def evaluated(run_dir: Path, accuracies: dict[int, float]) -> str:
    """The page after these evaluations alone."""
    rows = [{"phase": "rl", "step": s, "eval/accuracy": a, "timing_s/evaluation": 9.0} for s, a in accuracies.items()]
    rows += [{"phase": "rl", "step": s, **metrics(s)} for s in range(1, 51)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"session": 1, "time": 1.7e9, **row}) + "\n" for row in rows))
    return write_report(run_dir).read_text()


def test_evaluations_have_their_own_chart(run_dir: Path) -> None:
    """With a mark per evaluation, the best so far and the late mean; instability is stated in the headline."""
    html = evaluated(run_dir, {0: 0.40, 10: 0.60, 20: 0.30, 30: 0.70, 40: 0.50, 50: 0.66})
    chart = figure(html, "Held-out accuracy")
    assert chart.count('class="dot k0"') == 6 and chart.count('class="guide ') == 2
    labels = re.findall(r'class="label k\d" [^>]*>([^<]*)<b>([^<]*)<', chart)
    assert labels == [("best so far", "70.0%"), ("last 4, mean", "54.0%"), ("evaluations", "66.0%")]
    assert "held-out" not in figure(html, "Reward")
    tiles = re.sub(r"<[^>]+>", " ", html[html.index('class="tiles"') : html.index("<figure")])
    assert re.search(r"Held-out accuracy, mean of last 4\s+54.0%\s+from 40.0%\s+\+14.0 points\s+worst fall\s+30.0 points", tiles)
    assert "best 70.0% at update 30; worst fall 30.0 points, from 60.0% at update 10 to 30.0% at update 20." in html
    assert "evaluation" not in re.findall(r'class="label k\d" [^>]*>([^<]*)<', figure(html, "Time of an update"))


def test_accuracy_on_unseen_prompts_is_in_the_chart_of_evaluations(run_dir: Path) -> None:
    rows = [{"phase": "rl", "step": s, "eval/accuracy": a, "eval/unseen_accuracy": a / 2} for s, a in {0: 0.40, 10: 0.60, 20: 0.50}.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"session": 1, "time": 1.7e9, **row}) + "\n" for row in rows))
    html = write_report(run_dir).read_text()
    chart = figure(html, "Held-out accuracy")
    labels = re.findall(r'class="label k\d" [^>]*>([^<]*)<b>([^<]*)<', chart)
    assert ("unseen prompts", "25.0%") in labels and ("evaluations", "50.0%") in labels
    assert "unseen prompts, last <b>25.0%</b>" in html


def test_single_evaluation_is_not_drawn_as_a_curve(run_dir: Path) -> None:
    assert "<h3>Held-out accuracy</h3>" not in evaluated(run_dir, {0: 0.4})


def test_two_evaluations_are_reported_as_before_and_after(run_dir: Path) -> None:
    html = evaluated(run_dir, {0: 0.40, 50: 0.66})
    assert "measured only before and after" in html and "last 4, mean" not in html


def test_many_timings_are_folded_into_other(run_dir: Path) -> None:
    html = write_report(run_dir).read_text()
    figure = html[html.index("Time of an update") :]
    labels = re.findall(r'class="label k\d" [^>]*>([^<]*)<', figure[: figure.index("</figure>")])
    assert labels == ["part 0", "part 1", "part 2", "part 3", "part 4", "other"]


def test_more_precise_metrics_replace_fallbacks(run_dir: Path) -> None:
    rows = [{"phase": "rl", "step": s, "reward/unfiltered_mean": 0.9, "rollout_corr/abs_diff_same_version": 4e-7} for s in range(1, 51)]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"session": 1, "time": 1.7e9 + 200, **row}) + "\n" for row in rows)
    text = " ".join(read(write_report(run_dir)).text)
    tiles = text[: text.index("Supervised loss")]
    assert "4e-7" in tiles and "2e-6" not in tiles.split("Both busy")[0].split("Mismatch")[1].split("Staleness")[0]
    assert "0.9" in tiles


def test_means_of_the_run_are_over_its_time(run_dir: Path) -> None:
    rows = [
        {"phase": "rl", "step": 1, "rollout/tokens_per_s": 1000.0, "async/overlap": 0.9, "timing_s/step": 1.0},
        {"phase": "rl", "step": 2, "rollout/tokens_per_s": 100.0, "async/overlap": 0.1, "timing_s/step": 9.0},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"session": 1, "time": 1.7e9, **row}) + "\n" for row in rows))
    text = " ".join(read(write_report(run_dir)).text)
    tiles = text[: text.index("mean over the run") + 20]
    assert "18.0%" in tiles and "190 tok/s" in tiles


def test_user_text_is_escaped(run_dir: Path) -> None:
    html = write_report(run_dir).read_text()
    assert "tiny &lt;mtp&gt;" in html and "rollout-0 &lt;died&gt;" in html
    assert "<mtp>" not in html and "<died>" not in html


def test_report_shows_when_a_run_was_resumed_and_which_keys_changed(run_dir: Path) -> None:
    assert "Resumed" not in "".join(read(write_report(run_dir)).text)
    events = [("recipe", "changed since the last start: train.rl.steps: 50 → 60"), ("resume", "rl resumes after step 50")]
    with (run_dir / "metrics.jsonl").open("a") as file:
        for kind, message in events:
            file.write(json.dumps({"session": 2, "time": 1.8e9, "event": kind, "message": message}) + "\n")
    text = " ".join(read(write_report(run_dir)).text)
    section = text[text.index("Resumed") : text.index("Every metric")]
    assert "2027-01-15 08:00 UTC" in section and all(message in section for _, message in events)


def test_report_includes_recipe_and_versions(run_dir: Path) -> None:
    text = "".join(read(write_report(run_dir)).text)
    assert RECIPE in text
    assert "megatron-core" in text


def test_report_of_new_run(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text(lines[0])
    read(write_report(run_dir))


def test_a_metric_that_was_no_number_for_a_while(run_dir: Path) -> None:
    rows = [{"phase": "rl", "step": s, "actor/entropy": "NaN" if s in (1, 50) else float(s), "grad": "Infinity"} for s in range(1, 51)]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"session": 1, "time": 1.7e9 + 200, **row}) + "\n" for row in rows)
    text = " ".join(read(write_report(run_dir)).text)
    table = text[text.index("Every metric") :]
    assert re.search(r"actor/entropy \S[^.]*\. RL – – 2 49 ", table)
    assert "grad RL – – – – " in table


def test_report_rejects_invalid_runs_and_out_paths(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere.html"
    assert write_report(run_dir, out) == out and out.exists()
    with pytest.raises(UserError, match="no directory"):
        write_report(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no metrics yet"):
        write_report(tmp_path / "empty")
    with pytest.raises(UserError, match=r"--out: cannot write"):
        write_report(run_dir, tmp_path / "no" / "folder.html")
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "file" / "page.html", tmp_path / ("a" * 300), tmp_path, Path(), tmp_path / "pipe"):
        with pytest.raises(UserError, match=r"--out: cannot write"):
            write_report(run_dir, place)
    assert (tmp_path / "file").read_text() == "kept" and (tmp_path / "pipe").is_fifo()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"session": 1, "step": 1}\n'),
        ("metrics.jsonl", '{"session": 1, "time": 1.0, "event": "restart"}\n'),
        ("metrics.jsonl", '{"session": "one", "time": 1.0, "phase": "rl", "step": 1}\n'),
        ("metrics.jsonl", None),
        ("recipe.resolved.yaml", "["),
        ("recipe.resolved.yaml", "- rollout"),
        ("recipe.resolved.yaml", None),
        ("versions.json", "{"),
        ("versions.json", "[]"),
    ],
)
def test_damaged_file_of_run_is_reported(run_dir: Path, name: str, content: str | None) -> None:
    (run_dir / name).unlink()
    if content is None:
        (run_dir / name).mkdir()
    else:
        (run_dir / name).write_text(content)
    with pytest.raises(UserError, match=name) as caught:
        write_report(run_dir)
    assert "\n" not in str(caught.value)


def run(path: Path, lr: float, gain: float, steps: int = 10) -> Path:
    path.mkdir(parents=True)
    (path / "recipe.resolved.yaml").write_text(f"name: {path.name}\nrun_dir: {path}\nseed: 3\ntrain:\n  rl:\n    optimizer: {{lr: {lr}}}\n")
    rows = [{"phase": "rl", "step": s, "reward/mean": gain * s, "actor/entropy": 0.5} for s in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps({"session": 1, "time": 1.7e9 + r["step"], **r}) + "\n" for r in rows))
    return path


def test_comparison_shows_curves_and_recipe_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run(tmp_path / "a", 1e-4, 0.05), run(tmp_path / "b", 1e-3, 0.1, steps=8)]
    path = write_comparison(runs)
    assert path == Path("compare.html")
    page, html = read(path), path.read_text()
    text = " ".join(page.text)
    assert page.addresses == [] and "script" not in page.tags
    assert "train.rl.optimizer.lr 0.0001 0.001" in text and "seed" not in text and "run_dir" not in text
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert titles == ["Reward", "Entropy"]
    reward = html[html.index("<h3>Reward</h3>") :]
    assert {"a", "b"} <= set(re.findall(r'class="label k\d"[^>]*>(\w)<b>', reward[: reward.index("<h3>Entropy</h3>")]))


def test_last_evaluation_and_late_mean_have_separate_rows(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, 1e-4, 0.05) for name in ("a", "b")]
    for path, last in zip(runs, (0.75, 0.5), strict=True):
        accuracies = {0: 0.25, 4: 0.25, 6: 0.25, 8: 0.25, 10: last}
        rows = [{"session": 1, "time": 1.8e9 + s, "phase": "rl", "step": s, "eval/accuracy": value} for s, value in accuracies.items()]
        rows.insert(0, {"session": 1, "time": 1.6e9, "phase": "sft", "step": 30, "sft/loss": 1.0})
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = " ".join(read(write_comparison(runs, tmp_path / "out.html")).text)
    assert "the share of correct responses. eval/accuracy 75.0% 50.0%" in text
    assert "mean of the last 4 evaluations. eval/accuracy 37.5% 31.2%" in text
    assert "a: 30 SFT steps, 10 RL steps · b: 30 SFT steps, 10 RL steps" in text


def test_runs_of_one_stage_other_than_rl_are_compared(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, 1e-4, 0.05) for name in ("a", "b")]
    for path in runs:
        rows = [{"session": 1, "time": 1.8e9 + s, "phase": "draft", "step": s, "mtp/loss_1": 1.0 / s} for s in range(1, 5)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write_comparison(runs, tmp_path / "out.html").read_text()
    assert re.findall(r"<h3>(.*?)</h3>", html) == ["MTP loss"]


def test_runs_with_equal_names_are_distinguished_by_folders(tmp_path: Path) -> None:
    runs = [run(tmp_path / "x" / "tiny", 1e-4, 0.05), run(tmp_path / "y" / "tiny", 1e-4, 0.05)]
    text = " ".join(read(write_comparison(runs, tmp_path / "out.html")).text)
    assert "x/tiny" in text and "y/tiny" in text and "No key differs." in text


def test_invalid_comparison_is_one_line_error(tmp_path: Path) -> None:
    one = run(tmp_path / "a", 1e-4, 0.05)
    with pytest.raises(UserError, match=r"^RUN: the same run is named twice"):
        write_comparison([one, one])
    with pytest.raises(UserError, match=r"^RUN: no directory .*/no; "):
        write_comparison([one, tmp_path / "no"])
    with pytest.raises(UserError, match=r"^RUN: 8 runs are more than the 7"):
        write_comparison([one] * 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"/empty has no metrics yet; "):
        write_comparison([one, tmp_path / "empty"])
