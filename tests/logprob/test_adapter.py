"""Adapters sent to a replica: it scores with the weights that the trainer would merge, and only the adapter is transferred."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.logprob.protocol import ScoreRequest
from mtpctl.logprob.rank import ScoreRank
from mtpctl.logprob.replica import Replica
from mtpctl.logprob.weights import MergedAdapter
from mtpctl.sync.protocol import Manifest, PlanMismatch, SyncError, TargetDirty, WeightsDiffer
from mtpctl.sync.update import update_target
from tests.fakes import adapters
from tests.fakes.logprob_ranks import LocalRanks, Loop, replica_config

Tensors = dict[str, torch.Tensor]
IDS = [(7 * i) % 300 for i in range(60)]


@pytest.fixture
def base(engine: Any, folder: Path) -> Iterator[Tensors]:
    """The weights that the engine starts with, and has again afterwards."""
    engine.load(folder)
    yield load_file(folder / "model.safetensors")
    engine.load(folder)


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Manifest]:
    """Publishes tensors as a version, each by a separate sender, in buckets that cut most of them."""
    roots = (tmp_path / str(number) for number in count())

    def make(version: int, tensors: Tensors, sections: tuple[Any, ...]) -> Manifest:
        sends = adapters.publisher(next(roots))
        sends.next_sections = sections
        return sends.publish(tensors.items(), version, checksums=True)

    return make


def exported(replica: Replica) -> Tensors:
    return {name: tensor.clone() for name, tensor in replica.ranks.rank.engine.export()}  # type: ignore[attr-defined]


def assert_holds(replica: Replica, wanted: Tensors) -> None:
    """The replica's weights are these, among others."""
    result = exported(replica)
    for name, tensor in wanted.items():
        torch.testing.assert_close(result[name], tensor, atol=1e-6, rtol=0)


async def logprobs(replica: Replica, version: int) -> list[float]:
    (scored,) = await replica.score([ScoreRequest(IDS)], version)
    return list(scored.logprobs)


@pytest.mark.parametrize("keep_previous", [False, True])
def test_versions_are_merged_over_the_folders_weights(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica], keep_previous: bool
) -> None:
    created = replica(keep_previous=keep_previous)
    scores = {}
    for version, sections in ((1, ("adapter", "target", "draft")), (2, ("adapter", "draft")), (3, ("adapter", "draft"))):
        delta = adapters.adapter(base, version)
        drafts = {name: tensor + version for name, tensor in base.items() if ".mtp_layers." in name}
        manifest = publish(version, delta | base | drafts, sections)
        report = run(update_target(created, manifest, verify=True))
        assert report.verified == len(delta) + (len(base) if version == 1 else len(drafts))
        # Never over what an adapter before it has left: nothing adds up over versions.
        assert_holds(created, adapters.merged(base, delta) | drafts)
        scores[version] = run(logprobs(created, version))
    if keep_previous:
        assert run(logprobs(created, 2)) == scores[2]


def test_only_the_adapter_is_read_at_a_version(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a replica that starts late, which has what is beneath from its own start and not from a section `target`."""
    created, delta = replica(), adapters.adapter(base, 1)
    monkeypatch.setattr("mtpctl.convert.model_weights.ModelWeights.__getitem__", lambda *_: pytest.fail("the folder was read"))
    for version in (1, 2):
        run(update_target(created, publish(version, delta | base, ("adapter", "draft")), verify=True))
        assert_holds(created, adapters.merged(base, delta))


def test_an_adapter_of_other_layers_leaves_nothing_of_the_one_before(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica]
) -> None:
    """Also of one part of a fused layer alone, as PEFT's own adapters often are."""
    created = replica()
    delta = adapters.adapter(base, 1)
    run(update_target(created, publish(1, delta | base, ("adapter", "draft"))))
    for version, retained in ((2, ("q_proj", "v_proj")), (3, ("k_proj", "up_proj"))):
        part = {name: tensor for name, tensor in delta.items() if any(leaf in name for leaf in retained)}
        run(update_target(created, publish(version, part | base, ("adapter", "draft")), verify=True))
        assert_holds(created, adapters.merged(base, part))


def test_full_weights_remove_the_adapter_and_are_the_next_base(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica], other_folder: Path
) -> None:
    created, delta, others = replica(), adapters.adapter(base, 1), load_file(other_folder / "model.safetensors")
    run(update_target(created, publish(1, delta | base, ("adapter", "draft"))))
    run(update_target(created, publish(2, others, ("target", "draft")), verify=True))
    assert all(torch.equal(others[name], tensor) for name, tensor in exported(created).items())
    run(update_target(created, publish(3, delta | others, ("adapter", "draft")), verify=True))
    assert_holds(created, adapters.merged(others, delta))


def test_weight_without_the_merged_adapter_is_reported(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica]
) -> None:
    created = replica()
    run(update_target(created, publish(1, adapters.adapter(base, 1) | base, ("adapter", "target", "draft")), verify=True))
    with torch.no_grad():
        created.ranks.rank.engine.module.decoder.layers[0].mlp.linear_fc2.weight[0, 0] += 1e-6  # type: ignore[attr-defined]
    with pytest.raises(WeightsDiffer, match=r"not merged into these weights .*: model\.layers\.0\.mlp\.down_proj\.weight$"):
        run(created.checksums())


@pytest.mark.parametrize("fault", ["adapter", "target", "draft", "merge"])
@pytest.mark.parametrize("keep_previous", [False, True])
def test_aborted_sync_keeps_the_old_version_or_ends_the_replica(
    fault: str,
    keep_previous: bool,
    run: Loop,
    base: Tensors,
    publish: Callable[..., Manifest],
    replica: Callable[..., Replica],
    other_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is tried again then gives the new one: nothing of the try before lies beneath it."""
    created, others = replica(keep_previous=keep_previous), load_file(other_folder / "model.safetensors")
    old, new = adapters.adapter(base, 1), adapters.adapter(base, 2)
    run(update_target(created, publish(1, old | base, ("adapter", "target", "draft"))))
    before = run(logprobs(created, 1))
    sent = publish(2, new | others, ("adapter", "target", "draft"))
    with monkeypatch.context() as patch:
        if fault == "merge":
            patch.setattr(MergedAdapter, "merged", breaks_off_at(MergedAdapter.merged, "model.layers.1.mlp.up_proj.weight"))
        else:
            lost = Path(sent.address) / f"{fault}-{sent.sections[fault].buckets[-1].index:05d}.bin"
            lost.rename(lost.with_suffix(".lost"))
        untouched = keep_previous or fault == "adapter"
        with pytest.raises(SyncError if untouched else TargetDirty):
            run(update_target(created, sent))
    if not untouched:
        return
    assert created.versions[0] == 1 and run(logprobs(created, 1)) == before
    run(created.checksums())
    if fault != "merge":
        lost.with_suffix(".lost").rename(lost)
    run(update_target(created, sent, verify=True))
    assert_holds(created, adapters.merged(others, new))
    if keep_previous:
        assert run(logprobs(created, 1)) == before


def breaks_off_at(merge: Callable[..., torch.Tensor], at: str) -> Callable[..., torch.Tensor]:
    def over(self: MergedAdapter, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name == at:
            raise SyncError("no memory")
        return merge(self, name, weight)

    return over


def test_mismatched_weights_are_rejected_without_changes(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica], folder: Path
) -> None:
    created, before = replica(), exported(replica())
    wide = base | {"model.layers.0.mlp.up_proj.weight": torch.zeros(7, 64), "model.layers.9.mlp.up_proj.weight": torch.zeros(8, 64)}
    good = adapters.adapter(base, 1)
    drafter = {name.replace("model.layers.0.mlp.up_proj", "model.mtp_layers.0.mlp.up_proj"): tensor for name, tensor in good.items()}
    for delta, why in (
        (
            adapters.adapter(wide, 1),
            r"has shape \(7, 64\), expected \(128, 64\); .*layers\.9\.mlp\.up_proj\.weight is not a tensor",
        ),
        (adapters.adapter(base, 1, rank=3), r"A \(3, 64\) and B \(64, 3\), which are not of rank 4"),
        (drafter, r"model\.mtp_layers\.0\.mlp\.up_proj\.weight is not a tensor of the served model's trunk"),
        ({name: tensor for name, tensor in good.items() if "lora_A" in name}, "has lora_A alone"),
    ):
        with pytest.raises(PlanMismatch, match=why):
            run(update_target(created, publish(1, delta, ("adapter",))))
    served = ScoreRank(replica_config(folder, checkpoint="checkpoint"), 0)
    bounds = served.adopt(created.ranks.rank.engine)  # type: ignore[attr-defined]
    with pytest.raises(PlanMismatch, match="this log-prob replica serves a checkpoint"):
        run(update_target(Replica(LocalRanks(served), bounds, 0, keep_previous=False), publish(1, good, ("adapter",))))
    assert created.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in exported(created).items())
