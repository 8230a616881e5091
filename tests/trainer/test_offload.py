"""What lives in host memory between uses is gone from the device there, and changes no result."""

from __future__ import annotations

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


def held(tensors):
    return sum(storage.nbytes() for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def results(made):
    losses = [made.update(sequences(), NextToken())["sft/loss"] for _ in range(3)]
    return losses, [s.logprobs for s in made.score(sequences())], {name: value.clone() for name, value in made.export()}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_results_are_bit_equal(tmp_path, precision, sharded, monkeypatch):
    monkeypatch.setattr(optimizer, "OPTIMIZER_SLICE", 20_000)  # several slices
    folder = mimo(tmp_path / "model")
    found = []
    for offload in (OffloadConfig(), EVERYTHING):
        with engine(folder, precision=precision, distributed_optimizer=sharded, offload=offload) as made:
            made.set_optimizer(ADAM)
            found.append(results(made))
    assert found[0][:2] == found[1][:2]
    assert all(value.equal(found[0][2][name]) for name, value in found[1][2].items())


def test_sliced_adam_equals_one_step(tmp_path, monkeypatch):
    folder, found = mimo(tmp_path / "model"), []
    for nbytes in (1, 1 << 30):
        monkeypatch.setattr(optimizer, "OPTIMIZER_SLICE", nbytes)
        with engine(folder) as made:
            made.set_optimizer(ADAM)
            found.append(results(made)[0])
    assert found[0] == found[1]


def test_device_memory_is_freed_between_uses(tmp_path):
    with engine(mimo(tmp_path / "model"), precision="bf16", offload=EVERYTHING) as made:
        parameters = list(made.module.parameters())
        made.set_optimizer(ADAM)
        for use in (
            lambda: None,
            lambda: made.update(sequences(), NextToken()),
            lambda: made.score(sequences()),
            lambda: dict(made.export()),
        ):
            use()
            state = [tensor for adam in made.optimizer._parts() for tensors in adam.optimizer.state.values() for tensor in tensors.values()]
            masters = [p for adam in made.optimizer._parts() for group in adam.optimizer.param_groups for p in group["params"]]
            assert held(parameters) == held(masters) == 0
            assert held(t for t in state if t.dim()) == 0
        assert held(buffer.grad_data for buffer in made.model.buffers) == 0
        with made.resident():
            assert held(parameters) == sum(p.nbytes for p in parameters)


def test_update_finishes_its_copies_before_it_returns(tmp_path, monkeypatch):
    """What copies take is an update's time, and nothing that comes after it waits for them."""
    with engine(mimo(tmp_path / "model"), offload=EVERYTHING) as made:
        made.set_optimizer(ADAM)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.3))
        assert made.update(sequences(), NextToken())["timing_s/update"] >= 0.3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoint_restores_with_and_without_offload(tmp_path, precision):
    """Resumed either way, the next losses are those of the run that wrote it."""
    folder = mimo(tmp_path / "model")
    for offload, other in ((OffloadConfig(), EVERYTHING), (EVERYTHING, OffloadConfig())):
        with engine(folder, precision=precision, offload=offload) as made:
            made.set_optimizer(ADAM)
            made.update(sequences(), NextToken())
            made.save(tmp_path / "checkpoint")
            expected = [made.update(sequences(), NextToken())["sft/loss"] for _ in range(3)]
        with engine(folder, precision=precision, offload=other) as made:
            made.set_optimizer(ADAM)
            made.restore(tmp_path / "checkpoint")
            assert [made.update(sequences(), NextToken())["sft/loss"] for _ in range(3)] == expected


def test_views_of_one_storage_are_offloaded_once():
    whole = torch.arange(12.0)
    view, other = whole[2:8].view(2, 3), torch.arange(5)
    home = HostMemory([whole, view, other])
    home.offload([view, other])
    assert held([whole, view, other]) == 0
    assert home.host(view).tolist() == [[2, 3, 4], [5, 6, 7]]
    assert home.host(other).tolist() == [0, 1, 2, 3, 4]
    home.host(view)[0, 0] = -1
    home.load([whole, other])
    assert view.tolist() == [[-1, 3, 4], [5, 6, 7]]
    assert whole[8:].tolist() == [8, 9, 10, 11]
    assert other.tolist() == [0, 1, 2, 3, 4]
