"""Offloaded tensors use no device memory between uses, and results are bit-equal."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from mtpctl.recipe.rl import OptimizerConfig
from mtpctl.recipe.train import OffloadConfig
from mtpctl.trainer import optimizer
from mtpctl.trainer.objective import NextToken
from mtpctl.trainer.offload import HostMemory
from tests.fakes.tiny import engine, mimo, sequences

ADAM = OptimizerConfig(lr=1e-2, clip_grad=0.5)
EVERYTHING = OffloadConfig(params=True, optimizer=True, grads=True)


def stored(tensors):
    return sum(storage.nbytes() for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def results(trainer):
    losses = [trainer.update(sequences(), NextToken())["sft/loss"] for _ in range(3)]
    return losses, [s.logprobs for s in trainer.score(sequences())], {name: value.clone() for name, value in trainer.export()}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_results_are_bit_equal(tmp_path, precision, sharded, monkeypatch):
    monkeypatch.setattr(optimizer, "OPTIMIZER_SLICE", 20_000)  # several slices
    folder = mimo(tmp_path / "model")
    result = []
    for offload in (OffloadConfig(), EVERYTHING):
        with engine(folder, precision=precision, distributed_optimizer=sharded, offload=offload) as trainer:
            trainer.set_optimizer(ADAM)
            result.append(results(trainer))
    assert result[0][:2] == result[1][:2]
    assert all(value.equal(result[0][2][name]) for name, value in result[1][2].items())


def test_sliced_adam_equals_one_step(tmp_path, monkeypatch):
    folder, result = mimo(tmp_path / "model"), []
    for nbytes in (1, 1 << 30):
        monkeypatch.setattr(optimizer, "OPTIMIZER_SLICE", nbytes)
        with engine(folder) as trainer:
            trainer.set_optimizer(ADAM)
            result.append(results(trainer)[0])
    assert result[0] == result[1]


def test_device_memory_is_freed_between_uses(tmp_path):
    with engine(mimo(tmp_path / "model"), precision="bf16", offload=EVERYTHING) as trainer:
        parameters = list(trainer.module.parameters())
        trainer.set_optimizer(ADAM)
        for use in (
            lambda: None,
            lambda: trainer.update(sequences(), NextToken()),
            lambda: trainer.score(sequences()),
            lambda: dict(trainer.export()),
        ):
            use()
            state = [
                tensor
                for adam in trainer.optimizer._sub_optimizers()
                for tensors in adam.optimizer.state.values()
                for tensor in tensors.values()
            ]
            masters = [p for adam in trainer.optimizer._sub_optimizers() for group in adam.optimizer.param_groups for p in group["params"]]
            assert stored(parameters) == stored(masters) == 0
            assert stored(t for t in state if t.dim()) == 0
        assert stored(buffer.grad_data for buffer in trainer.model.buffers) == 0
        with trainer.resident():
            assert stored(parameters) == sum(p.nbytes for p in parameters)


def test_failed_load_leaves_the_parameters_offloaded(tmp_path, monkeypatch):
    load = HostMemory.load

    def load_partly(self, tensors):
        load(self, list(tensors)[:2])
        raise torch.OutOfMemoryError

    with engine(mimo(tmp_path / "model"), offload=EVERYTHING) as trainer:
        for action in (load_partly, load):
            monkeypatch.setattr(HostMemory, "load", action)
            with pytest.raises(torch.OutOfMemoryError) if action is load_partly else contextlib.nullcontext():
                trainer.score(sequences())
            assert stored(trainer.module.parameters()) == 0


def test_update_finishes_its_copies_before_it_returns(tmp_path, monkeypatch):
    """The time of the copies belongs to the update, and nothing after it waits for them."""
    with engine(mimo(tmp_path / "model"), offload=EVERYTHING) as trainer:
        trainer.set_optimizer(ADAM)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.3))
        assert trainer.update(sequences(), NextToken())["timing_s/update"] >= 0.3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoint_restores_with_and_without_offload(tmp_path, precision):
    """ResumePoint with or without offload, the next losses equal those of the original run."""
    folder = mimo(tmp_path / "model")
    for offload, other in ((OffloadConfig(), EVERYTHING), (EVERYTHING, OffloadConfig())):
        with engine(folder, precision=precision, offload=offload) as trainer:
            trainer.set_optimizer(ADAM)
            trainer.update(sequences(), NextToken())
            trainer.save(tmp_path / "checkpoint")
            expected = [trainer.update(sequences(), NextToken())["sft/loss"] for _ in range(3)]
        with engine(folder, precision=precision, offload=other) as trainer:
            trainer.set_optimizer(ADAM)
            trainer.restore(tmp_path / "checkpoint")
            assert [trainer.update(sequences(), NextToken())["sft/loss"] for _ in range(3)] == expected


def test_views_of_one_storage_are_offloaded_once():
    whole = torch.arange(12.0)
    view, other = whole[2:8].view(2, 3), torch.arange(5)
    home = HostMemory([whole, view, other])
    home.offload([view, other])
    assert stored([whole, view, other]) == 0
    assert home.host_view(view).tolist() == [[2, 3, 4], [5, 6, 7]]
    assert home.host_view(other).tolist() == [0, 1, 2, 3, 4]
    home.host_view(view)[0, 0] = -1
    home.load([whole, other])
    assert view.tolist() == [[-1, 3, 4], [5, 6, 7]]
    assert whole[8:].tolist() == [8, 9, 10, 11]
    assert other.tolist() == [0, 1, 2, 3, 4]
