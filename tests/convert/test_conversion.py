"""Every family is converted to an equal checkpoint and back to an equal folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.checkpoint.listing import LISTING
from mtpctl.convert.bridge import StreamMap
from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
from mtpctl.convert.source import find_checkpoint, find_reference
from mtpctl.convert.verification import require_close_logits, require_equal
from mtpctl.errors import ThresholdMissed, UserError
from mtpctl.recipe.loading import dump_resolved, load_recipe
from mtpctl.recipe.model import MtpConfig
from tests.fakes.checkpoint_folders import SHARD, write_checkpoint
from tests.fakes.convert_models import FAMILIES, assert_like, assert_same_tensors, change_config, converted, model
from tests.fakes.packed_logits import packed_logits
from tests.fakes.tiny import engine, mimo, sequences


@pytest.mark.parametrize("case", [*FAMILIES, "qwen3-moe-dense"])
def test_round_trip_restores_every_tensor(tmp_path: Path, case: str) -> None:
    reference = model(case, tmp_path / "hf")
    conversion = converted(tmp_path / "hf", tmp_path / "checkpoint", verify=case in ("mimo", "deepseek-v3"))
    assert conversion.to == "megatron"
    if conversion.verified is not None:
        assert conversion.verified.max_logit_diff == 0 and conversion.verified.max_mtp_logit_diff == 0
    if reference is not None:
        _assert_logits(tmp_path, reference)
    assert converted(tmp_path / "checkpoint", tmp_path / "back").to == "hf"
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    assert not list(tmp_path.glob("*.partial"))


def _assert_logits(root: Path, reference: object) -> None:
    """Logits of an engine that restores the checkpoint match transformers."""
    ids = [s.token_ids.tolist() for s in sequences(3, high=40)]
    with engine(HfFolder.open(root / "hf"), train=False, mtp=MtpConfig(mode="load"), random_seed=5) as trainer:
        trainer.restore(root / "checkpoint")
        (logits,) = packed_logits(trainer, ids, 0)
    assert_like(logits, lambda: [reference(torch.tensor([sample])).logits[0] for sample in ids], [reference])  # type: ignore[operator]


def test_trainer_checkpoint_converts_to_the_exported_folder(tmp_path: Path) -> None:
    """Without its own Hugging Face side, it uses the folder of `--model`."""
    folder = mimo(tmp_path / "hf")
    with engine(folder, random_seed=3, mtp=MtpConfig(mode="load")) as trainer:
        trainer.save(tmp_path / "step-1")
        exported = {name: value.clone() for name, value in trainer.export()}
    converted(tmp_path / "step-1", tmp_path / "back", model=folder.path, verify=True)
    from safetensors.torch import load_file

    result = load_file(tmp_path / "back" / "model.safetensors")
    assert result.keys() == exported.keys()
    assert all(torch.equal(result[name], exported[name]) for name in exported)


def test_round_trip_restores_config_sections(tmp_path: Path) -> None:
    mimo(tmp_path / "hf")
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    change_config(tmp_path / "hf", rope_scaling=scaling)
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_scaling"] == scaling


def test_unmapped_parameters_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mimo(tmp_path / "hf")
    whole = StreamMap.__init__

    def poorer(self: StreamMap, *inputs: Any) -> None:
        whole(self, *inputs)
        self.tasks = [task for task in self.tasks if "mlp.linear_fc2" not in task.param_name]

    monkeypatch.setattr(StreamMap, "__init__", poorer)
    with pytest.raises(UserError, match=r"no Hugging Face tensor is known for decoder\.layers\.0\.mlp\.linear_fc2\.weight"):
        converted(tmp_path / "hf", tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_config_of_a_checkpoint_without_mtp_has_no_mtp_layers(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "hf")
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        trainer.save(tmp_path / "step-1")
    converted(tmp_path / "step-1", tmp_path / "back", model=folder.path)
    assert HfFolder.open(tmp_path / "back").shape.mtp_layers == 0


def test_other_files_are_copied_and_the_config_is_corrected(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "hf", auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"}).path
    for name, text in {
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "configuration_mimo.py": "# code",
    }.items():
        (folder / name).write_text(text)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "secret").write_text("")
    converted(folder, tmp_path / "checkpoint", dtype="bf16")
    converted(tmp_path / "checkpoint", tmp_path / "back")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {path.name for path in folder.iterdir()} - {".cache"}
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and config["num_nextn_predict_layers"] == 1


def test_published_length_of_mimo_7b_is_corrected() -> None:
    from mtpctl.convert.hf_folder import config_to_write
    from mtpctl.families.configs import hub_config

    config = hub_config("XiaomiMiMo/MiMo-7B-RL") | {"max_position_embeddings": 640000}
    trainer = config_to_write(config, torch.bfloat16, mtp_layers=1)
    assert trainer["max_position_embeddings"] == 32768 and config["max_position_embeddings"] == 640000


def test_dtype_casts_all_tensors_except_those_in_fp32(tmp_path: Path) -> None:
    model("deepseek-v3", tmp_path / "hf")
    from tests.fakes.convert_models import tensors, write

    stored = tensors(tmp_path / "hf")
    mixed = {name: value if name.endswith("e_score_correction_bias") else value.bfloat16() for name, value in stored.items()}
    write(tmp_path / "hf", mixed)
    converted(tmp_path / "hf", tmp_path / "checkpoint", dtype="fp16", verify=True)
    converted(tmp_path / "checkpoint", tmp_path / "back")
    result = tensors(tmp_path / "back")
    assert {str(value.dtype) for name, value in result.items() if not name.endswith("correction_bias")} == {"torch.float16"}
    assert {str(value.dtype) for name, value in result.items() if name.endswith("correction_bias")} == {"torch.float32"}


def test_narrower_dtype_is_verified(tmp_path: Path) -> None:
    """Against the rounded tensors of the checkpoint."""
    model("mimo", tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    conversion = converted(tmp_path / "checkpoint", tmp_path / "bf16", dtype="bf16", verify=True)
    assert conversion.verified is not None and 0 < conversion.verified.max_logit_diff < 0.1


def test_verification_compares_scalars_and_rejects_nan_logits() -> None:
    require_equal("scale", torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ThresholdMissed, match="scale differs"):
        require_equal("scale", torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(ThresholdMissed, match="logits differ by nan"):
        require_close_logits([torch.zeros(2), torch.tensor([float("nan")])], [torch.zeros(2), torch.zeros(1)], 1.0)


def test_dtype_applies_to_a_checkpoint_without_mtp(tmp_path: Path) -> None:
    """The reference folder has them."""
    folder = mimo(tmp_path / "hf")
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        trainer.save(tmp_path / "step-1")
    converted(tmp_path / "step-1", tmp_path / "back", model=folder.path, dtype="bf16")
    from tests.fakes.convert_models import tensors

    assert {value.dtype for value in tensors(tmp_path / "back").values()} == {torch.bfloat16}


@pytest.mark.parametrize("sets", [["model.config.rope_theta=20000"], ["model.config=null", "model.path=org/a-model", "model.init=random"]])
def test_model_of_a_run_with_random_weights_is_in_its_directory(tmp_path: Path, sets: list[str]) -> None:
    recipe = load_recipe("tiny_mtp", sets=[*sets, f"run_dir={tmp_path / 'run'}"]).recipe
    create_hf_folder(load_recipe("tiny_mtp").recipe.model.config or {}, tmp_path / "run" / "model", 0)
    (tmp_path / "run" / "recipe.resolved.yaml").write_text(dump_resolved(recipe))
    assert find_reference(tmp_path / "run" / "checkpoints" / "rl-000001", None).folder.path == tmp_path / "run" / "model"


def test_model_of_a_run_that_loaded_weights_is_the_loaded_folder(tmp_path: Path) -> None:
    loaded = mimo(tmp_path / "loaded").path
    recipe = load_recipe("tiny_mtp", sets=["model.config=null", f"model.path={loaded}", "model.init=weights"]).recipe
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "recipe.resolved.yaml").write_text(dump_resolved(recipe))
    assert find_reference(tmp_path / "run" / "checkpoints" / "rl-000001", None).folder.path == loaded


def test_checkpoint_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the model's folder with --model"):
        find_reference(tmp_path / "checkpoints" / "rl-000001", None)


def test_checkpoint_of_another_program_with_a_missing_or_truncated_shard_is_rejected(tmp_path: Path) -> None:
    path, lines = write_checkpoint(tmp_path, "rl-000001"), list[str]()
    for name in (LISTING, "engine.json", "run.json"):
        (path / name).unlink()
    assert find_checkpoint(path, lines.append) == path and lines == [f"{path} has no checksums: its contents are not verified"]
    os.truncate(path / SHARD, 2000)
    with pytest.raises(UserError, match=rf"^{path}/{SHARD} has 2,000 bytes, and 4,096 were saved; name another checkpoint, or the run"):
        find_checkpoint(path)
    (path / SHARD).unlink()
    with pytest.raises(UserError, match=rf"^{path}/{SHARD} is missing; name another checkpoint, or the run"):
        find_checkpoint(path)
