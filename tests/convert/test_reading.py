"""The engine reads folders as the conversion does, and rejects the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.convert.adapters import hash_base_weights
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import UserError
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.objective import NextToken
from tests.fakes.convert_found import fp8, fp8_dense, packed, pickled, prefixed, quantize, unnamed
from tests.fakes.convert_models import CASES, LLAMA3_ROPE, assert_like, change_config, converted, hf_model, model, tensors, write
from tests.fakes.packed_logits import packed_logits
from tests.fakes.tiny import GENTLE, engine, mimo, sequences


def updated(folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and weights of one update."""
    with engine(HfFolder.open(folder), mtp=MtpConfig(mode="joint")) as trainer:
        trainer.set_optimizer(GENTLE)
        metrics = trainer.update(sequences(), NextToken())
        return {name: value for name, value in metrics.items() if "timing" not in name}, {n: v.clone() for n, v in trainer.export()}


@pytest.mark.parametrize("inputs", [fp8, fp8_dense, pickled, prefixed, packed, unnamed])
def test_update_matches_the_converted_folder(tmp_path: Path, inputs: Callable[[Path], None]) -> None:
    inputs(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "back")
    result, weights = updated(tmp_path / "hf")
    expected, same = updated(tmp_path / "back")
    assert result == expected and result["mtp/loss_1"] > 0
    assert weights.keys() == same.keys()
    assert all(torch.equal(value, same[name]) for name, value in weights.items())


@pytest.mark.parametrize("case", ["glm4-moe", "mimo-v2-flash"])
def test_weights_match_the_source_of_the_folder(tmp_path: Path, case: str) -> None:
    """Bit for bit, with FP8 multiplied by its scales."""
    model(case, tmp_path)
    meant = quantize(tmp_path)
    with engine(HfFolder.open(tmp_path), train=False, mtp=MtpConfig(mode="load")) as trainer:
        exported = dict(trainer.export())
        assert exported.keys() == meant.keys()
        assert all(torch.equal(value, meant[name].float()) for name, value in exported.items())


@pytest.mark.parametrize("case", ["mimo", "deepseek-v3"])
def test_mtp_layers_are_not_checked_without_mtp(tmp_path: Path, case: str) -> None:
    """They may exist, have another size, be FP8 without scales, or be missing."""
    model(case, tmp_path)
    whole = tensors(tmp_path)
    drafts = [name for name in whole if "mtp_layers" in name or ".layers.3." in name]
    changes: list[Callable[[str], dict[str, Tensor]]] = [
        lambda name: {name: whole[name]},
        lambda name: {name: whole[name][:1].clone()},
        lambda name: {name: whole[name].to(torch.float8_e4m3fn)},
        lambda name: {},
    ]
    assert drafts
    for change in changes:
        retained = {name: value for name, value in whole.items() if name not in drafts}
        for name in drafts:
            retained |= change(name)
        write(tmp_path, retained)
        with engine(HfFolder.open(tmp_path), train=False, mtp=MtpConfig(mode="off")) as trainer:
            assert all(torch.equal(value, whole[name]) for name, value in trainer.export())


def test_adapter_base_fingerprint_is_independent_of_storage(tmp_path: Path) -> None:
    """Equal weights have the same fingerprint in any format; others do not."""
    mimo(tmp_path / "plain")
    pickled(tmp_path / "pickled")
    assert hash_base_weights(tmp_path / "plain") == hash_base_weights(tmp_path / "pickled")
    stored = tensors(tmp_path / "plain")
    write(tmp_path / "plain", {name: value + 1 for name, value in stored.items()})
    assert hash_base_weights(tmp_path / "plain") != hash_base_weights(tmp_path / "pickled")


class TestUnsupportedFolder:
    @pytest.fixture
    def started(self, tmp_path: Path) -> Iterator[Callable[[], None]]:
        def start() -> None:
            with engine(HfFolder.open(tmp_path / "hf"), mtp=MtpConfig(mode="joint")):
                pass

        yield start

    def test_fp8_without_scales_is_rejected(self, tmp_path: Path, started: Callable[[], None]) -> None:
        fp8_dense(tmp_path / "hf")
        lost = "model.layers.0.mlp.up_proj.weight_scale_inv"
        write(tmp_path / "hf", {name: value for name, value in tensors(tmp_path / "hf").items() if name != lost})
        with pytest.raises(UserError, match=rf"model.layers.0.mlp.up_proj.weight is FP8 without the scales {lost}"):
            started()

    def test_fp8_with_scales_of_other_blocks_is_rejected(self, tmp_path: Path, started: Callable[[], None]) -> None:
        fp8_dense(tmp_path / "hf")
        change_config(tmp_path / "hf", quantization_config={"quant_method": "fp8", "weight_block_size": [8, 16]})
        with pytest.raises(
            UserError, match=r"q_proj.weight_scale_inv is \[2, 2\], but blocks of \[8, 16\] in \[32, 32\] require \[4, 2\]$"
        ):
            started()

    def test_truncated_shard_is_rejected(self, tmp_path: Path, started: Callable[[], None]) -> None:
        file = mimo(tmp_path / "hf").path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(UserError, match=r"model.safetensors: model\S+: its data ends at byte \d+, but the file at \d+; fetch it again"):
            started()

    def test_truncated_pickled_shard_is_rejected(self, tmp_path: Path, started: Callable[[], None]) -> None:
        pickled(tmp_path / "hf")
        file = tmp_path / "hf" / "pytorch_model-00002-of-00002.bin"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(UserError, match=r"pytorch_model-00002-of-00002.bin: not readable as a pickle of tensors only"):
            started()

    def test_missing_shard_is_rejected(self, tmp_path: Path, started: Callable[[], None]) -> None:
        pickled(tmp_path / "hf")
        (tmp_path / "hf" / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(UserError, match=r"index.json: lists pytorch_model-00002-of-00002.bin, which are missing in .*; fetch them"):
            started()

    def test_weights_of_another_model(self, tmp_path: Path) -> None:
        """Of another family or of other sizes; the engine keeps its weights."""
        model("qwen3", tmp_path / "qwen3")
        mimo(tmp_path / "wide", intermediate_size=64)
        with engine(mimo(tmp_path / "hf"), train=False, mtp=MtpConfig(mode="load")) as trainer:
            before = {name: value.clone() for name, value in trainer.export()}
            with pytest.raises(UserError, match=r"qwen3: contains a model of qwen3 \(Qwen3ForCausalLM\), but mimo is required$"):
                trainer.load(tmp_path / "qwen3")
            with pytest.raises(UserError, match=r"wide: \S+gate_proj.weight has the shape \[64, 32\], but the model requires \[48, 32\]$"):
                trainer.load(tmp_path / "wide")
            assert all(torch.equal(value, before[name]) for name, value in trainer.export())


SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"},
    "linear": {"type": "linear", "factor": 4.0},
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen3.5-vl", "qwen3.5-moe-vl", "glm4-moe")
OF_FAMILIES = [(family, kind) for family in FAMILIES for kind in SCALINGS] + [("deepseek-v3", "yarn")]


@pytest.mark.parametrize(("family", "kind"), OF_FAMILIES)
def test_logits_with_scaled_rotary_embeddings_match_transformers(tmp_path: Path, family: str, kind: str) -> None:
    name, fields = CASES[family]
    scaling = dict(SCALINGS[kind])
    model = hf_model(name, fields | {"rope_theta": 10000.0, "rope_scaling": dict(scaling)}, tmp_path)
    # The form in which the scaling was ignored: transformers itself writes rope_parameters alone.
    stated = {"rope_parameters": PLAIN, "rope_scaling": scaling}
    config = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, **({"text_config": {**config["text_config"], **stated}} if "text_config" in config else stated))
    ids = [s.token_ids.tolist() for s in sequences(3, low=30, high=60)]
    with engine(HfFolder.open(tmp_path), train=False, mtp=MtpConfig(mode="off")) as trainer:
        (logits,) = packed_logits(trainer, ids, 0)
    assert_like(logits, lambda: [model(torch.tensor([sample])).logits[0] for sample in ids], [model])
