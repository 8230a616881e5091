"""An adapter into a replica: what it scores with is what the trainer would have merged, and only the adapter came over the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.logprob import Replica, ScoreRank, ScoreRequest
from mtpctl.sync import Manifest, PlanMismatch, WeightsDiffer, update_target
from tests.logprob.conftest import Loop
from tests.sync import adapters

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
    """Publishes tensors as a version, in buckets that cut most of them."""
    sends = adapters.publisher(tmp_path)

    def make(version: int, tensors: Tensors, sections: tuple[Any, ...]) -> Manifest:
        sends.moving = sections
        return sends.publish(tensors.items(), version, checksums=True)

    return make


def exported(replica: Replica) -> Tensors:
    return {name: tensor.clone() for name, tensor in replica.ranks.rank.engine.export()}  # type: ignore[attr-defined]


async def logprobs(replica: Replica, version: int) -> list[float]:
    (scored,) = await replica.score([ScoreRequest(IDS)], version)
    return list(scored.logprobs)


@pytest.mark.parametrize("keep_previous", [False, True])
def test_versions_are_merged_over_the_folders_weights(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica], keep_previous: bool
) -> None:
    made = replica(keep_previous=keep_previous)
    scores = {}
    for version, sections in ((1, ("adapter", "target", "draft")), (2, ("adapter", "draft")), (3, ("adapter", "draft"))):
        delta = adapters.adapter(base, version)
        drafts = {name: tensor + version for name, tensor in base.items() if ".mtp_layers." in name}
        manifest = publish(version, delta | base | drafts, sections)
        report = run(update_target(made, manifest, verify=True))
        assert report.verified == len(delta) + (len(base) if version == 1 else len(drafts))
        found = exported(made)
        # Never over what an adapter before it has left: nothing adds up over versions.
        for name, wanted in (adapters.merged(base, delta) | drafts).items():
            torch.testing.assert_close(found[name], wanted, atol=1e-6, rtol=0)
        scores[version] = run(logprobs(made, version))
    if keep_previous:
        assert run(logprobs(made, 2)) == scores[2]


def test_a_weight_that_the_adapter_was_not_merged_into_is_told(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replica()
    manifest = publish(1, adapters.adapter(base, 1) | base, ("adapter", "target", "draft"))
    monkeypatch.setattr(ScoreRank, "_merge", lambda self: None)
    with pytest.raises(WeightsDiffer, match=r"not merged into these weights .*: model\.layers\.0\."):
        run(update_target(made, manifest, verify=True))


def test_what_does_not_fit_is_refused_and_changes_nothing(
    run: Loop, base: Tensors, publish: Callable[..., Manifest], replica: Callable[..., Replica]
) -> None:
    made, before = replica(), exported(replica())
    wide = base | {"model.layers.0.mlp.up_proj.weight": torch.zeros(7, 64), "model.layers.9.mlp.up_proj.weight": torch.zeros(8, 64)}
    manifest = publish(1, adapters.adapter(wide, 1), ("adapter",))
    with pytest.raises(
        PlanMismatch, match=r"makes \(7, 64\), the served model has \(128, 64\); .*layers\.9\.mlp\.up_proj\.weight is not a tensor"
    ):
        run(update_target(made, manifest))
    assert made.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in exported(made).items())
