"""Reductions of gradients start during the last backward pass of an update, in the same order on all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.model.parallel import Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.trainer import overlap
from mtpctl.trainer.objective import NextToken
from tests.fakes.forked import run_ranks
from tests.fakes.tiny import GENTLE, engine, mimo, sequences
from tests.fakes.toys import TOYS, toy_folder

Event = tuple[str, Any]


def events_of(rank: Rank, path: Path, *, ep: int, trains_mtp: bool, few: bool, recompute: str) -> tuple[list[Event], list[str]]:
    """Starts of reductions and of each layer's backward pass in the second update, and the names in each bucket."""
    overlap.BUCKET_NUMBERS = 1
    own = path / str(rank.rank)
    folder = HfFolder.open(toy_folder(TOYS["glm4-moe"], own, 0, "fp32")) if ep > 1 else mimo(own)
    options = {"tokens_per_microbatch": 24 if few else 4096, "recompute": recompute}
    with engine(folder, rank=rank, parallel=ParallelConfig(dp=2, ep=ep), mtp=MtpConfig(mode="joint"), **options) as made:
        made.trains_mtp = trains_mtp
        made.set_optimizer(GENTLE)
        made.update(sequences(), NextToken())
        names = {parameter: name for name, parameter in made.module.named_parameters()}
        events: list[Event] = []
        start = _ParamAndGradBucketGroup.start_grad_sync

        def recorded(group: Any, **options: Any) -> None:
            if group.grad_reduce_handle is None:  # a second call does nothing
                events.append(("reduce", sorted(names[parameter] for parameter in group.params)))
            start(group, **options)

        def backward(number: int, *_: object) -> None:
            events.append(("backward", number))

        _ParamAndGradBucketGroup.start_grad_sync = recorded
        for number, layer in enumerate(made.module.decoder.layers):
            layer.register_full_backward_pre_hook(partial(backward, number))
        made.update(sequences(), NextToken())
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
