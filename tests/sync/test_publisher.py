"""Published tensors are unpacked unchanged for any bucket size, and an export that differs from the plan is an error."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtpctl.plan.buckets import TensorSpec
from mtpctl.sync.protocol import Manifest, PlanMismatch
from mtpctl.sync.receiver import pieces
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.sync.transports.base import open_reader
from tests.fakes.pushing import model


def unpacked(manifest: Manifest) -> dict[str, torch.Tensor]:
    reader = open_reader(manifest.transport, manifest.address)
    tensors: dict[str, torch.Tensor] = {}
    for section, plan in manifest.sections.items():
        for bucket, data in reader.stream(section, plan.buckets):
            for entry, piece in pieces(bucket, data):
                whole = tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=piece.dtype))
                whole.reshape(-1)[entry.part_start : entry.part_stop] = piece
    return tensors


@pytest.mark.parametrize("bucket_bytes", [256, 400, 1 << 20])
def test_every_tensor_is_unpacked_byte_equal(tmp_path: Path, bucket_bytes: int) -> None:
    publisher = Publisher(VersionStore(tmp_path), bucket_bytes=bucket_bytes)
    for version in (1, 2):
        manifest = publisher.publish(model(version).items(), version)
        tensors = unpacked(manifest)
        assert tensors.keys() == model(version).keys()
        for name, tensor in model(version).items():
            assert torch.equal(tensors[name], tensor), name
        assert all(bucket.nbytes <= bucket_bytes for plan in manifest.sections.values() for bucket in plan.buckets)


def test_sections_are_distinguished_and_may_be_omitted(tmp_path: Path) -> None:
    manifest = Publisher(VersionStore(tmp_path), bucket_bytes=1 << 20, sections=["draft"]).publish(model(1).items(), 1)
    assert list(manifest.sections) == ["draft"]
    assert list(manifest.sections["draft"].tensors()) == ["model.mtp_layers.0.w"]


def test_tied_weights_are_sent_once(tmp_path: Path) -> None:
    tensors = model(1)
    tensors["lm_head.weight"] = tensors["model.embed.weight"]
    publisher = Publisher(VersionStore(tmp_path), bucket_bytes=1 << 20)
    for version in (1, 2):
        manifest = publisher.publish(tensors.items(), version)
        assert "lm_head.weight" not in manifest.sections["target"].tensors()
        assert manifest.sections["target"].tensors()["model.embed.weight"].aliases == ("lm_head.weight",)


def test_a_planned_export_streams(tmp_path: Path) -> None:
    exported: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(20):
            tensor = torch.full((16,), float(number))
            exported.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in exported))
            yield f"w{number}", tensor

    publisher = Publisher(VersionStore(tmp_path), bucket_bytes=1 << 20)
    publisher.plan(TensorSpec(f"w{number}", (16,), "float32") for number in range(20))
    publisher.publish(export(), 1)
    assert len(exported) == 20
    assert most <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "ended without model.norm.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(9)}), r"model.norm.weight \(9,\) float32"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(8).half()}), "model.norm.weight.*float16"),
        (lambda tensors: tensors.update({"model.more": torch.zeros(1)}), "model.more: not in the plan"),
    ],
)
def test_an_export_that_differs_from_the_plan_is_refused(tmp_path: Path, change: object, message: str) -> None:
    store = VersionStore(tmp_path)
    publisher = Publisher(store, bucket_bytes=1 << 20)
    publisher.publish(model(1).items(), 1)
    tensors = model(2)
    change(tensors)  # type: ignore[operator]
    with pytest.raises(PlanMismatch, match=message):
        publisher.publish(tensors.items(), 2)
    assert store.versions() == [1]
