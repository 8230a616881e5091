"""Variants of published folders: packed experts, wrappers, FP8, tied and missing heads. Conversion keeps their names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtpctl.checkpoint.listing import read_listing, write_listing
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.errors import UserError
from mtpctl.recipe.model import MtpConfig
from tests.fakes.convert_found import pack, quantize
from tests.fakes.convert_models import assert_same_tensors, change_config, converted, model, tensors, write
from tests.fakes.tiny import mimo
from tests.fakes.toys import NEMOTRON_H, toy_folder

Tensors = dict[str, Tensor]


def there_and_back(root: Path) -> Path:
    converted(root / "hf", root / "checkpoint", verify=True)
    converted(root / "checkpoint", root / "back", verify=True)
    return root / "back"


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3.5-moe"])
def test_packed_experts_are_read_and_converted_back(tmp_path: Path, case: str, suffix: str) -> None:
    model(case, tmp_path / "hf")
    plain = ModelWeights(tmp_path / "hf")
    before = {name: plain[name].clone() for name in plain}
    write(tmp_path / "hf", pack(tensors(tmp_path / "hf"), 6, suffix))
    weights = ModelWeights(tmp_path / "hf")
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    assert_same_tensors(there_and_back(tmp_path), tmp_path / "hf")


def wrapped(rename: Callable[[str], str], stored: Tensors) -> Tensors:
    tower = {"visual.patch_embed.proj.weight": torch.randn(8, 3, 2, 2).bfloat16(), "visual.steps": torch.arange(5)}
    return {rename(name): value for name, value in stored.items()} | tower


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("model.", "model.language_model.", 1),
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "language_model.", 1),
    ],
)
def test_wrapped_language_model_is_converted_back_unchanged(tmp_path: Path, rename: Callable[[str], str]) -> None:
    """The language model is found under their prefix, and a vision tower is copied unchanged."""
    folder = mimo(tmp_path / "hf").path
    write(folder, wrapped(rename, tensors(folder)))
    assert_same_tensors(there_and_back(tmp_path), folder)


def test_tied_head_that_is_stored_is_accepted(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "hf", tie_word_embeddings=True).path
    stored = tensors(folder)
    assert "lm_head.weight" not in stored
    write(folder, stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    assert_same_tensors(there_and_back(tmp_path), folder)


@pytest.mark.parametrize("wrapper", ["", "language_model."])
def test_stored_head_that_differs_from_the_embedding_is_used(tmp_path: Path, wrapper: str, caplog: pytest.LogCaptureFixture) -> None:
    """Although the config ties them; transformers and vLLM do the same."""
    folder = mimo(tmp_path / "hf", tie_word_embeddings=True).path
    stored = tensors(folder)
    head = stored["model.embed_tokens.weight"] + 1
    write(folder, {wrapper + name: value for name, value in (stored | {"lm_head.weight": head}).items()})
    weights = ModelWeights(folder)
    assert not weights.shape.tied and torch.equal(weights["lm_head.weight"], head)
    assert [record.message for record in caplog.records if "tie_word_embeddings" in record.message] == [
        f"{folder / 'config.json'}: tie_word_embeddings is true, but the folder stores a different {wrapper}lm_head.weight; "
        "it is used, as in transformers and vLLM. Set tie_word_embeddings: false."
    ]
    back = there_and_back(tmp_path)
    assert_same_tensors(back, folder)
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False


def test_stored_head_of_a_tied_nemotron_is_used(tmp_path: Path) -> None:
    """Its embedding has another name than that of other families."""
    folder = toy_folder(NEMOTRON_H | {"tie_word_embeddings": True}, tmp_path / "hf", 0, "fp32")
    stored = tensors(folder)
    head = stored["backbone.embeddings.weight"] + 1
    write(folder, stored | {"lm_head.weight": head})
    weights = ModelWeights(folder)
    assert not weights.shape.tied and torch.equal(weights["lm_head.weight"], head)


def test_logits_of_a_differing_tied_head_match_transformers(tmp_path: Path) -> None:
    from tests.fakes.packed_logits import packed_logits
    from tests.fakes.tiny import engine, sequences

    reference = model("qwen2-tied", tmp_path)
    stored = tensors(tmp_path)
    head = stored["model.embed_tokens.weight"].flip(0).contiguous()
    write(tmp_path, stored | {"lm_head.weight": head})
    reference.lm_head.weight = torch.nn.Parameter(head)  # as `from_pretrained` leaves the two: it does not tie what differs
    ids = [sample.token_ids.tolist() for sample in sequences(3)]
    with engine(HfFolder.open(tmp_path), train=False, mtp=MtpConfig(mode="off")) as trainer:
        (logits,) = packed_logits(trainer, ids, 0)
        exported = {name: value.clone() for name, value in trainer.export()}
    with torch.no_grad():
        for result, sample in zip(logits, ids, strict=True):
            torch.testing.assert_close(result, reference(torch.tensor([sample])).logits[0], atol=1e-5, rtol=0)
    assert torch.equal(exported["lm_head.weight"], head)


def test_missing_head_is_an_error(tmp_path: Path) -> None:
    """If the config does not state it, the head is tied; if it says that they differ, the head is missing."""
    folder = mimo(tmp_path / "hf").path
    write(folder, {name: value for name, value in tensors(folder).items() if name != "lm_head.weight"})
    with pytest.raises(UserError, match=r"requires lm_head\.weight, which the weights lack"):
        converted(folder, tmp_path / "checkpoint")
    change_config(folder, tie_word_embeddings=None)
    assert_same_tensors(there_and_back(tmp_path), folder)
    assert HfFolder.open(tmp_path / "back").shape.tied


@pytest.mark.parametrize("case", ["qwen3-next", "deepseek-v3"])
def test_mtp_layers_missing_in_the_config_are_detected(tmp_path: Path, case: str) -> None:
    model(case, tmp_path / "hf")
    change_config(tmp_path / "hf", num_nextn_predict_layers=None)
    assert HfFolder.open(tmp_path / "hf", weights=False).shape.mtp_layers == 0
    assert HfFolder.open(tmp_path / "hf").shape.mtp_layers == 1
    back = there_and_back(tmp_path)
    assert_same_tensors(back, tmp_path / "hf")
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_fp8_is_dequantized_block_by_block(tmp_path: Path) -> None:
    model("deepseek-v3", tmp_path / "hf")
    expected = quantize(tmp_path / "hf")
    back = there_and_back(tmp_path)
    result = tensors(back)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_other_quantization_is_rejected(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "hf").path
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match="quant_method 'gptq' is not supported; only fp8 is"):
        converted(folder, tmp_path / "checkpoint")


def test_pickled_weights_are_converted_to_safetensors(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "hf").path
    stored = tensors(folder)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    torch.save(stored, folder / "pytorch_model.bin")
    back = there_and_back(tmp_path)
    assert_same_tensors(back, tmp_path)
    assert not (back / "pytorch_model.bin").exists()


def test_padded_vocabulary_is_converted(tmp_path: Path) -> None:
    """The folder lacks the rows that tp 2 pads, and a checkpoint of one rank loads on two."""
    folder = mimo(tmp_path / "hf", vocab_size=61).path
    assert_same_tensors(there_and_back(tmp_path), folder)


def test_index_of_missing_pickled_shards_is_ignored(tmp_path: Path) -> None:
    """A download of `*.json` and `*.safetensors` leaves such an index next to the safetensors."""
    folder = mimo(tmp_path / "hf").path
    shards = {name: "pytorch_model-00001-of-00002.bin" for name in tensors(folder)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_same_tensors(there_and_back(tmp_path), folder)


def test_random_weights_have_identity_norms(tmp_path: Path) -> None:
    """Zero-centered norms are 0, including those before a drafter's projection."""
    from mtpctl.convert.hf_folder import create_hf_folder
    from tests.fakes.convert_models import QWEN3_5, SIZES

    config = SIZES | QWEN3_5 | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    stored = tensors(create_hf_folder(config, tmp_path / "hf", seed=0).path)
    norms = {name: value for name, value in stored.items() if "norm" in name}
    assert {name.split(".")[1] for name in norms if name.startswith("mtp.")} >= {"pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"}
    assert all(torch.all(value == float(name.endswith("linear_attn.norm.weight"))) for name, value in norms.items())


def test_fp8_vision_tower_is_rejected(tmp_path: Path) -> None:
    """It would be copied unchanged into a folder that is not quantized."""
    folder = mimo(tmp_path / "hf").path
    tower = {"visual.proj.weight": torch.ones(16, 16).to(torch.float8_e4m3fn), "visual.proj.weight_scale_inv": torch.full((1, 1), 3.0)}
    plain = tensors(folder)
    converted(folder, tmp_path / "plain")
    write(folder, plain | tower)
    with pytest.raises(UserError, match=r"visual\.proj\.weight is FP8 and not part of the language model; "):
        converted(folder, tmp_path / "checkpoint")
    # A checkpoint without the model's files, and with a list that does not miss them.
    shutil.rmtree(tmp_path / "plain" / "hf")
    listing = read_listing(tmp_path / "plain")
    assert listing is not None
    write_listing(tmp_path / "plain", listing.number, {})
    with pytest.raises(UserError, match=r"visual\.proj\.weight is FP8"):
        converted(tmp_path / "plain", tmp_path / "back", model=folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "plain"]
