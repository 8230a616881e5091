"""`mtpctl bench train-step` over several ranks computes what one rank computes, and rejects layouts that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench.train_step import Workload, create_config_folder, format_table, make_layout, measure, truncate_layers
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import UserError
from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from tests.fakes.tiny import MIMO
from tests.fakes.trainer_cases import MODELS


def folder(at: Path, **fields: Any) -> HfFolder:
    return create_config_folder(MIMO | fields, at)


@pytest.mark.parametrize(("ranks", "message"), [((3, 1, 1), r"--tp: .*attention heads"), ((1, 1, 2), r"--ep: mimo has no experts")])
def test_layout_that_does_not_fit_the_model_is_rejected(tmp_path: Path, ranks: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_layout(*ranks, folder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tolerance"), [((1, 2, 1), 1e-5), ((1, 1, 2), 1e-3)], ids=["cp2", "ep2"])
def test_loss_of_several_ranks_equals_that_of_one(tmp_path: Path, ranks: tuple[int, int, int], tolerance: float) -> None:
    """Random experts are initialized on their own rank, so with expert parallelism they differ."""
    model, workload = folder(tmp_path, **MODELS["qwen3-moe"]), Workload(256, 4, 0.25, "fp32", MtpConfig(mode="off"))
    parallel = make_layout(*ranks, model)
    (result,), matmul_tflops = measure(model, parallel, workload)
    single, _ = measure(model, ParallelConfig(), workload)
    assert [each.name for each in single] == ["two passes", "one pass", "materialised"]
    assert all(each.gradient is not None and each.gradient < 1e-4 for each in single)
    assert result.loss == pytest.approx(single[1].loss, rel=tolerance)
    assert result.ranks == 2 and result.least_ms <= result.median_ms <= result.most_ms and result.share > 0
    assert f"| {'cp' if ranks[1] > 1 else 'ep'} 2 | 2 | one pass |" in format_table(parallel, [result], matmul_tflops)


def test_fewer_layers_keep_the_kinds_of_the_first_ones() -> None:
    whole = shape_of(hub_config("XiaomiMiMo/MiMo-V2-Flash"))
    shape = shape_of(truncate_layers(hub_config("XiaomiMiMo/MiMo-V2-Flash"), 6))
    assert shape.layers == 6 and shape.layer_kinds == whole.layer_kinds[:6] and shape.moe is not None and shape.moe.dense_layers == {0}
    for name in ("3-Nano", "3.5-Lightning"):  # a pattern of letters, and a list
        mixed = shape_of(truncate_layers(hub_config(f"nvidia/NVIDIA-Nemotron-{name}-30B-A3B-BF16"), 8))
        assert mixed.layer_kinds == ("mamba", "none", "mamba", "none", "mamba", "full_attention", "none", "mamba")
