"""Packing of sequences into microbatches, their transfer to a device, and FLOPs utilization."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.plan.flops import TrunkTraining, step_flops
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.train import LoraConfig
from mtpctl.trainer.batch import Sequence, copy_packed, dummy_batch, pack, to_device, utilization
from mtpctl.trainer.objective import NextToken
from tests.fakes.tiny import GENTLE, engine, mimo, sequences

BATCH = [
    Sequence([5, 6, 7, 8], 2, [1, 1], {"old": [0.1, 0.2]}),
    Sequence([1, 2, 3, 4, 9], 1, [1, 0, 1, 1], {"old": [0.3, 0.4, 0.5, 0.6]}),
]


class TestPack:
    def test_rows_predict_the_response(self):
        micro = pack(BATCH, [1, 0], 0, "cpu")
        assert micro.input_ids.tolist() == [1, 2, 3, 4, 9, 5, 6, 7, 8]
        assert (micro.rows.tolist(), micro.labels.tolist()) == ([0, 1, 2, 3, 6, 7], [2, 3, 4, 9, 7, 8])
        assert micro.mask.tolist() == [1, 0, 1, 1, 1, 1]
        assert micro.seq_ids.tolist() == [0, 0, 0, 0, 1, 1]
        assert micro.columns["old"].tolist() == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.1, 0.2])

    def test_depth_starts_at_the_last_prompt_token(self):
        """Depth k at position i predicts token i + 1 + k, and only sampled tokens of the response."""
        first, second = pack(BATCH, [1, 0], 2, "cpu").drafts
        assert (first.rows.tolist(), first.labels.tolist(), first.response_indices.tolist()) == ([2, 6], [9, 8], [3, 5])
        assert second.response_indices.tolist() == []

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_first_tokens_of_a_turn_are_not_drafted(self, depth):
        """After an environment's tokens, which are prefilled, the target samples the next token, as after the prompt."""
        turns = Sequence(list(range(1, 17)), 2, [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1])
        alone = Sequence(list(range(1, 6)), 1, [1, 1, 1, 1])
        drafted = {1: [1, 2, 3, 7, 8, 13], 2: [2, 3, 8], 3: [3]}[depth]
        micro = pack([alone, turns], [0, 1], 3, "cpu").drafts[depth - 1]
        assert micro.response_indices.tolist() == [*range(depth, 4), *(4 + place for place in drafted)]
        assert micro.rows.tolist() == [*range(4 - depth), *(5 + 1 + place - depth for place in drafted)]
        assert (turns.num_drafted(depth), alone.num_drafted(depth)) == (len(drafted), 4 - depth)

    def test_padding_is_a_separate_sample(self):
        micro = pack(BATCH, [0, 1], 1, "cpu", cp=2, tp=2)
        assert len(micro.input_ids) == 16
        assert micro.packing.starts.tolist() == [0, 4, 9, 16]
        assert max(micro.rows.tolist()) < 9


def test_padding_mask_marks_padding_and_dummy_tokens() -> None:
    batch = [Sequence([1] * 5, 2, [1] * 3), Sequence([2] * 4, 2, [1] * 2)]
    assert pack(batch, [0, 1], 0, "cpu").packing.padding_mask is None
    parts = [pack(batch, [0, 1], 0, "cpu", cp_rank=rank, cp=2, tp=2).packing for rank in range(2)]
    fills = {int(token) for part in parts for token in part.tokens[part.padding_mask]}
    assert fills == set(range(9, 16))
    none = dummy_batch(batch, 0, "cpu").packing
    assert none.padding_mask is not None and none.padding_mask.all()


def test_packing_takes_a_tenth_of_a_microsecond_a_token() -> None:
    batch = [Sequence([1] * 4096, 256, [1] * 3840, {name: [0.0] * 3840 for name in ("old", "behaviour", "advantage")}) for _ in range(8)]
    taken = []
    for _ in range(5):
        began = time.process_time()
        pack(batch, list(range(8)), 1, "cpu")
        taken.append(time.process_time() - began)
    assert min(taken) < 0.1e-6 * 8 * 4096


ARRAYS = [
    np.arange(7),
    np.zeros(0, np.float32),
    np.array([True, False, True]),
    np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    np.array([3, 5], np.int32),
    np.arange(4, dtype=np.uint8),
]


@pytest.mark.parametrize("bring", [to_device, copy_packed])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shapes_dtypes_and_values_are_kept(bring, device: str) -> None:
    result = bring(ARRAYS, device)
    for tensor, array in zip(result, ARRAYS, strict=True):
        assert tensor.device.type == device and tensor.cpu().equal(torch.from_numpy(array.copy()))


def test_tensors_of_one_copy_share_a_storage() -> None:
    assert len({each.untyped_storage().data_ptr() for each in copy_packed(ARRAYS, "cpu") if each.numel()}) == 1
    assert copy_packed([], "cpu") == []


SHAPE = shape_of(hub_config("XiaomiMiMo/MiMo-7B-RL"))
SEQUENCES = [Sequence([1] * 100, 40, [1] * 60), Sequence([1] * 50, 10, [1] * 30 + [0] * 10)]


def test_utilization_is_flops_over_peak() -> None:
    flops = step_flops(SHAPE, [100, 50], 90, [88], isolated=True)
    share = utilization(SHAPE, SEQUENCES, 1, isolated=True, trunk="all", seconds=0.5, gpu="NVIDIA H200", gpus=4)
    assert share == pytest.approx(flops / (0.5 * 4 * 989e12))


def test_unknown_gpu_has_no_utilization() -> None:
    assert utilization(SHAPE, SEQUENCES, 0, isolated=True, trunk="all", seconds=1.0, gpu="Some GPU", gpus=1) is None


@pytest.mark.parametrize("trunk", ["all", "adapter", "none"])
def test_update_in_bf16_reports_mfu_of_the_trained_weights(trunk: TrunkTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.trainer.batch.peak_flops", {"cpu": 1e12}.get)
    folder, batch = mimo(tmp_path / "model"), sequences()
    adapter = LoraConfig() if trunk == "adapter" else None
    with engine(folder, precision="bf16", mtp=MtpConfig(mode="isolated"), lora=adapter) as created:
        created.set_trunk_frozen(trunk == "none")
        created.set_optimizer(GENTLE)
        metrics = created.update(batch, NextToken())
    rows, drafts = (sum(s.num_drafted(depth) for s in batch) for depth in (0, 1))
    flops = step_flops(folder.shape, [len(s.token_ids) for s in batch], rows, [drafts], isolated=True, trunk=trunk)
    assert metrics["perf/mfu"] == pytest.approx(flops / metrics["timing_s/update"] / 1e12)


def test_update_in_fp32_reports_no_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.trainer.batch.peak_flops", {"cpu": 1e12}.get)
    with engine(mimo(tmp_path / "model"), precision="fp32") as created:
        created.set_optimizer(GENTLE)
        assert "perf/mfu" not in created.update(sequences(), NextToken())
