"""Arguments that `mtpctl rollout` passes on, and the summary that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cli.app import main
from mtpctl.jobs.rollout import summary
from mtpctl.recipe.loading import load_recipe
from mtpctl.rollout.sample_file import Tally
from mtpctl.samples import Speculation

ROW = {"tokens": [1, 2, 3], "speculation": {"drafted": 4, "accepted": 1, "accepted_by_position": [1], "steps": 2}, "finish_reason": "stop"}


@pytest.fixture
def rollout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").touch()

    def call(found: dict[str, Any], *arguments: str) -> tuple[int, str, str, list[Any]]:
        handed: list[Any] = []

        def generate(recipe: Any, prompts: Path, out: Path, *, n: int, report: Any, progress: Any, from_weights: Any) -> dict[str, Any]:
            handed.extend([recipe, prompts, out, n, from_weights])
            report("model: as it is")
            for done in range(1, 41):
                progress(done, 40, Tally(speculation=_spec()))
            return found

        monkeypatch.setattr("mtpctl.jobs.rollout.rollout", generate)
        with pytest.raises(SystemExit) as ended:
            main(["rollout", *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err, handed

    return call


def _spec() -> Any:
    tally = Tally()
    tally.speculation.add(Speculation(4, 1, [1], 2), 3)
    return tally.speculation


def found(**changes: Any) -> dict[str, Any]:
    tally = Tally()
    tally.add(ROW | {"reward": 1.0})
    return summary(tally, new_samples=1, new_tokens=3, seconds=1.5) | {"model": "m", "out": "o.jsonl"} | changes


def test_arguments_are_passed_with_the_recipe_as_set(rollout: Any) -> None:
    code, _, _, handed = rollout(
        found(), "tiny_mtp", "--prompts", "p.jsonl", "--out", "o.jsonl", "--n", "4", "--set", "seed=5", "--from", "r"
    )
    assert code == 0
    assert handed == [load_recipe("tiny_mtp", sets=["seed=5"]).recipe, Path("p.jsonl"), Path("o.jsonl"), 4, "r"]


def test_progress_goes_to_the_error_stream_and_the_summary_to_the_output(rollout: Any) -> None:
    _, out, err, _ = rollout(found(), "tiny_mtp", "--prompts", "p.jsonl", "--out", "o")
    assert err.splitlines()[:2] == ["model: as it is", "4/40 samples, acceptance 25.0%"] and len(err.splitlines()) == 11
    assert out.splitlines() == [
        "1 samples in o.jsonl, 1 new",
        "2 tokens/s over 1.5 s",
        "mean length 3.0 tokens; ended by 1 stop",
        "acceptance 25.0% (1 of 4 drafts), 1.50 tokens a step",
        "mean reward 1.000 over 1 samples with an answer to compare with",
    ]


def test_json_prints_the_summary(rollout: Any) -> None:
    _, out, _, _ = rollout(found(), "tiny_mtp", "--prompts", "p.jsonl", "--out", "o", "--json")
    assert json.loads(out) == found()


@pytest.mark.parametrize("missing", ["--prompts", "--out"])
def test_prompts_and_out_are_required(rollout: Any, missing: str) -> None:
    arguments = [part for option in ("--prompts", "--out") if option != missing for part in (option, "x")]
    code, _, err, handed = rollout(found(), "tiny_mtp", *arguments)
    assert (code, handed) == (2, []) and missing in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "nowhere.jsonl", "--out", "o"], "error: --prompts: no file nowhere.jsonl; give a .jsonl or .parquet file"),
        (["--prompts", "p.jsonl", "--out", "."], "error: --out: . is a folder; name a file to write"),
        (["--prompts", "p.jsonl", "--serve"], "error: --serve: agents send their own prompts; leave --prompts out"),
        (["--serve", "--out", "."], "error: --out: . is a folder; name a file to write"),
        (["--prompts", "p.jsonl", "--out", "no/where"], "error: --out: no/where is in a missing folder; name a file to write"),
    ],
)
def test_unusable_files_are_reported_before_heavy_imports(rollout: Any, arguments: list[str], message: str) -> None:
    code, _, err, handed = rollout(found(), "tiny_mtp", *arguments)
    assert (code, err.strip(), handed) == (2, message, [])


def test_serving_takes_an_address_and_maybe_a_file(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []

    def serve(recipe: Any, out: Path | None, **options: Any) -> int:
        requested.append((recipe.seed, out, options["host"], options["port"], options["from_weights"]))
        return 3

    monkeypatch.setattr("mtpctl.jobs.rollout.serve", serve)
    code, out, _, _ = rollout(found(), "tiny_mtp", "--serve", "--port", "0", "--set", "seed=7", "--out", "o")
    assert (code, out.strip(), requested) == (0, "3 trajectories in o", [(7, Path("o"), "127.0.0.1", 0, None)])
    code, out, _, _ = rollout(found(), "tiny_mtp", "--serve")
    assert (code, out.strip(), requested[1]) == (0, "3 trajectories", (0, None, "127.0.0.1", 8339, None))


@pytest.mark.parametrize(("arguments", "option"), [(("--n", "8"), "--n"), (("--json",), "--json")])
def test_serving_rejects_options_without_effect(rollout: Any, arguments: tuple[str, ...], option: str) -> None:
    code, _, err, _ = rollout(found(), "tiny_mtp", "--serve", *arguments)
    assert (code, err.strip()) == (2, f"error: --serve: leave {option} out")
