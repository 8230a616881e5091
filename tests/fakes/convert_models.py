"""Toy models of every family for conversion, by transformers, with random MTP layers if the family has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpctl.convert.conversion import ConversionOptions, ConversionResult, convert
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.families.tensors import aliases, tensor_shapes
from tests.convert.test_families import CASES, hf_model
from tests.fakes.tiny import mimo

FAMILIES = [
    "mimo",
    "qwen2-tied",
    "qwen3",
    "llama3",
    "qwen3-moe",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "deepseek-v3",
    "glm4-moe",
    "glm4-moe-lite",
    "ernie4.5-moe",
    "mimo-v2-flash",
    "nemotron-h",
    "qwen3.5-vl",
    "qwen3.5-moe-vl",
]
MTP_FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen3.5-vl", "qwen3.5-moe-vl", "deepseek-v3", "glm4-moe", "glm4-moe-lite")
MTP_FAMILIES += ("ernie4.5-moe", "mimo-v2-flash", "nemotron-h")


def model(case: str, path: Path, **sizes: Any) -> Any:
    """Create a folder at `path`. Returns the model of transformers, None if transformers lacks it. sizes: config fields to change."""
    if case == "mimo":
        mimo(path, **sizes)
        return None
    kind, fields = CASES[case]
    created = hf_model(kind, fields | sizes, path)
    if case in MTP_FAMILIES:
        count = "mtp_num_hidden_layers" if case.startswith("qwen3.5") else "num_nextn_predict_layers"
        change_config(path, **{count: 1})
        shape = HfFolder.open(path).shape
        held, same = tensors(path), aliases(shape)
        generator = torch.Generator().manual_seed(2)
        drawn = {
            name: 0.2 * torch.randn(size, generator=generator)
            for name, size in tensor_shapes(shape).items()
            if name not in held and name not in same
        }
        copies = {name: held[same[name]].clone() for name in tensor_shapes(shape) if name in same and name not in held}
        write(path, held | drawn | copies)
    return created


def tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def write(path: Path, held: dict[str, Tensor]) -> None:
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, **fields: Any) -> None:
    """Change fields of the config; None removes a field."""
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def converted(source: Path, target: Path, **wanted: Any) -> ConversionResult:
    """Convert without reports and progress."""
    return convert(source, target, ConversionOptions(**wanted), report=lambda _: None, progress=lambda _done, _total: None)


def assert_same_tensors(there: Path, here: Path) -> None:
    """Equal names, and bit-equal tensors."""
    result, expected = tensors(there), tensors(here)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].dtype == value.dtype and result[name].shape == value.shape, name
        assert torch.equal(result[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name
