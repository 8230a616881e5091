"""A replica with an adapter against the trainer that has it: on its checkpoint, and after a sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.logprob.protocol import ScoreRequest
from mtpctl.logprob.rank import ScoreRank
from mtpctl.logprob.replica import Replica
from mtpctl.model.parallel import Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.sync.checksums import checksum
from mtpctl.sync.update import update_target
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.engine import MegatronEngine
from tests.fakes import adapters
from tests.fakes.logprob_ranks import LocalRanks, Loop, replica_config

REQUESTS = [ScoreRequest([(7 * i) % 300 for i in range(60)])]


LORA = LoraConfig(rank=4, alpha=8)


def trainer(folder: Path, precision: str) -> MegatronEngine:
    """One whose adapter changes something."""
    settings: dict[str, Any] = {"parallel": ParallelConfig(), "precision": precision, "mtp": MtpConfig(mode="isolated"), "train": False}
    engine = MegatronEngine(HfFolder.open(folder), EngineConfig(**settings, lora=LORA), Rank(0, 1, ""))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in engine.module.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return engine


def scored(rank: ScoreRank, version: int) -> list[float]:
    result = rank.score(REQUESTS, version)
    assert result is not None
    return list(result[0].logprobs)


def test_server_scores_match_the_trainers_checkpoint(folder: Path, tmp_path: Path) -> None:
    config = replica_config(folder)
    engine = trainer(folder, "fp32")
    trained = ScoreRank(config, 0)
    trained.adopt(engine)
    wanted = scored(trained, 0)
    engine.save(tmp_path / "checkpoint")
    engine.close()

    rank = ScoreRank(
        replica_config(folder, mtp=MtpConfig(mode="isolated"), checkpoint=str(tmp_path / "checkpoint"), lora=LORA, version=3), 0
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_merge_rounds_like_the_trainers_export(precision: str, run: Loop, folder: Path, tmp_path: Path) -> None:
    """To the bit: what the replica holds is what a trainer with this adapter would export merged."""
    engine = trainer(folder, precision)
    sent = {name: tensor.clone() for name, tensor in (*engine.export_adapter(), *engine.export(("draft",)))}
    wanted = {name: checksum(tensor) for name, tensor in engine.export()}
    engine.close()
    sends = adapters.publisher(tmp_path, sections=("adapter", "draft"))
    rank = ScoreRank(replica_config(folder, precision=precision), 0)
    bounds = rank.build("")
    try:
        created = Replica(LocalRanks(rank), bounds, 0, keep_previous=False)
        run(update_target(created, sends.publish(sent.items(), 1, checksums=True), verify=True))
        assert {name: checksum(tensor) for name, tensor in rank.engine.export()} == wanted
    finally:
        rank.engine.close()
