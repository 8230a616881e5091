"""A dry run rejects files that the run could not open, without reading a tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpctl.data.inspection import inspect_sets, leaks_in
from mtpctl.data.tokenizers import make_byte_tokenizer
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import count_parameters
from mtpctl.jobs.dry_run import as_json, check_rows, check_weights, dry_run, render
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.runs import CONFIG, sparse_folder
from tests.fakes.tiny import MIMO

ROWS = [{"prompt": "1 + 2 =", "answer": "3"}, {"prompt": "2 + 2 =", "answer": "4"}]


def rows(path: Path, content: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def recipe(folder: Path, content: list[dict[str, Any]] | None = None, **fields: Any) -> Recipe:
    data = {"path": rows(folder.parent / "rows.jsonl", content or ROWS), **fields.pop("data", {})}
    return Recipe.model_validate({"model": {"path": str(folder)}, "data": data, "train": {"rl": {"steps": 1}}, **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    created = sparse_folder(tmp_path / "hf")
    make_byte_tokenizer(created)
    return created


def test_whole_folder_is_accepted(folder: Path) -> None:
    check_weights(recipe(folder))
    check_rows(recipe(folder), shape_of(CONFIG))


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)


def pointer(folder: Path) -> None:
    oid = "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    (folder / "model.safetensors").write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 12345\n")


def other_width(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 40}))


def shard_is_missing(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_mtp_layer(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_nextn_predict_layers": 2}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncated, "its data ends at byte .*; fetch it again"),
        (pointer, "model.safetensors: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"),
        (other_width, r"config.json requires model.layers.0.mlp.gate_proj.weight as \[40, 32\], it is \[48, 32\]"),
        (shard_is_missing, "lists model-00001-of-00002.safetensors, which"),
        (no_mtp_layer, "config.json names MTP layers, but the weights lack model.mtp_layers.1"),
    ],
)
def test_unloadable_weights_are_reported(folder: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=message) as caught:
        check_weights(recipe(folder))
    assert "\n" not in str(caught.value)


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def no_template(folder: Path) -> None:
    make_byte_tokenizer(folder, chat=False)


CHAT = [{"messages": [{"role": "user", "content": "1 + 2 ="}], "answer": "3"}]
AS_CHAT = {"columns": {"prompt": "messages"}}


@pytest.mark.parametrize(
    ("spoil", "content", "data", "message"),
    [
        (no_tokenizer, ROWS, {}, "model.tokenizer: .* has no tokenizer"),
        (broken_tokenizer, ROWS, {}, "model.tokenizer: the tokenizer in .* cannot be loaded"),
        (no_template, CHAT, AS_CHAT, "data.chat_template: the tokenizer .* has no chat template"),
        (no_template, ROWS, {"chat_template": True}, "data.chat_template: the tokenizer .* has no chat template"),
        (
            lambda _: None,
            [{"prompt": "1" * 200, "answer": "3"}],
            {},
            "rows.jsonl:1: the prompt has 200 tokens, which leaves no room for a response; the context has 128",
        ),
    ],
)
def test_unrenderable_rows_are_reported(
    folder: Path, spoil: Callable[[Path], None], content: list[dict[str, Any]], data: dict[str, Any], message: str
) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=message):
        check_rows(recipe(folder, content, data=data), shape_of(CONFIG))


def test_held_out_rows_that_are_trained_on_are_counted(folder: Path) -> None:
    """Also in a further set, and regardless of white space around the prompt."""
    held_out = rows(folder.parent / "eval.jsonl", [{"prompt": " 1 + 2 =\n", "answer": "3"}, {"prompt": "9 + 9 =", "answer": "18"}])
    named = {"sets": {"own": {"path": held_out}}}
    created = recipe(folder, data={"eval_path": held_out}, evaluation=named)
    assert leaks_in(inspect_sets(created.data, created.evaluation, ["rl"]), created.data, ["rl"]).startswith(
        "2 of 4 held-out problems are trained on too"
    )
    own = recipe(folder, data={"eval_path": held_out, "sft_path": rows(folder.parent / "sft.jsonl", [{"prompt": "3", "answer": "3"}])})
    reports = inspect_sets(own.data, own.evaluation, ["sft"])
    assert leaks_in(reports, own.data, ["sft"]) == "" and leaks_in(reports, own.data, ["sft", "rl"]).startswith("1 of 2")
    assert leaks_in(reports, own.data, ["draft"]) == "", "the stage draft trains no trunk"
    generated = own.data.model_copy(update={"sft_path": None, "sft_task": own.data.task})
    assert own.data.task is None or leaks_in(reports, generated, ["sft"]) == ""


def test_weights_of_a_7b_model_are_checked_without_torch(tmp_path: Path) -> None:
    """15 GB of which only the header is read: importing torch alone would take most of a dry run's time."""
    seven = {
        **MIMO,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 0,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
    }
    folder = sparse_folder(tmp_path / "hf", seven)
    assert (folder / "model.safetensors").stat().st_size > 15e9
    code = (
        "import sys; from mtpctl.jobs.dry_run import check_weights; from mtpctl.recipe.schema import Recipe;"
        f"check_weights(Recipe.model_validate({{'model': {{'path': {str(folder)!r}}}}})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_plan_mentions_bitwise_numerics(tmp_path: Path) -> None:
    for numerics in ("default", "bitwise"):
        plan = dry_run(load_recipe("tiny_mtp", sets=[f"numerics={numerics}", f"run_dir={tmp_path}"]).recipe)
        assert as_json(plan)["numerics"] == numerics
        assert ("\nnumerics   bitwise: engine, log-prob server and trainer" in render(plan)) == (numerics == "bitwise")


def test_plan_of_a_draft_stage_has_engines_but_no_log_prob_server(tmp_path: Path) -> None:
    plan = dry_run(load_recipe("tiny_mtp", sets=["train.stages=[draft]", f"run_dir={tmp_path}"]).recipe)
    assert list(plan.memory) == ["trainer_rank", "rollout_rank"]


def test_plan_has_the_memory_of_a_served_teacher(folder: Path, tmp_path: Path) -> None:
    sets = [f"train.rl.teacher.path={folder}", f"run_dir={tmp_path / 'run'}"]
    plan = dry_run(load_recipe("tiny_mtp", sets=sets).recipe)
    counts = count_parameters(shape_of(json.loads((folder / "config.json").read_text())))
    assert plan.memory["teacher_rank"]["weights"] == 4 * (counts["total"] - counts["mtp"])
    assert "teacher rank: weights " in render(plan)
