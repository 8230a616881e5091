"""Toy models of every family have transformers' logits, and are exported unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.recipe.model import MtpConfig
from tests.fakes.convert_models import CASES, assert_like, hf_model
from tests.fakes.packed_logits import packed_logits
from tests.fakes.tiny import engine, sequences


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(tmp_path, case):
    model = hf_model(*CASES[case], tmp_path)
    ids = [s.token_ids.tolist() for s in sequences(5, high=40)]
    folder = HfFolder.open(tmp_path)
    with engine(folder, train=False, mtp=MtpConfig(mode="load")) as trainer:
        (logits,) = packed_logits(trainer, ids, 0)
        exported = {name: value.clone() for name, value in trainer.export()}
    assert_like(logits, lambda: [model(torch.tensor([sample])).logits[0] for sample in ids], [model])
    saved = {name: value for name, value in load_file(tmp_path / "model.safetensors").items() if not name.startswith("model.visual.")}
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


@pytest.mark.parametrize(("case", "groups"), [("glm4-moe-qk-norm", None), ("glm4-moe-lite-one-group", None), ("deepseek-v3", 4)])
def test_a_single_group_of_experts_is_no_group(tmp_path: Path, case: str, groups: int | None) -> None:
    """Otherwise routers of GLM models would not use their kernel on a GPU."""
    hf_model(*CASES[case], tmp_path)
    with engine(HfFolder.open(tmp_path), train=False, mtp=MtpConfig(mode="load")) as trainer:
        assert trainer.module.config.moe_router_num_groups == groups
        assert bool(trainer.module.config.moe_router_group_topk) == (groups is not None)
