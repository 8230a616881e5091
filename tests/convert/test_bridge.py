"""Missing and mismatched tensors of a folder are errors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpctl.convert.bridge import WeightBridge
from mtpctl.errors import UserError
from mtpctl.recipe.model import MtpConfig
from tests.fakes.tiny import engine, mimo


def drop(folder, *ends):
    file = folder.path / "model.safetensors"
    retained = {name: value for name, value in load_file(file).items() if not name.endswith(ends)}
    save_file(retained, file, metadata={"format": "pt"})


def test_missing_tensors_are_reported_by_name(tmp_path):
    folder = mimo(tmp_path / "model")
    drop(folder, "layers.1.self_attn.q_proj.weight", "model.norm.weight")
    with (
        pytest.raises(UserError, match=r"requires model.layers.1.self_attn.q_proj.weight, model.norm.weight, which the weights lack$"),
        engine(folder),
    ):
        pass


def test_missing_mtp_layers_are_accepted_with_mode_off(tmp_path):
    folder = mimo(tmp_path / "model")
    drop(folder, *(name for name in load_file(folder.path / "model.safetensors") if "mtp" in name))
    with (
        pytest.raises(UserError, match=r"names MTP layers, but the weights lack model.mtp_layers.0.*and .* more; .*mtp.mode: off"),
        engine(folder),
    ):
        pass
    with engine(folder, mtp=MtpConfig(mode="off")) as trainer:
        assert dict(trainer.export())


def test_weights_of_another_shape(tmp_path):
    folder = mimo(tmp_path / "model")
    file = folder.path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"][:60].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"config.json requires lm_head.weight as \[64, 32\], it is \[60, 32\]"), engine(folder):
        pass


def test_other_weights_of_the_same_model(tmp_path):
    first, second = mimo(tmp_path / "first"), mimo(tmp_path / "second")
    file = second.path / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    with engine(first) as trainer:
        trainer.load(second.path)
        expected = load_file(file)
        assert all(value.equal(expected[name]) for name, value in trainer.export())


def test_parameter_without_a_tensor_is_an_error(tmp_path):
    """Its memory would be uninitialized."""
    with engine(mimo(tmp_path / "model")) as trainer:
        trainer.module.decoder.layers[0].mlp.scale = torch.nn.Parameter(torch.empty(2))
        with pytest.raises(RuntimeError, match=r"of MiMoForCausalLM that were not filled: decoder\.layers\.0\.mlp\.scale$"):
            trainer.bridge.load([trainer.module])


@pytest.mark.parametrize(
    ("lost", "left"),
    [("model.norm.weight", r"decoder\.final_layernorm\.weight"), ("v_proj.bias", r"(decoder|mtp)\.layers\.\d.*linear_qkv\.bias, .*")],
)
def test_tensor_unknown_to_the_bridge_is_an_error(lost, left, tmp_path, monkeypatch):
    pretrained = WeightBridge.pretrained

    def fewer(self, names, *rest):
        return pretrained(self, [name for name in names if not name.endswith(lost)], *rest)

    monkeypatch.setattr(WeightBridge, "pretrained", fewer)
    with pytest.raises(RuntimeError, match=f"were not filled: {left}$"), engine(mimo(tmp_path / "model")):
        pass


def test_embedding_and_head_are_exported_after_the_layers(tmp_path):
    with engine(mimo(tmp_path / "model")) as trainer:
        names = [name for name, _ in trainer.export(sections=("target",))]
    assert set(names[-2:]) == {"model.embed_tokens.weight", "lm_head.weight"}
