"""`mtpctl rollout` for real: a trainer's checkpoint, through Ray and vLLM, into a file; and what it refuses before that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.jobs import engines, rollout
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.sample_file import SampleFile
from tests.fakes.runs import leave_checkpoint, recipe, silent, write_prompts
from tests.fakes.runs import run as run


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the requests instead of starting Ray for them."""
    requested: list[Any] = []

    def generate(recipe: Recipe, source: Any, missing: list[Any], file: SampleFile, *_: Any) -> float:
        requested.append((source, missing))
        return 0.0

    monkeypatch.setattr(rollout, "_generate", generate)
    return requested


def answer(
    recipe: Recipe, prompts: Path, out: Path, n: int = 1, report: Callable[[str], None] = silent, from_weights: str | None = None
) -> dict[str, Any]:
    return rollout.rollout(recipe, prompts, out, n=n, report=report, progress=silent, from_weights=from_weights)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [pytest.param(False, id="weights"), pytest.param(True, id="adapter")])
def test_checkpoint_generates_with_its_weights_and_version(run: Path, tmp_path: Path, adapter: bool) -> None:
    """The model in the folder and the checkpoint are drawn from other seeds, so log-probs show which one answered.

    So does an adapter, which the run that made it synced alone.
    """
    from mtpctl.checkpoint.finding import publish_checkpoint
    from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
    from mtpctl.recipe.section import ParallelConfig
    from mtpctl.trainer.batch import Sequence
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine

    created = recipe(run, *(["train.lora={rank: 4, alpha: 8}", "sync.sections=[adapter, draft]"] if adapter else []))
    assert created.model.config is not None
    trained = HfFolder.open(run / "model") if adapter else create_hf_folder(created.model.config, tmp_path / "trained", seed=1)
    engine = MegatronEngine(
        trained, EngineConfig(ParallelConfig(), precision="fp32", mtp=created.mtp, train=False, lora=created.train.lora)
    )
    for name, parameter in engine.module.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=0.1)
    checkpoint = run / "checkpoints" / "rl-000003"
    checkpoint.parent.mkdir()
    engine.save(checkpoint)
    (checkpoint / "run.json").write_text(json.dumps({"version": 3}))
    publish_checkpoint(checkpoint, keep=1)
    prompts = write_prompts(tmp_path / "p.jsonl", *({"prompt": f"{i}+{i}="} | ({"answer": 2 * i} if i else {}) for i in range(6)))
    said: list[str] = []
    heard: list[int] = []
    result = rollout.rollout(
        created, prompts, tmp_path / "o", n=2, report=said.append, progress=lambda done, total, tally: heard.append(done)
    )
    assert said == [f"model: checkpoint {checkpoint} (weight version 3)"]
    assert heard == list(range(1, 13))
    assert (result["samples"], result["made"], result["rewarded"]) == (12, 12, 10)
    assert result["drafted"] > 0 and result["tokens_per_s"] > 0
    rows = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
    assert {(row["prompt_id"], row["index"]) for row in rows} == {(f"p.jsonl:{i}", k) for i in range(1, 7) for k in (0, 1)}
    assert {span["version"] for row in rows for span in row["version_spans"]} == {3}
    sequences = [Sequence([*row["prompt"].encode(), *row["tokens"]], len(row["prompt"]), [1] * len(row["tokens"])) for row in rows]
    scores = engine.score(sequences, temperature=0.7)
    engine.close()
    off = [
        abs(a - b) for row, each in zip(rows, scores, strict=True) for a, b in zip(row["behaviour_logprobs"], each.logprobs, strict=True)
    ]
    assert max(off) < 1e-4


def test_model_generates_if_there_is_no_checkpoint(run: Path, tmp_path: Path, generated: list[Any]) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "1+1="}, {"prompt": "2+2=", "answer": 4})
    said: list[str] = []
    answer(recipe(run), prompts, tmp_path / "o", 2, said.append)
    assert said == [f"model: the weights of {run / 'model'}"]
    source, missing = generated[0]
    assert source.checkpoint is None and source.context == 64
    assert [(prompt.prompt_id, prompt.answer, index) for prompt, index in missing] == [
        ("p.jsonl:1", None, 0),
        ("p.jsonl:1", None, 1),
        ("p.jsonl:2", "4", 0),
        ("p.jsonl:2", "4", 1),
    ]
    assert missing[0][0].ids == list(b"1+1=")


def test_model_folder_generates_without_a_run_directory(run: Path, tmp_path: Path, generated: list[Any]) -> None:
    created = recipe(tmp_path / "elsewhere", "model.config=null", f"model.path={run / 'model'}", "model.init=weights")
    answer(created, write_prompts(tmp_path / "p.jsonl", {"prompt": "1+1="}), tmp_path / "o")
    assert generated[0][0].model.path == run / "model"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("from_", ["", "run", "run/checkpoints/rl-000003", "other", "model"])
def test_newest_weights_of_a_run_generate_unless_others_are_named(from_: str, run: Path, tmp_path: Path, generated: list[Any]) -> None:
    """Whether the model was created for the run or is a folder of the recipe."""
    weights, trained, other = run / "model", tmp_path / "run", tmp_path / "other"
    for each in (trained, other):
        each.mkdir(exist_ok=True)
        (each / "recipe.resolved.yaml").touch()
    third, newest, elsewhere = (
        leave_checkpoint(*it) for it in ((trained, "rl-000003", 3), (trained, "rl-000007", 7), (other, "sft-000001", 1))
    )
    wanted = {"": (newest, 7), "run": (newest, 7), "run/checkpoints/rl-000003": (third, 3), "other": (elsewhere, 1), "model": (None, 0)}
    from_weights = str(weights) if from_ == "model" else str(tmp_path / from_) if from_ else None
    created = recipe(trained, "model.config=null", f"model.path={weights}", "model.init=weights")
    said: list[str] = []
    answer(created, write_prompts(tmp_path / "p.jsonl", {"prompt": "1+1="}), tmp_path / "o", report=said.append, from_weights=from_weights)
    source, (checkpoint, version) = generated[0][0], wanted[from_]
    assert (source.model.path, source.checkpoint, source.version) == (weights, checkpoint, version)
    assert said[0] == "model: " + (f"checkpoint {checkpoint} (weight version {version})" if checkpoint else f"the weights of {weights}")


def test_a_model_can_be_named_for_a_recipe_that_makes_its_own(run: Path, tmp_path: Path, generated: list[Any]) -> None:
    before = sorted((run / "model").iterdir())
    created = recipe(tmp_path / "nowhere")
    answer(created, write_prompts(tmp_path / "p.jsonl", {"prompt": "1+1="}), tmp_path / "o", from_weights=str(run / "model"))
    assert (generated[0][0].model.path, generated[0][0].checkpoint) == (run / "model", None)
    assert sorted((run / "model").iterdir()) == before


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ("", r"is neither a run directory .* nor a checkpoint .* nor a model's folder \(config\.json\)"),
        ("recipe.resolved.yaml", "no checkpoint yet"),
    ],
)
def test_path_without_weights_is_reported(left: str, message: str, run: Path, tmp_path: Path, generated: list[Any]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    if left:
        (empty / left).touch()
    with pytest.raises(UserError, match=rf"--from: {empty} .*{message}"):
        answer(recipe(run), write_prompts(tmp_path / "p.jsonl", {"prompt": "1"}), tmp_path / "o", from_weights=str(empty))


def test_top_p_is_accepted_without_training(run: Path, tmp_path: Path, generated: list[Any]) -> None:
    answer(recipe(run, "rollout.top_p=0.9"), write_prompts(tmp_path / "p.jsonl", {"prompt": "1+1="}), tmp_path / "o")
    assert len(generated) == 1


def test_other_checkpoint_does_not_continue_the_file(run: Path, tmp_path: Path, generated: list[Any]) -> None:
    from mtpctl.samples import Sample

    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "1+1="}, {"prompt": "2+2="})
    created = recipe(run)
    with SampleFile.open(
        tmp_path / "o", rollout.origin_of(created, engines.find_weights(created, None, tmp_path, silent)), {"p.jsonl:1": "1+1="}
    ) as file:
        file.append(Sample("p.jsonl:1", "g", [1], response_ids=[2], finish_reason="stop"), "1+1=", "x")
    answer(created, prompts, tmp_path / "o")
    assert [prompt.prompt_id for prompt, _ in generated[0][1]] == ["p.jsonl:2"]
    leave_checkpoint(run, "rl-000003", 3)
    with pytest.raises(UserError, match="was sampled from other weights or sampling settings of this recipe"):
        answer(created, prompts, tmp_path / "o")


@pytest.mark.parametrize(
    ("row", "sets", "n", "message"),
    [
        (
            {"prompt": "1" * 64},
            [],
            1,
            r"p\.jsonl:1: the prompt has 64 tokens, which leaves no room for a response in the context of 64; shorten or remove it",
        ),
        ({"prompt": "1" * 40}, ["rollout.context=32"], 1, r"no room for a response in the context of 32"),
        ({"answer": "1"}, [], 1, r"data\.columns\.prompt: p\.jsonl has no column 'prompt'; its columns are answer: set"),
        ({"prompt": ""}, [], 1, r"p\.jsonl:1: `prompt` must be non-blank text"),
        ({"prompt": "1"}, [], 0, r"--n: must be at least 1, got 0"),
        ({"prompt": "1"}, ["rollout.context=100"], 1, r"rollout\.context: the model has 64 positions, got 100"),
    ],
)
def test_bad_input_is_reported_before_anything_starts(
    row: dict[str, Any], sets: list[str], n: int, message: str, run: Path, tmp_path: Path, generated: list[Any]
) -> None:
    with pytest.raises(UserError, match=message):
        answer(recipe(run, *sets), write_prompts(tmp_path / "p.jsonl", row), tmp_path / "o", n)
    assert generated == [] and not (tmp_path / "o").exists()


def test_recipe_with_a_random_model_requires_a_run(tmp_path: Path, generated: list[Any]) -> None:
    with pytest.raises(UserError, match=r"model\.config: the model is created by training, and .*nowhere is not a run of this recipe"):
        answer(recipe(tmp_path / "nowhere"), write_prompts(tmp_path / "p.jsonl", {"prompt": "1"}), tmp_path / "o")
    assert not (tmp_path / "nowhere").exists()


def test_config_folder_with_random_init_requires_a_run(run: Path, tmp_path: Path, generated: list[Any]) -> None:
    drawn = recipe(tmp_path / "elsewhere", "model.config=null", f"model.path={run / 'model'}", "model.init=random")
    with pytest.raises(UserError, match=r"model\.init: the model is created by training, .* --from FOLDER"):
        answer(drawn, write_prompts(tmp_path / "p.jsonl", {"prompt": "1"}), tmp_path / "o")


def test_prompts_file_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "1"})
    before = prompts.read_bytes()
    with pytest.raises(UserError, match=r"--out: .* holds the prompts"):
        answer(recipe(run), prompts, prompts)
    assert prompts.read_bytes() == before


def test_missing_vllm_gives_exit_code_3_and_no_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.rollout.installed.find_spec", lambda name: None)
    with pytest.raises(PrerequisiteMissing, match=r"rollout\.engine: vllm is not installed"):
        answer(recipe(run), write_prompts(tmp_path / "p.jsonl", {"prompt": "1"}), tmp_path / "o")
    assert not (tmp_path / "o").exists()
