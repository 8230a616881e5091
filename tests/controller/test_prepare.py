"""The source of the model with which a run starts."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

import httpx
import pytest

from mtpctl.controller.prepare import open_model, open_version_store, prepare, resolve_model_folder
from mtpctl.controller.rollout_loop import build_request
from mtpctl.errors import UserError
from mtpctl.families.quantization import select_fp8_names
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.checkpoint_folders import flip
from tests.fakes.runs import SMALL


def recipe(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=[*SMALL, *sets]).recipe


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return open_model(recipe("seed=1"), tmp_path / "other").path


def test_model_folder_is_used_in_place(folder: Path, tmp_path: Path) -> None:
    named = recipe("model.config=null", f"model.path={folder}", "model.init=weights")
    assert open_model(named, tmp_path / "run").path == folder
    assert not (tmp_path / "run").exists()


def test_random_model_is_created_in_the_run_directory(folder: Path, tmp_path: Path) -> None:
    drawn = recipe("model.config=null", f"model.path={folder}", "model.init=random", "seed=2")
    created = open_model(drawn, tmp_path / "run")
    assert created.path == tmp_path / "run" / "model"
    assert weights(created.path) == weights(open_model(recipe("seed=2"), tmp_path / "same").path) != weights(folder)


def test_damaged_file_of_a_created_model_is_reported_and_the_model_is_created_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(recipe(), run)
    files = [run / "model" / name for name in ("model.safetensors", "config.json", "tokenizer.json")]
    before = [file.read_bytes() for file in files]
    prepare(recipe(), run)
    for file, content in zip(files, before, strict=True):
        flip(file)
        with pytest.raises(
            UserError, match=rf"model/{file.name} has changed since it was saved.*remove .*/model: the run creates it again"
        ):
            prepare(recipe(), run)
        file.write_bytes(content)
    shutil.rmtree(run / "model")
    prepare(recipe(), run)
    assert [file.read_bytes() for file in files] == before


def test_damaged_tokenizer_of_a_run_is_reported(folder: Path, tmp_path: Path) -> None:
    run, named = tmp_path / "run", recipe("model.config=null", f"model.path={folder}", "model.init=weights", "model.tokenizer=bytes")
    prepare(named, run)
    flip(run / "tokenizer" / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer/tokenizer\.json has changed"):
        prepare(named, run)


def test_model_source_may_lack_weights_if_they_are_random(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    drawn = recipe("model.config=null", f"model.path={folder}", "model.init=random")
    assert prepare(drawn, tmp_path / "run").model.path == tmp_path / "run" / "model"


def test_version_store_of_an_elastic_run_is_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the hosts that are there when the run starts would find in shared memory."""
    monkeypatch.setattr("mtpctl.controller.prepare.default_root", lambda *_: Path("/shared"))
    shape, elastic = shape_of(recipe().model.config or {}), "rollout.replicas={min: 1, max: 2}"
    roots = [
        open_version_store(tmp_path, recipe(*sets), shape).root
        for sets in ([elastic, "cluster.address=auto"], [elastic], ["cluster.address=auto"])
    ]
    assert roots == [tmp_path / "versions", Path("/shared"), Path("/shared")]


def test_store_has_room_for_both_forms_of_quantized_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("mtpctl.controller.prepare.default_root", lambda name, size, fallback: sizes.append(size) or Path("/shared"))
    config = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    changes = [f"model.config.{name}={value}" for name, value in config.items()]
    created = load_recipe("tiny_mtp", sets=[*changes, "train.precision=bf16", "logprob.standalone=true"]).recipe
    shape = shape_of(created.model.config or {})
    fp8 = created.model_copy(update={"rollout": created.rollout.model_copy(update={"quantization": "fp8"})})
    for each in (created, fp8):
        open_version_store(tmp_path, each, shape)
    matrices = select_fp8_names(shape)
    quantized = sum(prod(tensor_shapes(shape)[name]) for name in matrices)
    # One byte instead of two for each quantized value, without scales, and embeddings as they are.
    assert quantized > 0.1 * sizes[0] and 0 <= sizes[1] - (2 * sizes[0] - quantized) < 0.01 * sizes[0]


def test_user_defined_loss_is_tried_before_the_model_is_created(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(logprob, entropy, terms, config):\n    return -logprob.sum()\n")
    with pytest.raises(UserError, match=r"train\.rl\.loss: mine\.py:1: it returned Tensor; return LossOut"):
        prepare(recipe(f"train.rl.loss={tmp_path}/mine.py:loss"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_problems_are_read_before_the_model_is_created(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt":\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: not JSON"):
        prepare(recipe("data.task=null", f"data.path={bad}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def from_rows(tmp_path: Path, rows: list[dict[str, str]], *sets: str) -> Recipe:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe("data.task=null", f"data.path={file}", *sets)


GSM8K = {"prompt": "48 in April, half as many in May?", "answer": "48/2=24\n48+24=72\n#### 72"}
WRONG = {"prompt": "1+1=", "answer": "2", "solution": "1+1=3 #3"}


def test_gsm8k_rows_are_accepted(tmp_path: Path) -> None:
    assert prepare(from_rows(tmp_path, [GSM8K]), tmp_path / "run").warnings == []


@pytest.mark.parametrize(
    ("row", "checker", "message"),
    [
        (WRONG, "exact", r"own solution \(answer '2'\), and for 1 of 1 checked training problems: no .* reward\.function: math$"),
        ({"prompt": "age?", "answer": "It is 7. No, 8."}, "math", r"own answer \(answer 'It is 7\. No, 8\.'\).* reward\.function: exact$"),
    ],
)
def test_problems_without_any_correct_solution_are_rejected(row: dict[str, str], checker: str, message: str, tmp_path: Path) -> None:
    created = from_rows(tmp_path, [row], f"reward.function={checker}")
    with pytest.raises(UserError, match=rf"^rows\.jsonl:1: reward\.function: {checker} gives 0 for the row's {message}"):
        prepare(created, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_single_wrong_solutions_are_a_warning(tmp_path: Path) -> None:
    created = prepare(from_rows(tmp_path, [GSM8K, WRONG]), tmp_path / "run")
    assert created.warnings[0].startswith("rows.jsonl:2: reward.function: exact gives 0 for the row's own solution")
    assert created.warnings[0].endswith("and for 1 of 2 checked training problems")


def test_solutions_are_not_checked_without_a_verifier(tmp_path: Path) -> None:
    assert prepare(from_rows(tmp_path, [WRONG], "train.stages=[sft]"), tmp_path / "run").warnings == []


def test_a_cache_that_holds_less_than_one_sample_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    small = recipe("rollout.kv_cache_bytes=4096")
    with pytest.raises(UserError, match=r"rollout\.kv_cache_bytes: 4096 bytes hold \d+ tokens .*; a sample may have 64 tokens"):
        prepare(small, tmp_path / "run")


def test_requests_have_the_end_tokens_of_the_models_configs(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 35]}))
    named = recipe("model.config=null", f"model.path={folder}", "model.init=weights", "model.tokenizer=bytes", "rollout.stop_ids=[42]")
    prepared = prepare(named, tmp_path / "run")
    request = build_request(named, prepared, prepared.problems.train[0], group_id="g", index=0, seed=None)
    assert request.stop_token_ids == [258, 35, 42]
    assert not any("end" in warning for warning in prepared.warnings)


def test_an_end_token_that_the_recipe_leaves_out_is_a_caution(tmp_path: Path) -> None:
    prepared = prepare(recipe("rollout.end_ids=[35]"), tmp_path / "run")
    assert list(prepared.end_ids) == [35]
    message = "rollout.end_ids does not contain 258, with which the chat template closes a turn: responses do not end at it"
    assert message in prepared.warnings


@pytest.mark.parametrize(("kind", "message"), [("RepositoryNotFoundError", "is neither a folder"), ("GatedRepoError", "is gated")])
def test_model_rejected_by_the_hub_is_a_user_error(monkeypatch: pytest.MonkeyPatch, kind: str, message: str) -> None:
    import huggingface_hub.errors

    def refuse(*_: object, **__: object) -> None:
        raise getattr(huggingface_hub.errors, kind)("no", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=rf"^model\.path: some/model {message}"):
        resolve_model_folder("some/model", "model.path")
