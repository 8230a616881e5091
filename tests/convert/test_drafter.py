"""Folders with an added drafter: links or copies of the model's files, and conversions of the pair."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpctl.convert.drafter import MTP_FILE, add_drafter, copy_with_drafter
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.errors import UserError
from mtpctl.families.drafters import DrafterKind
from mtpctl.families.tensors import section_of
from mtpctl.recipe.model import MtpConfig
from tests.fakes.convert_models import change_config, converted
from tests.fakes.full_disk import full_disk
from tests.fakes.tiny import engine
from tests.fakes.toys import GLM4_MOE, LLAMA_EAGLE3, MIMO, MIMO_V2_FLASH, NEMOTRON_H, QWEN3_5, QWEN3_MOE_EAGLE3, SIZES, toy_folder


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


QWEN2 = {**without(SIZES, "head_dim"), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
MODELS: dict[str, tuple[dict[str, Any], DrafterKind]] = {
    "llama": (without(LLAMA_EAGLE3, "drafter") | {"num_nextn_predict_layers": 0}, "eagle3"),
    "qwen3-moe": (without(QWEN3_MOE_EAGLE3, "drafter"), "eagle3"),
    "llama with DFlash": (without(LLAMA_EAGLE3, "drafter") | {"num_nextn_predict_layers": 0}, "dflash"),
    "qwen3-moe with DFlash": (without(QWEN3_MOE_EAGLE3, "drafter"), "dflash"),
    "qwen2": (QWEN2, "mtp"),
    "glm4-moe": (without(GLM4_MOE, "num_nextn_predict_layers"), "mtp"),
    "mimo-v2-flash": (MIMO_V2_FLASH | {"num_nextn_predict_layers": 0}, "mtp"),
    "nemotron-h": (without(NEMOTRON_H, "num_nextn_predict_layers"), "mtp"),
    "qwen3.5": (without(QWEN3_5, "mtp_num_hidden_layers"), "mtp"),
}


def source_of(name: str, path: Path, dtype: str = "bf16") -> Path:
    """A model without a drafter, with a tokenizer's file and one that is hidden."""
    folder = toy_folder(MODELS[name][0], path, 0, dtype)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_trunk_is_that_of(source: Path, target: Path) -> None:
    before, after = ModelWeights(source), ModelWeights(target)
    trunk = {name for name in after if section_of(name, after.shape) == "target"}
    assert trunk == set(before)
    for name in before:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].contiguous().view(torch.uint8), before[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("name", MODELS)
def test_added_drafter_is_next_to_links_of_the_models_files(tmp_path: Path, name: str) -> None:
    source, kind = source_of(name, tmp_path / "model"), MODELS[name][1]
    folder = add_drafter(source, tmp_path / "target", kind, seed=1)
    added = {"drafter/config.json", "drafter/model.safetensors"} if kind != "mtp" else {MTP_FILE, "model.safetensors.index.json"}
    assert files_of(folder.path) == {"config.json", "model.safetensors", "tokenizer/vocab.json", *added}
    assert (folder.path / "model.safetensors").resolve() == source / "model.safetensors"
    assert_trunk_is_that_of(source, folder.path)
    assert folder.shape.mtp_layers == 1 and (folder.shape.eagle3 is not None) == (kind == "eagle3")
    assert (folder.shape.dflash is not None) == (kind == "dflash")
    weights = ModelWeights(folder.path)
    drafter = [tensor for tensor in weights if section_of(tensor, folder.shape) == "draft"]
    assert drafter and all(weights[tensor].dtype == torch.bfloat16 for tensor in drafter)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("name", MODELS)
def test_new_drafter_is_a_working_decoder_layer(tmp_path: Path, name: str) -> None:
    """It starts from the last layer's matrices, and its state for the LM head is finite and depends on token and position."""
    source = source_of(name, tmp_path / "model", "fp32")
    folder = add_drafter(source, tmp_path / "target", MODELS[name][1])
    model, weights = ModelWeights(source), ModelWeights(folder.path)
    mtp = folder.shape.mtp
    assert mtp is not None
    last = folder.shape.layers - 1 - folder.shape.layer_kinds[::-1].index(mtp.kind)
    projection = "self_attn.o_proj.weight" if folder.shape.mamba is None else "mixer.o_proj.weight"
    name_of = f"{mtp.name(mtp.layer, 0, folder.shape.layers)}{projection}"
    assert torch.equal(weights[name_of], model[f"{folder.shape.prefix}layers.{last}.{projection}"])
    from mtpctl.model.packing import Packing

    with (
        engine(folder, train=False, mtp=MtpConfig(repeat=2), precision="bf16" if name == "qwen3.5" else "fp32") as trainer,
        torch.no_grad(),
    ):
        states = trainer.module(torch.tensor([3, 7, 7, 9]), Packing.of([4], "cpu"), depths=2).mtp
    for state in states:
        assert bool(state.isfinite().all()) and (state[1] - state[2]).abs().max() > 0


def test_drafter_depends_on_the_seed_only_where_no_tensor_of_the_model_fits(tmp_path: Path) -> None:
    source = source_of("llama", tmp_path / "model")
    one, same, other = (add_drafter(source, tmp_path / str(n), seed=seed) for n, seed in enumerate((1, 1, 2)))
    first, again, third = (load_file(folder.path / "drafter" / "model.safetensors") for folder in (one, same, other))
    assert all(torch.equal(first[tensor], again[tensor]) for tensor in first)
    assert all(torch.equal(first[tensor], third[tensor]) for tensor in first), "llama's last layer has a tensor for each"


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_copy_with_a_trained_drafter_shares_no_files_with_its_source(tmp_path: Path, name: str) -> None:
    source = source_of(name, tmp_path / "model")
    trained = add_drafter(source, tmp_path / "trained").path
    file = trained / ("drafter/model.safetensors" if MODELS[name][1] == "eagle3" else MTP_FILE)
    changed = {tensor: value + 1 for tensor, value in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    folder = copy_with_drafter(source, trained, tmp_path / "target")
    assert files_of(folder.path) == files_of(trained)
    assert not any(path.is_symlink() for path in folder.path.rglob("*"))
    assert (folder.path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert_trunk_is_that_of(source, folder.path)
    result = load_file(folder.path / file.relative_to(trained))
    assert result.keys() == changed.keys() and all(torch.equal(result[tensor], changed[tensor]) for tensor in changed)


def test_mtp_layers_are_added_to_the_index_of_shards(tmp_path: Path) -> None:
    source = source_of("qwen2", tmp_path / "model")
    stored = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(stored)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({tensor: stored[tensor] for tensor in part}, source / file)
        weight_map |= dict.fromkeys(part, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    before = (source / "model.safetensors.index.json").read_text()
    folder = add_drafter(source, tmp_path / "target")
    index = json.loads((folder.path / "model.safetensors.index.json").read_text())
    drafts = {tensor for tensor in index["weight_map"] if index["weight_map"][tensor] == MTP_FILE}
    assert {tensor: file for tensor, file in index["weight_map"].items() if tensor not in drafts} == weight_map
    assert drafts == set(load_file(folder.path / MTP_FILE))
    assert (source / "model.safetensors.index.json").read_text() == before, "the model's own index is not written through its link"
    assert_trunk_is_that_of(source, folder.path)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_restores_the_pair(tmp_path: Path, name: str) -> None:
    source = add_drafter(source_of(name, tmp_path / "model"), tmp_path / "pair", MODELS[name][1]).path
    converted(source, tmp_path / "checkpoint", verify=name == "llama")
    converted(tmp_path / "checkpoint", tmp_path / "back")
    before, after = ModelWeights(source), ModelWeights(tmp_path / "back")
    assert set(after) == set(before) and all(torch.equal(after[tensor], before[tensor]) for tensor in before)
    for file in ("config.json", "drafter/config.json"):
        if (source / file).exists():
            assert json.loads((tmp_path / "back" / file).read_text()) == json.loads((source / file).read_text())
    assert (tmp_path / "back" / "drafter").exists() == (MODELS[name][1] != "mtp")


def test_checkpoint_without_the_drafter_converts_to_a_model_without_one(tmp_path: Path) -> None:
    folder = add_drafter(source_of("llama", tmp_path / "model", "fp32"), tmp_path / "pair")
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        trainer.save(tmp_path / "step-1")
    converted(tmp_path / "step-1", tmp_path / "back", model=folder.path)
    assert not (tmp_path / "back" / "drafter").exists()
    assert HfFolder.open(tmp_path / "back").shape.mtp_layers == 0
    assert set(ModelWeights(tmp_path / "back")) == set(ModelWeights(tmp_path / "model"))


def test_trained_checkpoint_converts_to_the_dtype_of_the_option_in_both_configs(tmp_path: Path) -> None:
    pair = add_drafter(source_of("llama", tmp_path / "model", "fp32"), tmp_path / "pair").path
    converted(pair, tmp_path / "checkpoint")
    converted(tmp_path / "checkpoint", tmp_path / "back", dtype="bf16")
    for part in (tmp_path / "back", tmp_path / "back" / "drafter"):
        config = json.loads((part / "config.json").read_text())
        assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {"bfloat16"}
        assert {value.dtype for value in load_file(part / "model.safetensors").values()} == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------- bad input


def quantized(source: Path) -> str:
    change_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return f"{source}: its weights are quantized; first convert them"


def quantized_by_another_method(source: Path) -> str:
    change_config(source, quantization_config={"quant_method": "awq"})
    return f"{source / 'config.json'}: quantization_config.quant_method 'awq' is not supported"


def pickled(source: Path) -> str:
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    return f"{source}: its weights are pickled; convert them to safetensors first"


def damaged(source: Path) -> str:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return f"{file}: model.norm.weight: its data ends at byte"


def has_target(source: Path) -> str:
    (source.parent / "target").mkdir()
    (source.parent / "target" / "mine").write_text("")
    return f"{source.parent / 'target'}: exists; name another folder"


MISTAKES = [quantized, quantized_by_another_method, pickled, damaged, has_target]


@pytest.mark.parametrize("spoil", MISTAKES, ids=lambda spoil: spoil.__name__)
def test_bad_model_is_rejected_in_one_line_and_leaves_nothing(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    source = source_of("qwen2", tmp_path / "model")
    message = spoil(source)
    before = files_of(tmp_path)
    with pytest.raises(UserError) as caught:
        add_drafter(source, tmp_path / "target")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert files_of(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == (["model", "target"] if spoil is has_target else ["model"])


def test_model_with_a_head_that_only_its_weights_show_is_rejected(tmp_path: Path) -> None:
    source = toy_folder(MIMO, tmp_path / "model", 0, "bf16")
    change_config(source, num_nextn_predict_layers=None)
    with pytest.raises(UserError, match=r"^model: this mimo already has a drafter"):
        add_drafter(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("link", [True, False])
def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, name: str, link: bool) -> None:
    source = source_of(name, tmp_path / "model")
    trained = add_drafter(source, tmp_path / "trained").path
    for limit in (0, 5000):
        with full_disk(limit), pytest.raises(UserError, match="target: cannot be written") as caught:
            if link:
                add_drafter(source, tmp_path / "target")
            else:
                copy_with_drafter(source, trained, tmp_path / "target")
        assert "\n" not in str(caught.value)
        assert sorted(os.listdir(tmp_path)) == ["model", "trained"]
    assert add_drafter(source, tmp_path / "target").shape.mtp_layers == 1


def test_drafter_with_a_separate_embedding_or_head_is_rejected(tmp_path: Path) -> None:
    folder = add_drafter(source_of("llama", tmp_path / "model"), tmp_path / "target").path
    file = folder / "drafter" / "model.safetensors"
    stored = load_file(file)
    for tensor in ("lm_head.weight", "embed_tokens.weight", "d2t"):
        save_file(stored | {tensor: torch.zeros(331, 96)}, file)
        with pytest.raises(UserError) as caught:
            ModelWeights(folder)
        assert str(caught.value).startswith(f"{folder / 'drafter'}: {tensor} is not supported: the drafter shares the model's embedding")
    save_file(stored, file)
    mask = folder / "drafter" / "mask_embedding.pt"
    torch.save(torch.zeros(96), mask)
    with pytest.raises(UserError, match=f"^{mask}: separate mask embeddings are not supported; use a drafter of mtpctl add-drafter$"):
        ModelWeights(folder)
    mask.unlink()
    save_file({tensor: value for tensor, value in stored.items() if tensor != "fc.weight"}, file)
    with pytest.raises(UserError, match=r"the weights lack drafter\.fc\.weight"):
        ModelWeights(folder)
