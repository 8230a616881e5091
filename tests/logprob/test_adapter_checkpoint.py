"""A replica on a checkpoint that holds an adapter and MTP layers alone scores as the engine that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.convert import HfFolder
from mtpctl.engine import EngineConfig, MegatronEngine, Rank
from mtpctl.logprob import ScoreRank, ScoreRequest
from mtpctl.recipe.schema import LoraConfig, MtpConfig
from tests.logprob.conftest import replica_config

REQUESTS = [ScoreRequest([(7 * i) % 300 for i in range(60)])]


def scored(rank: ScoreRank, version: int) -> list[float]:
    found = rank.score(REQUESTS, version)
    assert found is not None
    return list(found[0].logprobs)


def test_it_scores_what_was_trained(folder: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8)
    config = replica_config(folder)
    settings: dict[str, Any] = {"parallel": config.parallel, "precision": "fp32", "mtp": MtpConfig(mode="isolated"), "train": False}
    engine = MegatronEngine(HfFolder.open(folder), EngineConfig(**settings, lora=lora), Rank(0, 1, ""))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in engine.module.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    trained = ScoreRank(config, 0)
    trained.adopt(engine)
    wanted = scored(trained, 0)
    engine.save(tmp_path / "checkpoint")
    engine.close()

    rank = ScoreRank(
        replica_config(folder, mtp=MtpConfig(mode="isolated"), checkpoint=str(tmp_path / "checkpoint"), lora=lora, version=3), 0
    )
    rank.build("")
    try:
        assert scored(rank, 3) == pytest.approx(wanted, abs=1e-6)
    finally:
        rank.engine.close()
    bare = ScoreRank(config, 0)
    bare.build("")
    try:
        assert scored(bare, 0) != pytest.approx(wanted, abs=0.1)
    finally:
        bare.engine.close()
