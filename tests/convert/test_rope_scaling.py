"""Every family with scaled rotary embeddings: the trainer's logits are those of transformers, however the config states the scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.recipe.model import MtpConfig
from tests.convert.test_families import CASES, LLAMA3_ROPE, assert_like, hf_model
from tests.fakes.convert_models import change_config
from tests.fakes.tiny import engine, sequences
from tests.model.test_gpt import packed_logits

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
    with engine(HfFolder.open(tmp_path), train=False, mtp=MtpConfig(mode="off")) as made:
        (logits,) = packed_logits(made, ids, 0)
    assert_like(logits, lambda: [model(torch.tensor([sample])).logits[0] for sample in ids], [model])
