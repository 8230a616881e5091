"""`mtpctl eval`: targets, errors before anything starts, and the table of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import UserError
from mtpctl.jobs import engines
from mtpctl.jobs.engines import Evaluation, evaluate_weights, render_evaluation, scratch_folder
from mtpctl.jobs.targets import target_with_weights as asked
from mtpctl.recipe.loading import dump_resolved, load_recipe
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.runs import leave_checkpoint, recipe, silent
from tests.fakes.runs import run as run

ROW = '{"question": "1+1=", "answer": "2"}\n'


def test_run_provides_its_recipe_and_newest_weights(run: Path) -> None:
    (run / "recipe.resolved.yaml").write_text(dump_resolved(recipe(Path("elsewhere"), "seed=5")))
    with asked(str(run), None, [], ["rollout.temperature=0.5"]) as result:
        assert (result.recipe.seed, result.recipe.rollout.temperature, result.recipe.run_path, result.weights) == (5, 0.5, run, None)
    checkpoint = leave_checkpoint(run, "rl-000003", 3)
    with asked(str(checkpoint), None, [], []) as result:
        assert (result.recipe.run_path, result.weights) == (run, str(checkpoint))


def test_weights_folder_takes_its_recipe_from_sets(run: Path) -> None:
    with asked(str(run / "model"), None, [], ["evaluation.sets.a.path=rows.jsonl"]) as result:
        assert result.recipe.model.path == result.weights == str(run / "model")
        assert result.recipe.evaluation.sets["a"].path == "rows.jsonl"


def test_recipe_by_name_with_weights_of_from() -> None:
    with asked("tiny_mtp", "runs/x", [], ["seed=3"]) as result:
        assert (result.recipe.seed, result.weights) == (3, "runs/x")


def test_other_folder_is_rejected(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"is neither a run \(recipe\.resolved\.yaml\), nor a checkpoint"),
        asked(str(tmp_path), None, [], []),
    ):
        pass


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["data.task=null"], r"^evaluation\.sets: the recipe has no held-out problems"),
        (["evaluation.sets.a={path: no.jsonl}"], r"^evaluation\.sets\.a\.path: there is no file no\.jsonl"),
        (["evaluation.sets.a={n: 2}"], r"^evaluation\.sets\.a\.path: the set has no rows"),
        (
            ["evaluation.sets.a={path: ROWS}"],
            r"^evaluation\.sets\.a\.columns\.prompt: rows\.jsonl has no column 'prompt'.*: set evaluation\.sets\.a\.columns: \{prompt: ",
        ),
        (
            ["evaluation.sets.a={path: ROWS, columns: {answer: answre}}"],
            r"^evaluation\.sets\.a\.columns\.prompt: .* no column ",
        ),
        (["evaluation.sets.a={path: ROWS, reward: {function: exat}}"], r"^evaluation\.sets\.a\.reward\.function: .*mean exact\?"),
        (
            ["evaluation.sets.a={path: ROWS, columns: {answer: null}}"],
            r"^evaluation\.sets\.a\.columns\.answer: the reward exact needs",
        ),
        (["evaluation.sets.a={path: ROWS, temperature: 0.001}"], r"^evaluation\.sets\.a\.temperature: the minimum of vLLM is 0\.01"),
        (["evaluation.sets.a/b={path: ROWS}"], r"^evaluation\.sets: 'a/b' may contain only letters"),
        (["evaluation.sets.a={path: ROWS, subset: main}"], r"^evaluation\.sets\.a\.subset: only Hugging Face datasets"),
        (
            ["data.task=null", "data.path=ROWS", "evaluation.sets.a={path: ROWS}"],
            r"^evaluation\.sets\.a\.path: equals data\.path, ",
        ),
    ],
)
def test_unusable_sets_are_reported_before_anything_starts(
    sets: list[str], message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("engines were started")

    monkeypatch.setattr(engines, "engine_cluster", started)
    (tmp_path / "rows.jsonl").write_text(ROW)
    with pytest.raises(UserError, match=message) as caught:
        evaluate_weights(recipe(run, *(each.replace("ROWS", str(tmp_path / "rows.jsonl")) for each in sets)), n=None, report=silent)
    assert "\n" not in str(caught.value)


def test_held_out_rows_do_not_require_training_rows(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a folder of weights, whose recipe names no data."""

    class Started(Exception):
        pass

    def started(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(engines, "engine_cluster", started)
    (tmp_path / "rows.jsonl").write_text(ROW)
    rows = ["data.task=null", f"data.eval_path={tmp_path}/rows.jsonl", "data.columns={prompt: question}"]
    said: list[str] = []
    with pytest.raises(Started):
        evaluate_weights(recipe(run, *rows), n=None, report=said.append)
    assert said[0].endswith("1 responses to 1 held-out problems")
    with pytest.raises(UserError, match=r"^data\.eval_path: no file no\.jsonl"):
        evaluate_weights(recipe(run, "data.task=null", "data.eval_path=no.jsonl"), n=None, report=silent)


def test_table_lists_every_set() -> None:
    shared = {"length_mean": 12.0, "truncated_fraction": 0.25}
    sets = {
        "held-out": {"n": 1, "accuracy": 0.5, "problems": 8.0, **shared},
        "gsm8k": {"n": 2, "avg@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "problems": 4.0, "spec_accept_rate": 0.75, **shared},
    }
    lines = render_evaluation(Evaluation(model="checkpoint x", version=3, seconds=4.0, seen=None, sets=sets)).splitlines()
    assert lines[0].split() == ["set", "problems", "n", "avg@n", "pass@k", "length", "cut", "off", "acceptance"]
    assert lines[1].split() == ["held-out", "8", "1", "0.500", "–", "12.0", "25.0%", "–"]
    assert lines[2].split() == ["gsm8k", "4", "2", "0.250", "@1", "25.0%", "@2", "50.0%", "12.0", "25.0%", "75.0%"]
    assert lines[3] == "checkpoint x; 4.0 s including the start of the engines"


def test_table_separates_unseen_prompts_only_if_others_are_trained_on() -> None:
    shared = {"length_mean": 12.0, "truncated_fraction": 0.25}
    sets = {
        "some": {"n": 1, "accuracy": 0.5, "unseen_accuracy": 0.25, "problems": 8.0, "unseen_problems": 4.0, **shared},
        "none": {"n": 2, "avg@2": 0.25, "problems": 4.0, **shared},
        "all": {"n": 2, "avg@2": 0.75, "problems": 4.0, "unseen_problems": 0.0, **shared},
    }
    lines = render_evaluation(Evaluation(model="x", version=3, seconds=4.0, seen=8, sets=sets)).splitlines()
    assert lines[0].split()[:6] == ["set", "problems", "n", "avg@n", "unseen", "pass@k"]
    assert lines[1].split()[:6] == ["some", "8", "1", "0.500", "0.250", "(4)"]
    assert lines[2].split()[:6] == ["none", "4", "2", "0.250", "0.250", "(4)"]
    assert lines[3].split()[:6] == ["all", "4", "2", "0.750", "–", "(0)"]
    assert lines[4] == "unseen: avg@n of the problems whose prompt no training row has, and their number"
    lines = render_evaluation(Evaluation(model="x", version=3, seconds=4.0, seen=0, sets={"none": sets["none"]})).splitlines()
    assert "unseen" not in lines[0] and lines[2] == "no training row has a held-out prompt"


@pytest.mark.slow
def test_engines_evaluate_every_set_of_a_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    held_out = f"evaluation.sets.a={{path: {tmp_path}/rows.jsonl, columns: {{prompt: question}}, n: 4}}"
    said: list[str] = []
    result = evaluate_weights(recipe(run, "data.task.eval_size=3", held_out), n=None, report=said.append)
    assert said == [f"model: the weights of {run / 'model'}; 7 responses to 4 held-out problems"]
    assert {name: (each["n"], each["problems"]) for name, each in result["sets"].items()} == {"held-out": (1, 3.0), "a": (4, 1.0)}
    assert {"avg@4", "pass@1", "pass@2", "pass@4", "length_mean", "spec_accept_rate"} <= set(result["sets"]["a"])
    assert 0 < result["sets"]["a"]["length_mean"] <= 16


def test_check_reads_the_data_and_reports_mistakes(mtpctl: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROW)
    data = ["--set", "data.task=null", "--set", f"data.path={rows}"]
    wrong = mtpctl("recipe", "validate", "tiny_mtp", *data)
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err == (
        "error: data.columns.prompt: rows.jsonl has no column 'prompt'; its columns are question, answer: "
        "set data.columns: {prompt: question}\n"
    )
    right = mtpctl("recipe", "validate", "tiny_mtp", *data, "--set", "data.columns.prompt=question")
    assert right.out.endswith("tiny_mtp.yaml: ok\ndata: train: rows.jsonl, 1 rows\n")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}\n')
    columns = ["--set", "data.columns.prompt=question"]
    imitated = mtpctl("recipe", "validate", "tiny_mtp", *data, *columns, "--set", f"data.sft_path={tmp_path}/chat.jsonl")
    assert (imitated.code, imitated.err.splitlines()[-1].partition(";")[2]) == (
        2,
        " its columns are messages: set data.sft_columns: {prompt: messages}",
    )
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    loop = ["--set", "data.task=null", "--set", f"data.path={tmp_path}/loop.jsonl", "--set", f"data.eval_path={rows}"]
    circle = mtpctl("recipe", "validate", "tiny_mtp", *loop)
    assert circle.code == 2 and circle.err.startswith("error: data.path: there is no file ")
    rows.write_bytes(ROW.encode() + b"\xff\n")
    broken = mtpctl("train", "tiny_mtp", "--dry-run", *data, "--set", "data.columns.prompt=question", "--set", "cluster.num_cpus=8")
    assert (broken.code, broken.err) == (2, f"error: {rows}:2: not UTF-8 text; save the file as UTF-8\n")


def test_large_file_is_inspected_within_the_time_limit(tmp_path: Path) -> None:
    from mtpctl.data.inspection import inspect_sets
    from mtpctl.recipe.data import DataConfig, EvaluationConfig

    row = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 200_000)
    (result,) = inspect_sets(DataConfig(path=str(tmp_path / "rows.jsonl")), EvaluationConfig(), ["rl"], seconds=0.05)
    assert not result.is_complete and 0 < result.rows < 200_000
    assert str(result).endswith("rows read, not all")


@pytest.mark.parametrize(("address", "shared"), [("auto", True), (None, False)])
def test_temporary_folder_of_a_joined_cluster_is_in_the_run_directory(tmp_path: Path, address: str | None, shared: bool) -> None:
    """Engines on other hosts read the weights there."""
    (tmp_path / "run").mkdir()
    recipe = load_recipe("tiny_mtp", sets=[f"run_dir={tmp_path / 'run'}", f"cluster.address={address or 'null'}"]).recipe
    with scratch_folder(recipe, "eval") as folder:
        assert (Path(folder).parent == tmp_path / "run") is shared
