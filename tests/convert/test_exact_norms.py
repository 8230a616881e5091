"""Norms in bf16 keep every bit through loading, export, weight sync and conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.convert.bridge import StreamMap, WeightStream
from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.errors import UserError
from mtpctl.families.tensors import tensor_shapes
from mtpctl.recipe.model import MtpConfig
from tests.fakes.convert_models import assert_same_tensors, converted, tensors, write
from tests.fakes.tiny import engine
from tests.fakes.toys import TOYS

BELOW_TWO = torch.arange(1, int(torch.tensor(2.0).bfloat16().view(torch.int16)), dtype=torch.int16).view(torch.bfloat16)
"""Every positive bf16 number below 2."""
WIDTH = len(BELOW_TWO) + 1
NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 37,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 1,
    "linear_value_head_dim": WIDTH,
}


def folder_with_every_value(family: str, path: Path) -> Path:
    """A bf16 folder whose norms contain every number below 2."""
    create_hf_folder({**TOYS[family], **NARROW}, path, seed=0, dtype=torch.bfloat16)
    stored = tensors(path)
    (output,) = [name for name in stored if name.endswith("linear_attn.norm.weight")]
    assert len(stored[output]) == WIDTH == 1 << 14
    norms = [name for name in stored if "norm" in name]
    write(path, stored | {name: torch.cat([BELOW_TWO, BELOW_TWO[-1:]])[-len(stored[name]) :].clone() for name in norms})
    return path


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
def test_norms_below_two_are_loaded_exported_and_synced_bit_for_bit(tmp_path: Path, family: str) -> None:
    folder = HfFolder.open(folder_with_every_value(family, tmp_path / "hf"))
    expected = tensors(folder.path)
    with engine(folder, train=False, precision="bf16", mtp=MtpConfig(mode="load")) as trainer:
        exported = {name: value.clone() for name, value in trainer.export()}
        assert all(torch.equal(exported[name], value) for name, value in expected.items())
        parameters = {name: value.clone() for name, value in trainer.module.named_parameters()}
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.zero_()
        stream = WeightStream(
            StreamMap(trainer.bridge, [trainer.module], tensor_shapes(folder.shape)), exported.keys(), lambda target: target
        )
        for name, value in exported.items():
            stream.add(name, value)
        stream.finish()
        assert all(torch.equal(value, parameters[name]) for name, value in trainer.module.named_parameters())


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
def test_norms_below_two_are_converted_bit_for_bit(tmp_path: Path, family: str) -> None:
    folder = folder_with_every_value(family, tmp_path / "hf")
    converted(folder, tmp_path / "checkpoint", verify=True)
    converted(tmp_path / "checkpoint", tmp_path / "back", verify=True)
    assert_same_tensors(tmp_path / "back", folder)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_every_fused_expert_is_compared_and_exported_under_its_name(tmp_path: Path, suffix: str) -> None:
    """Qwen3.5's packed experts are named without `.weight`, so a check of the suffix would skip them."""
    from tests.fakes.convert_found import pack
    from tests.fakes.convert_models import change_config, model

    model("qwen3.5-moe", tmp_path / "hf")
    write(tmp_path / "hf", pack(tensors(tmp_path / "hf"), 6, suffix))
    names = tensors(tmp_path / "hf").keys()
    packed = [name for name in names if name.endswith((f"experts.gate_up_proj{suffix}", f"experts.down_proj{suffix}"))]
    weights = ModelWeights(tmp_path / "hf")
    assert len(packed) == 2 * weights.shape.layers + 2 and all(weights.layout[list(names).index(name)].pieces for name in packed)
    first = converted(tmp_path / "hf", tmp_path / "checkpoint", verify=True)
    assert first.verified is not None and first.verified.num_tensors == len(tensor_shapes(weights.shape))
    second = converted(tmp_path / "checkpoint", tmp_path / "back", verify=True)
    assert second.tensors == len(names) and second.verified == first.verified
    assert_same_tensors(tmp_path / "back", tmp_path / "hf")
    change_config(tmp_path / "hf", moe_intermediate_size=20)
    with pytest.raises(UserError, match=r"config.json requires .*experts\.(gate_up|down)_proj"):
        ModelWeights(tmp_path / "hf")
