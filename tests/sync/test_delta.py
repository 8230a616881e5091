"""Encoded changes are bit-equal after decoding, for any share of changed elements, and are small."""

from __future__ import annotations

import itertools

import pytest
import torch

from mtpctl.plan.buckets import BLOCK, Change, plan_buckets, smallest_change
from mtpctl.sync import delta
from mtpctl.sync.delta import BlobAssembler, apply, compare, decode, encode
from mtpctl.sync.packing import spec_of
from mtpctl.sync.parameters import Run, Shard

WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.int8, torch.float64: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(WORDS[tensor.dtype])


def random_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bit patterns, NaN and infinities included."""
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def changed(old: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """A copy in which each element has another bit pattern with this probability."""
    mask = torch.rand(old.shape, generator=generator) < share
    flips = torch.where(mask, torch.randint(1, 127, old.shape, generator=generator), 0).to(bits(old).dtype)
    return (bits(old) ^ flips).view(old.dtype)


def encoded(new: torch.Tensor, old: torch.Tensor) -> tuple[Change, torch.Tensor]:
    change, positions = compare(new, old)
    return change, encode(new, old, change, positions)


SHARES = [0.0, 1e-4, 0.01, 0.1, 0.3, 0.9, 1.0]
SIZES = [0, 1, 7, 8, 9, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]


@pytest.mark.parametrize("dtype", list(WORDS))
def test_a_decoded_tensor_equals_the_sent_one_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    layouts = set()
    for (numel, share), chunk in itertools.product(itertools.product(SIZES, SHARES), (2 * BLOCK, 1 << 20)):
        monkeypatch.setitem(delta.CHUNK, "cpu", chunk)
        old = random_bits(numel, dtype, generator)
        new = changed(old, share, generator)
        change, positions = compare(new, old)
        count = int((bits(new) != bits(old)).sum())
        assert (change.num_changed, change.numel) == (count, numel)
        if not count:
            continue
        blob = encode(new, old, change, positions)
        layouts.add(change.layout)
        assert blob.numel() == change.nbytes(dtype.itemsize) <= numel * dtype.itemsize
        received = old.clone()
        apply(change, blob, received)
        assert torch.equal(bits(received), bits(new)), (numel, share, change)
        decoded, values = decode(change, blob, dtype)
        if decoded is not None:
            assert torch.equal(decoded, (bits(new) != bits(old)).nonzero().view(-1))
            assert torch.equal(bits(values), bits(new)[decoded])
    assert layouts == {"whole", "bitmap", "offsets"}


def test_views_at_odd_addresses_are_compared() -> None:
    generator = torch.Generator().manual_seed(4)
    old = random_bits(50_001, torch.bfloat16, generator)
    new = changed(old, 0.01, generator)
    change, blob = encoded(new[1:], old[1:])
    received = old[1:].clone()
    apply(change, blob, received)
    assert torch.equal(bits(received), bits(new[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_and_negative_zero_are_compared_by_bits(dtype: torch.dtype) -> None:
    old = torch.zeros(100_000, dtype=dtype)
    old[50_000:] = float("nan")
    new = old.clone()
    new[3], new[70_000], new[-1] = -0.0, 1.0, float("inf")
    other = torch.tensor([float("nan")], dtype=dtype)
    bits(other)[0] += 1  # another NaN
    new[60_000] = other[0]
    change, blob = encoded(new, old)
    positions, _ = decode(change, blob, dtype)
    assert positions is not None and positions.tolist() == [3, 60_000, 70_000, 99_999]
    received = old.clone()
    apply(change, blob, received)
    assert torch.equal(bits(received), bits(new))


@pytest.mark.parametrize(("numel", "changes", "layout"), [(100, 100, "whole"), (1000, 300, "bitmap"), (1 << 20, 10_000, "offsets")])
def test_the_smallest_layout_is_chosen(numel: int, changes: int, layout: str) -> None:
    # Written out: 2 bytes a bf16 element; a bit a position; 4 bytes a block of 65,536 and 2 bytes a position.
    sizes = {
        "whole": 2 * numel,
        "bitmap": -(-numel // 64) * 8 + 2 * changes,
        "offsets": -(-(4 * -(-numel // 65_536) + 2 * changes) // 8) * 8 + 2 * changes,
    }
    assert min(sizes, key=lambda each: sizes[each]) == layout
    assert smallest_change(changes, numel, 2) == Change(layout, changes, numel)  # type: ignore[arg-type]
    assert smallest_change(changes, numel, 2).nbytes(2) == sizes[layout]


def test_one_percent_of_bf16_needs_at_most_4_percent_of_the_bytes() -> None:
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(1_000_003, generator=generator).bfloat16()
    new = changed(old, 0.01, generator)
    change, blob = encoded(new, old)
    assert 0.009 < change.num_changed / change.numel < 0.011
    assert blob.numel() <= 0.04 * 2 * old.numel()


def test_a_blob_of_another_size_is_refused() -> None:
    change, blob = encoded(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    with pytest.raises(ValueError, match=r"^expected 8 bytes for layout whole with 1 of 2 elements changed, got 4$"):
        decode(change, blob[:4], torch.float32)


@pytest.mark.parametrize("bucket_bytes", [256, 1024, 1 << 20])
def test_blobs_may_span_buckets(bucket_bytes: int) -> None:
    generator = torch.Generator().manual_seed(2)
    blobs = {f"w{size}": random_bits(size, torch.uint8, generator) for size in (1, 255, 700, 3000, 8)}
    reader, read = BlobAssembler(), {}
    for bucket in plan_buckets([spec_of(name, blob) for name, blob in blobs.items()], bucket_bytes):
        data = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for entry in bucket.entries:
            data[entry.offset : entry.offset + entry.nbytes] = blobs[entry.name][entry.part_start : entry.part_stop]
        read.update((name, blob.clone()) for name, blob in reader.read(bucket, data))
    assert read.keys() == blobs.keys()
    assert all(torch.equal(read[name], blob) for name, blob in blobs.items())


def test_a_shard_takes_its_own_elements() -> None:
    """Columns 2 to 5 and 8 to 10 of a 7 x 12 tensor, which lie in the other order in the live memory."""
    wire, live = torch.arange(84.0).view(7, 12), torch.zeros(7, 5)
    shard = Shard(live, (7, 12), 1, (Run(2, 2, 3), Run(8, 0, 2)))
    positions = torch.tensor([2, 5, 8, 10, 15, 33, 70, 83])
    shard.write_at(positions, wire.view(-1)[positions])
    expected = torch.zeros(7, 12)
    expected.view(-1)[positions] = wire.view(-1)[positions]
    assert torch.equal(live, torch.cat([expected[:, 8:10], expected[:, 2:5]], 1))
