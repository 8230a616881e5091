"""`mtpctl bench train-step` over several ranks computes what one rank computes; layouts that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench.layout_step import Load, layout, measure_layout, table
from mtpctl.bench.train_step import measure, shape_folder
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import UserError
from mtpctl.recipe.model import MtpConfig
from tests.fakes.tiny import MIMO
from tests.fakes.trainer_cases import MODELS


def folder(at: Path, **fields: Any) -> HfFolder:
    return shape_folder(MIMO | fields, at)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ((3, 1, 1), r"--tp: .*attention heads"),
        ((1, 1, 2), r"--ep: mimo has no experts"),
    ],
)
def test_layouts_that_the_model_does_not_fit_are_refused(tmp_path: Path, ranks: tuple[int, int, int], told: str) -> None:
    with pytest.raises(UserError, match=told):
        layout(*ranks, folder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "apart"), [((1, 2, 1), 1e-5), ((1, 1, 2), 1e-3)], ids=["cp2", "ep2"])
def test_ranks_compute_what_one_computes(tmp_path: Path, ranks: tuple[int, int, int], apart: float) -> None:
    """`apart`: of the loss. Random experts are drawn on their own rank, so that with expert parallelism they are others."""
    model, mtp = folder(tmp_path, **MODELS["qwen3-moe"]), MtpConfig(mode="off")
    parallel = layout(*ranks, model)
    found = measure_layout(model, parallel, Load(256, 4, 0.25, "fp32", mtp, "none"))
    (alone, *_), _ = measure(model, tokens=256, count=4, prompt_share=0.25, precision="fp32", mtp=mtp)
    assert found.loss == pytest.approx(alone.loss, rel=apart)
    assert found.ranks == 2 and found.least_ms <= found.median_ms <= found.most_ms and found.share > 0
    assert f"| {'cp' if ranks[1] > 1 else 'ep'} 2 | 2 | " in table(parallel, found)
