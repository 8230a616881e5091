"""Checkpoints are written as folders with FP8 weights, and read back to the same values."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from mtpctl.cli.app import main
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.hf_writer import HfWriter
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.source import inspect
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.errors import ThresholdMissed, UserError
from mtpctl.families.quantization import FP8_BLOCK, list_unquantized_modules, select_fp8_names
from mtpctl.families.tensors import aliases
from mtpctl.kernels.block_fp8 import dequantize, quantize
from mtpctl.rollout.vllm.fp8_loading import find_quantized_names
from tests.fakes.convert_found import pack
from tests.fakes.convert_models import converted, model, tensors, write
from tests.fakes.fp8_models import SIZES, fp8_model
from tests.fakes.peft_files import spoiled, trained


def assert_quantized(folder: Path, source: ModelWeights) -> None:
    """Every tensor of the folder is the source's: quantized and dequantized, or in bf16."""
    result = ModelWeights(folder)
    names = select_fp8_names(source.shape)
    assert set(result) == set(source) and names
    for name, value in source.items():
        stored = result.quantized(name)
        assert (stored is not None) == (name in names), name
        if stored is None:
            expected = value if value.dtype == result.dtype(name) else value.bfloat16()
        else:
            expected = dequantize(*quantize(value, name), torch.bfloat16)
        assert torch.equal(result[name], expected), name


@pytest.mark.parametrize("case", sorted(SIZES))
def test_folder_reads_back_as_the_quantized_model(tmp_path: Path, case: str) -> None:
    fp8_model(case, tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    conversion = converted(tmp_path / "checkpoint", tmp_path / "fp8", dtype="fp8", verify=True)
    source = ModelWeights(tmp_path / "hf")
    assert_quantized(tmp_path / "fp8", source)
    assert conversion.verified is not None and conversion.verified.num_tensors == len(source) + len(source.extras)
    assert 0.01 < (conversion.verified.relative_error or 0) < 0.04
    assert conversion.verified.max_logit_diff > 0
    raw, names = FolderWeights(tmp_path / "fp8"), select_fp8_names(source.shape)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    quantization = config["quantization_config"]
    excluded = list_unquantized_modules(source.shape, quantized=names)
    outside = [name.removesuffix(".weight") for name in source.extras if name.endswith(".weight") and len(raw.entries[name].shape) == 2]
    assert quantization.pop("modules_to_not_convert") == excluded + outside
    assert bool(outside) == (case == "qwen3.5-vl")
    expected = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    assert quantization == expected
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert sum(entry.code == "F8_E4M3" for entry in raw.entries.values()) == len(names)
    assert conversion.tensors == len(raw.entries)
    assert conversion.nbytes == sum(file.stat().st_size for file in raw.files)


def test_folder_converts_back_to_a_checkpoint(tmp_path: Path) -> None:
    fp8_model("deepseek-v3", tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "fp8", dtype="fp8")
    conversion = converted(tmp_path / "fp8", tmp_path / "again", verify=True)
    assert conversion.verified is not None and conversion.verified.max_logit_diff == 0
    converted(tmp_path / "again", tmp_path / "back")
    back = tensors(tmp_path / "back")
    result = ModelWeights(tmp_path / "fp8")
    assert back.keys() == set(result) | set(aliases(result.shape))
    assert all(torch.equal(back[name], value) for name, value in result.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_packed_experts_are_stored_as_separate_matrices(tmp_path: Path) -> None:
    fp8_model("qwen3.5-moe", tmp_path / "hf")
    source = ModelWeights(tmp_path / "hf")
    write(tmp_path / "hf", pack(tensors(tmp_path / "hf"), 6))
    assert any(name.endswith("gate_up_proj") for name in tensors(tmp_path / "hf"))
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "fp8", dtype="fp8", verify=True)
    stored = FolderWeights(tmp_path / "fp8").entries
    assert stored["model.layers.0.mlp.experts.5.gate_proj.weight_scale_inv"].shape == (1, 1)
    assert not any("gate_up_proj" in name for name in stored)
    assert set(ModelWeights(tmp_path / "fp8")) == set(source)


def test_packed_experts_are_unpacked_by_the_conversion_that_the_error_suggests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tmp_path / "model with spaces"
    fp8_model("qwen3-moe", hf)
    write(hf, pack(tensors(hf), 6))
    with pytest.raises(UserError) as error:
        find_quantized_names(hf, drafter=True)
    parts = re.search(r"; to unpack them, which also rounds them to FP8, run `(.*)`, and set model\.path: (\S+)$", str(error.value))
    assert parts is not None, error.value
    monkeypatch.chdir(tmp_path)
    for command in parts[1].split(" && "):
        program, *arguments = shlex.split(command)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert program == "mtpctl" and not ended.value.code, command
    unpacked = ModelWeights(tmp_path / parts[2])
    names = find_quantized_names(tmp_path / parts[2], drafter=True)
    for name, value in ModelWeights(hf).items():
        expected = dequantize(*quantize(value, name), torch.bfloat16) if name in names else value.bfloat16()
        assert torch.equal(unpacked[name], expected), name


def test_fp8_folder_is_sharded_with_a_complete_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_model("mimo", tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    monkeypatch.setattr(HfWriter.__init__, "__kwdefaults__", {"stem": "model", "shard_bytes": 300_000})
    converted(tmp_path / "checkpoint", tmp_path / "fp8", dtype="fp8", verify=True)
    raw = FolderWeights(tmp_path / "fp8")
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert len(raw.files) > 2 and index["weight_map"].keys() == raw.entries.keys()
    assert index["metadata"]["total_size"] == raw.nbytes == inspect(tmp_path / "fp8", None)["bytes"]
    assert inspect(tmp_path / "fp8", None)["dtype"] == ["bfloat16", "float32", "float8_e4m3fn"]
    assert_quantized(tmp_path / "fp8", ModelWeights(tmp_path / "hf"))


def test_merged_adapter_is_quantized_like_the_published_weights(tmp_path: Path) -> None:
    fp8_model("mimo", tmp_path / "hf")
    published = trained(tmp_path, HfFolder.open(tmp_path / "hf"))
    conversion = converted(tmp_path / "step-1", tmp_path / "merged", model=tmp_path / "hf", merge=True, dtype="fp8", verify=True)
    assert conversion.verified is not None and 0.01 < (conversion.verified.relative_error or 0) < 0.04
    result = ModelWeights(tmp_path / "merged")
    for name in select_fp8_names(result.shape):
        assert torch.equal(result[name], dequantize(*quantize(published[name], name), torch.bfloat16)), name


@pytest.mark.parametrize("ending", ["o_proj.weight", "o_proj.weight_scale_inv", "input_proj.weight"])
def test_verify_detects_a_changed_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    fp8_model("mimo", tmp_path / "hf")
    # In the dtype of the folder, or a changed bit of an unquantized tensor would be rounded away.
    write(tmp_path / "hf", {name: value.bfloat16() for name, value in tensors(tmp_path / "hf").items()})
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    monkeypatch.setattr(HfWriter, "put", spoiled(HfWriter.put, ending))
    with pytest.raises(ThresholdMissed, match=rf"verify: .*{ending} differs, first at element 0"):
        converted(tmp_path / "checkpoint", tmp_path / "fp8", dtype="fp8", verify=True)
    assert not (tmp_path / "fp8").exists()


def test_unquantizable_input_is_rejected(tmp_path: Path) -> None:
    model("mimo", tmp_path / "small")
    with pytest.raises(UserError, match="--dtype fp8: only Hugging Face folders are written in FP8"):
        converted(tmp_path / "small", tmp_path / "checkpoint", dtype="fp8")
    converted(tmp_path / "small", tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"--dtype fp8: no matrix of this mimo model fits the engines' blocks of 128 x 128"):
        converted(tmp_path / "checkpoint", tmp_path / "fp8", dtype="fp8")
    fp8_model("mimo", tmp_path / "hf")
    stored = tensors(tmp_path / "hf")
    name = "model.layers.1.mlp.down_proj.weight"
    stored[name][5, 7] = float("nan")
    write(tmp_path / "hf", stored)
    converted(tmp_path / "hf", tmp_path / "damaged")
    with pytest.raises(UserError, match=rf"^{name}: contains infinities or NaN"):
        converted(tmp_path / "damaged", tmp_path / "fp8", dtype="fp8")
    assert not (tmp_path / "fp8").exists() and not list(tmp_path.glob("*.partial"))


def test_transformers_dequantizes_to_the_same_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    fp8_model("qwen3", tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "fp8", dtype="fp8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", quantization_config=FineGrainedFP8Config(dequantize=True))
    state = loaded.state_dict()
    result = ModelWeights(tmp_path / "fp8")
    assert set(result) <= set(state)
    for name, value in result.items():
        assert torch.equal(state[name].to(value.dtype), value), name
