"""Packing an export into the buckets of a sender."""

from __future__ import annotations

import pytest
import torch

from mtpctl.errors import RuntimeFailure
from mtpctl.plan.buckets import ALIGNMENT, Bucket
from mtpctl.sync.packing import HostCopy, Packer


class RecordingCopy(HostCopy):
    """Records the buckets that are sent."""

    def __init__(self) -> None:
        super().__init__(pinned=False)
        self.sent: list[tuple[str, int]] = []

    def send(self, section: str, bucket: Bucket) -> None:
        self.sent.append((section, bucket.index))


def test_buffers_of_the_largest_bucket_are_aligned() -> None:
    """Two buffers may be adjacent in one file, and tensors are copied as words."""
    packer = Packer(bucket_bytes=1 << 20)
    packer.plan_from({"norm": torch.ones(3), "mtp.norm": torch.ones(5)}.items())
    assert packer.largest == ALIGNMENT


def test_a_section_whose_fp8_weights_are_not_finite_is_never_completed() -> None:
    """Earlier buckets are sent without waiting for the check. Receivers that lack the last one restore the previous version."""
    tensors = {f"layer.{index}": torch.full((128, 128), float(index)) for index in range(3)} | {"mtp.fc": torch.ones(128, 128)}
    packer = Packer(bucket_bytes=128 * 128, quantized=tensors)
    packer.plan_from(tensors.items())
    last = packer.plans["target"][-1].index
    assert last >= 2, "several buckets"
    complete = RecordingCopy()
    packer.pack(1, packer.wire_tensors(tensors.items()), complete)
    assert complete.sent[-2:] == [("draft", 0), ("draft", 1)] and ("target", last) in complete.sent
    tensors["layer.0"][3, 4] = float("inf")
    incomplete = RecordingCopy()
    with pytest.raises(RuntimeFailure, match=r"^layer\.0: contains infinities or NaN"):
        packer.pack(2, packer.wire_tensors(tensors.items()), incomplete)
    assert incomplete.sent == [("target", index) for index in range(last)]
