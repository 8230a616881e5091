"""Share of the cards' peak that an update used."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.plan.flops import step_flops
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.batch import Sequence, utilisation
from mtpctl.trainer.objective import NextToken
from tests.fakes.tiny import GENTLE, engine, mimo, sequences

SHAPE = shape_of(hub_config("XiaomiMiMo/MiMo-7B-RL"))
BATCH = [Sequence([1] * 100, 40, [1] * 60), Sequence([1] * 50, 10, [1] * 30 + [0] * 10)]


def test_utilisation_is_flops_over_peak() -> None:
    flops = step_flops(SHAPE, [100, 50], 90, [88], isolated=True)
    share = utilisation(SHAPE, BATCH, 1, isolated=True, seconds=0.5, card="NVIDIA H200", cards=4)
    assert share == pytest.approx(flops / (0.5 * 4 * 989e12))


def test_unknown_gpu_has_no_utilisation() -> None:
    assert utilisation(SHAPE, BATCH, 0, isolated=True, seconds=1.0, card="Some Card", cards=1) is None


def test_update_reports_mfu_if_all_weights_train_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.trainer.batch.card_peak", {"cpu": 1e12}.get)
    folder, batch = mimo(tmp_path / "model"), sequences()
    with engine(folder, precision="bf16", mtp=MtpConfig(mode="isolated")) as made:
        made.set_optimizer(GENTLE)
        metrics = made.update(batch, NextToken())
    rows, drafts = (sum(s.drafted(depth) for s in batch) for depth in (0, 1))
    flops = step_flops(folder.shape, [len(s.token_ids) for s in batch], rows, [drafts], isolated=True)
    assert metrics["perf/mfu"] == pytest.approx(flops / metrics["timing_s/update"] / 1e12)
    with engine(folder, precision="fp32") as made:
        made.set_optimizer(GENTLE)
        assert "perf/mfu" not in made.update(batch, NextToken())
