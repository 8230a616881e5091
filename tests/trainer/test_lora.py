"""Adapters start at zero, train while the base is frozen, and are exported merged or under PEFT's names."""

from __future__ import annotations

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from mtpctl.convert.adapters import hash_base_weights, peft_config
from mtpctl.errors import UserError
from mtpctl.families.tensors import section_of
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.trainer.objective import NextToken
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences
from tests.fakes.toys import NEMOTRON_H
from tests.fakes.trainer_cases import MODELS

LORA = LoraConfig(rank=4, alpha=8.0)
ALL = {
    "mimo": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "qwen3-moe": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "deepseek": [
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    ],
    "qwen3.5": ["linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2"],
}
JOINT = MtpConfig(mode="joint", loss_scale=0.3, clip_grad=0)
FAST = GENTLE.model_copy(update={"lr": 3e-2})


def lora_of(model: str) -> LoraConfig:
    return LORA.model_copy(update={"targets": ALL[model]})


def scores(trainer):
    return [s.logprobs for s in trainer.score(sequences())]


@pytest.mark.parametrize("model", ALL)
def test_adapter_starts_at_zero_and_trains(tmp_path, model):
    """Bit-equal to the base before the first step; frozen weights stay to the bit; merged weights score as the adapter does;
    and what PEFT's names hold adds up to the same."""
    folder = mimo(tmp_path / "model", **MODELS[model])
    weights = load_file(folder.path / "model.safetensors")
    with engine(folder, mtp=JOINT) as trainer:
        expected = scores(trainer)
    with engine(folder, mtp=JOINT, lora=lora_of(model)) as trainer:
        assert scores(trainer) == expected
        trainer.set_optimizer(FAST)
        frozen = {name: p.clone() for name, p in trainer.module.named_parameters() if not p.requires_grad}
        assert not [name for name in frozen if ".adapter." in name or name.startswith("mtp.")]
        assert not [p for p in trainer.module.parameters() if not p.requires_grad and hasattr(p, "main_grad")]
        for _ in range(3):
            trainer.update(sequences(), NextToken())
        assert all(p.equal(frozen[name]) for name, p in trainer.module.named_parameters() if name in frozen)
        assert all(bool(p.any()) for name, p in trainer.module.named_parameters() if ".adapter." in name)
        result = scores(trainer)
        merged = {name: value.clone() for name, value in trainer.export()}
        adapter = {name: value.clone() for name, value in trainer.export_adapter()}
    assert merged.keys() == weights.keys()
    layers = {name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in adapter if ".lora_A." in name}
    changed = {name for name, value in merged.items() if section_of(name, folder.shape) == "target" and not value.equal(weights[name])}
    assert changed == {f"{layer}.weight" for layer in layers}
    for layer in layers:
        a, b = (adapter[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB")
        difference = merged[f"{layer}.weight"] - weights[f"{layer}.weight"]
        torch.testing.assert_close(LORA.alpha / LORA.rank * b @ a, difference, atol=1e-6, rtol=1e-5)
    assert result != expected
    save_file(merged, folder.path / "model.safetensors", metadata={"format": "pt"})
    with engine(folder, mtp=JOINT) as trainer:
        for row, right in zip(scores(trainer), result, strict=True):
            assert row == pytest.approx(right, abs=1e-5)


class TestAdapterCheckpoint:
    """A checkpoint with adapters contains adapters, MTP layers and their optimizer, and no other weights."""

    def test_resumes_bit_for_bit(self, tmp_path):
        folder = mimo(tmp_path / "model")
        with engine(folder, lora=LORA) as trainer:
            trainer.set_optimizer(FAST)
            trainer.update(sequences(), NextToken())
            trainer.save(tmp_path / "checkpoint", {"step": 1})
            expected = [trainer.update(sequences(), NextToken())["sft/loss"] for _ in range(3)]
        names = dist_checkpointing.load_tensors_metadata(str(tmp_path / "checkpoint"))
        assert {name for name in names if ".adapter." not in name and "mtp.layers" not in name} == set()
        with engine(folder, lora=LORA) as trainer:
            trainer.set_optimizer(FAST)
            assert trainer.restore(tmp_path / "checkpoint") == {"step": 1}
            assert [trainer.update(sequences(), NextToken())["sft/loss"] for _ in range(3)] == expected

    @pytest.mark.parametrize(
        ("lora", "message"),
        [
            (LORA.model_copy(update={"alpha": 4.0}), "train.lora.alpha: 4.0, but the adapter in .* has 8.0"),
            (LORA.model_copy(update={"rank": 2}), "train.lora.rank: 2, but the adapter in .* has 4"),
            (None, "has an adapter, which this run does not train; set train.lora"),
        ],
    )
    def test_of_other_adapters_is_rejected(self, tmp_path, lora, message):
        folder = mimo(tmp_path / "model")
        with engine(folder, lora=LORA) as trainer:
            trainer.save(tmp_path / "checkpoint")
        with engine(folder, lora=lora) as trainer, pytest.raises(UserError, match=message):
            trainer.restore(tmp_path / "checkpoint")

    def test_of_all_weights_is_rejected(self, tmp_path):
        folder = mimo(tmp_path / "model")
        with engine(folder) as trainer:
            trainer.save(tmp_path / "checkpoint")
        with engine(folder, lora=LORA) as trainer, pytest.raises(UserError, match=r"has all weights, .* remove train.lora"):
            trainer.restore(tmp_path / "checkpoint")

    def test_over_other_base_weights_is_rejected_without_changes(self, tmp_path):
        with engine(mimo(tmp_path / "model"), lora=LORA) as trainer:
            trainer.set_optimizer(FAST)
            trainer.update(sequences(), NextToken())
            trainer.save(tmp_path / "checkpoint")
        other = mimo(tmp_path / "other")
        tensors = load_file(other.path / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.001
        save_file(tensors, other.path / "model.safetensors", metadata={"format": "pt"})
        with engine(other, lora=LORA) as trainer:
            before = scores(trainer)
            with pytest.raises(UserError, match=r"model.path: the adapter in .* was trained on other weights"):
                trainer.restore(tmp_path / "checkpoint")
            assert scores(trainer) == before


def test_fingerprint_is_independent_of_shards(tmp_path):
    folder = mimo(tmp_path / "model").path
    whole = hash_base_weights(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, folder / f"model-{number % 7}-{number}.safetensors")
    assert hash_base_weights(folder) == whole


def test_recomputed_activations_give_the_same_gradients(tmp_path):
    """Although the input of the first recomputed layer has no gradient."""
    result = []
    for recompute in ("none", "full"):
        with engine(mimo(tmp_path / recompute), lora=LORA, recompute=recompute) as trainer:
            trainer.set_optimizer(GENTLE)
            trainer.update(sequences(), NextToken())
            result.append(gradients(trainer))
    assert result[0]["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].any()
    assert_close(result[1], result[0], 1e-6)


def test_unknown_target_is_rejected(tmp_path):
    lora = LORA.model_copy(update={"targets": ["linear_qkv", "q_proj"]})
    with (
        pytest.raises(UserError, match=r"train.lora.targets: no layer of this model is a q_proj; it has linear_fc1"),
        engine(mimo(tmp_path / "model"), lora=lora),
    ):
        pass


def test_peft_config_lists_the_exported_targets():
    names = ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    config = peft_config(names, LORA, "some/model")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8.0, ["q_proj", "up_proj"])


def test_loaded_mtp_layers_stay_frozen_while_an_adapter_trains(tmp_path):
    folder = mimo(tmp_path / "model")
    tensors = load_file(folder.path / "model.safetensors")
    drafter = {name: tensor for name, tensor in tensors.items() if section_of(name, folder.shape) == "draft"}
    with engine(folder, mtp=MtpConfig(mode="load"), lora=LORA) as trainer:
        trainer.set_optimizer(FAST)
        untrained = {name: tensor.clone() for name, tensor in trainer.export_adapter()}
        for _ in range(3):
            trainer.update(sequences(), NextToken())
        trained = dict(trainer.export_adapter())
        assert not any(torch.equal(untrained[name], trained[name]) for name in trained)
        sent = {name: tensor.clone() for name, tensor in trainer.export(["draft"], merged=False)}
    assert drafter and sent.keys() == drafter.keys()
    assert all(torch.equal(sent[name], drafter[name]) for name in drafter)


def test_only_a_gated_mlp_has_outputs_for_gate_and_up(tmp_path):
    """Rows of B are split over tensor-parallel ranks output by output, as the rows of the base weight are."""
    sizes = {}
    for name, fields in (("gated", {}), ("ungated", NEMOTRON_H | {"attention_bias": False})):
        lora = LORA.model_copy(update={"targets": ["linear_fc1"]})
        with engine(mimo(tmp_path / name, **fields), mtp=MtpConfig(mode="off"), lora=lora) as trainer:
            adapters = [module for path, module in trainer.module.named_modules() if path.endswith("linear_fc1.adapter")]
        sizes[name] = {tuple(adapter.segments.values()) for adapter in adapters}
    assert sizes == {"gated": {(48, 48)}, "ungated": {()}}
