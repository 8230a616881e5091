"""Gradients of one update never reach a later one, whether buffers are zeroed or overwritten; reductions overlap with the backward pass."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.model.parallel import Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer import data_parallel
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import NextToken
from tests.fakes.forked import in_gloo_group, run_ranks
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences
from tests.fakes.toys import TOYS, toy_folder

FEW = 21
"""Tokens per microbatch: several microbatches per update, and some experts without a row."""


def folder(path: Path, family: str, **fields: object) -> HfFolder:
    return HfFolder.open(toy_folder(TOYS[family] | fields, path, 0, "fp32"))


def poisoned(trainer: MegatronEngine) -> None:
    """Run an update, and fill all gradient buffers with NaN."""
    trainer.forward_backward(sequences(seed=3), NextToken())
    for parameter in trainer.module.parameters():
        parameter.main_grad.fill_(torch.nan)  # type: ignore[attr-defined]


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("tokens", [FEW, 4096])
@pytest.mark.parametrize("family", ["glm4-moe", "mimo"])
def test_second_update_has_the_gradients_of_a_first_one(tmp_path: Path, family: str, tokens: int, distributed_optimizer: bool) -> None:
    result = []
    for again in (False, True):
        options = {"tokens_per_microbatch": tokens, "distributed_optimizer": distributed_optimizer}
        with engine(folder(tmp_path / f"{again}", family), mtp=MtpConfig(mode="joint"), **options) as trainer:
            trainer.set_optimizer(GENTLE)
            if again:
                poisoned(trainer)
            trainer.forward_backward(sequences(), NextToken())
            result.append(gradients(trainer))
    assert_close(result[1], result[0], 1e-7)


def test_experts_of_unused_layers_have_no_gradient(tmp_path: Path) -> None:
    with engine(folder(tmp_path / "model", "glm4-moe"), mtp=MtpConfig(mode="isolated")) as trainer:
        trainer.trains_mtp = False
        trainer.set_optimizer(GENTLE)
        poisoned(trainer)
        trainer.forward_backward(sequences(), NextToken())
        grads = {name: p.main_grad for name, p in trainer.module.named_parameters()}
    resting: dict[str, Tensor] = {name: grad for name, grad in grads.items() if name.startswith("mtp.")}
    assert any(".experts." in name for name in resting)
    assert all(not grad.any() for grad in resting.values())
    assert all(torch.isfinite(grad).all() for grad in grads.values())


def test_closed_engine_is_freed_after_training_and_export(tmp_path: Path) -> None:
    """Its process groups are freed too, whose threads would otherwise slow down later tests."""
    with engine(folder(tmp_path / "model", "mimo"), mtp=MtpConfig(mode="joint")) as trainer:
        trainer.set_optimizer(GENTLE)
        trainer.update(sequences(), NextToken())
        gradients(trainer)
        model = weakref.ref(trainer.gradients.model)
    del trainer
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("family", ["glm4-moe", "mimo"])
def test_only_buffers_that_are_not_overwritten_are_zeroed_slices(tmp_path: Path, family: str) -> None:
    with engine(folder(tmp_path / "model", family), mtp=MtpConfig(mode="joint")) as trainer:
        trainer.set_optimizer(GENTLE)
        sizes = []
        for _ in range(2):
            trainer.forward_backward(sequences(), NextToken())
            trainer.gradients.clear(1)
            sizes.append(sum(part.numel() for part in trainer.gradients._zeroed_slices))
        weights = dict(trainer.module.named_parameters())
    zeroed = [name for name, p in weights.items() if p.dim() == 1 or name.endswith(("word_embeddings.weight", "router.weight"))]
    assert sizes[0] == sizes[1] == sum(weights[name].numel() for name in zeroed)


Event = tuple[str, Any]


def events_of(rank: Rank, path: Path, *, ep: int, trains_mtp: bool, few: bool, recompute: str) -> tuple[list[Event], list[str]]:
    """Starts of reductions and of each layer's backward pass in the second update, and the names in each bucket."""
    data_parallel.MIN_BUCKET_NUMEL, data_parallel.SPARSE_SHARE = 1, 0.0
    own = path / str(rank.rank)
    folder = HfFolder.open(toy_folder(TOYS["glm4-moe"], own, 0, "fp32")) if ep > 1 else mimo(own)
    options = {"tokens_per_microbatch": 24 if few else 4096, "recompute": recompute}
    with engine(folder, rank=rank, parallel=ParallelConfig(dp=2, ep=ep), mtp=MtpConfig(mode="joint"), **options) as trainer:
        trainer.trains_mtp = trains_mtp
        trainer.set_optimizer(GENTLE)
        trainer.update(sequences(), NextToken())
        names = {parameter: name for name, parameter in trainer.module.named_parameters()}
        events: list[Event] = []
        start = _ParamAndGradBucketGroup.start_grad_sync

        def recorded(group: Any, **options: Any) -> None:
            if group.grad_reduce_handle is None:  # a second call does nothing
                events.append(("reduce", sorted(names[parameter] for parameter in group.params)))
            start(group, **options)

        def backward(number: int, *_: object) -> None:
            events.append(("backward", number))

        _ParamAndGradBucketGroup.start_grad_sync = recorded
        for number, layer in enumerate(trainer.module.decoder.layers):
            layer.register_full_backward_pre_hook(partial(backward, number))
        trainer.update(sequences(), NextToken())
    return events, list(names.values())


@pytest.mark.parametrize(
    ("ep", "trains_mtp", "few", "recompute"),
    [(1, True, True, "none"), (2, True, False, "none"), (1, False, False, "full")],
    ids=["microbatches", "experts", "recomputed-without-mtp"],
)
def test_reductions_overlap_with_the_last_backward_pass(tmp_path: Path, ep: int, trains_mtp: bool, few: bool, recompute: str) -> None:
    found, error = run_ranks(
        2, partial(events_of, path=tmp_path, ep=ep, trains_mtp=trains_mtp, few=few, recompute=recompute), deadline_s=120
    )
    assert not error, error
    (events, names), (other, _) = found
    layers = max(value for kind, value in events if kind == "backward") + 1
    reduced = [value for kind, value in events if kind == "reduce"]
    assert len(reduced) > layers and reduced == [value for kind, value in other if kind == "reduce"]
    assert sorted(name for bucket in reduced for name in bucket) == sorted(names), "each parameter once"
    assert (events.count(("backward", 0)) > 1) == few, "several microbatches"
    for index, (kind, value) in enumerate(events):
        if kind != "reduce" or (ep > 1 and ".experts." in value[0]):  # whose group has one rank
            continue
        remaining = [number for later, number in events[index:] if later == "backward"]
        layers_of = {int(name.split(".")[2]) for name in value if name.startswith("decoder.layers.")}
        expected = 0 if any(name.startswith("embedding.") for name in value) else min(layers_of, default=layers)
        assert remaining == list(reversed(range(expected))), f"layers whose last backward pass follows the reduction of {value}"


@pytest.mark.parametrize("shared_first", [False, True])
def test_weight_shared_by_stages_has_a_separate_bucket(shared_first: bool) -> None:
    """Also among few numbers: megatron-core adds each rank's part of it on the first and the last stage."""
    tied, norm = torch.nn.Parameter(torch.zeros(8, 2)), torch.nn.Parameter(torch.zeros(2))
    tied.shared_embedding = True  # type: ignore[attr-defined]
    pair = (tied, norm) if shared_first else (norm, tied)
    assert data_parallel._is_bucket_end(*pair, index_of=dict.fromkeys(pair, 3), numel=2)
    assert not data_parallel._is_bucket_end(norm, norm, index_of={norm: 3}, numel=2)


def row_gradients(ranks: int, *, filled: bool) -> list[torch.Tensor]:
    """Gradients of an embedding of 20 rows: zeros, or two or one rows per rank, with a NaN. All ranks have row 7."""
    grads = [torch.zeros(20, 3, dtype=torch.double) for _ in range(ranks)]
    if not filled:
        return grads
    for number, grad in enumerate(grads):
        rows = [7, 8 + number] if number else [7]
        grad[rows] = torch.randn(len(rows), 3, dtype=torch.double, generator=torch.Generator().manual_seed(number))
    grads[-1][8 + ranks - 1, 1] = torch.nan
    return grads


def sums_of_rows(rank: Rank, share: float, filled: bool) -> tuple[bool, list[list[float]]]:
    data_parallel.SPARSE_SHARE, data_parallel.SLICE_NUMEL = share, 3  # one row at a time
    grad = row_gradients(rank.world_size, filled=filled)[rank.rank]
    return data_parallel.sum_sparse_rows(grad, dist.group.WORLD), grad.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "filled"), [(0.3, True), (0.29, True), (0.29, False)], ids=["sparse", "dense", "zero"])
def test_rows_of_an_embedding_are_summed_over_ranks(share: float, filled: bool) -> None:
    found, error = run_ranks(3, in_gloo_group(partial(sums_of_rows, share=share, filled=filled)), deadline_s=60)
    assert not error, error
    sparse = share == 0.3 or not filled
    grads = row_gradients(3, filled=filled)
    for (done, grad), own in zip(found, grads, strict=True):
        assert done == sparse
        torch.testing.assert_close(torch.tensor(grad, dtype=torch.double), sum(grads) if sparse else own, equal_nan=True)
