"""The layouts in which the changed elements of a tensor are sent, and their sizes (`mtpctl.sync.delta` encodes them).

An unchanged tensor is not sent. The blob of a changed one has the layout that is smallest for its number of changed elements. Integers are
little-endian, and `values` starts at a multiple of 8 bytes:

    whole      every element
    bitmap     bit `i % 8` of byte `i // 8` is set if element `i` changed │ values of the changed elements
    offsets    per block of 65,536 elements: int32 number of changed ones │ uint16 position of each in its block │ values

With 1% of the elements changed, `offsets` has 2% of a bf16 tensor's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from mtpctl.plan.buckets import DTYPE_BYTES, Bucket
from mtpctl.recipe.sync import PUSHED, changes_every_element

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

Layout = Literal["whole", "bitmap", "offsets"]

BLOCK = 1 << 16
"""Elements of a block of `offsets`: a position in it fits 16 bits."""
EXPECTED_SHARE = 0.01
"""Share of bf16 elements that an RL update changes at usual learning rates, for plans. In fp32 it is 1."""
MAX_SHARE = 0.5
"""Share of the full size above which a version is sent in full."""


@dataclass(frozen=True, slots=True)
class Change:
    """How a changed tensor of `numel` elements is sent: the layout of its blob, and the number of changed elements."""

    layout: Layout
    changed: int
    numel: int

    @property
    def values_start(self) -> int:
        """The byte at which the values start."""
        if self.layout == "whole":
            return 0
        positions = -(-self.numel // 8) if self.layout == "bitmap" else 4 * -(-self.numel // BLOCK) + 2 * self.changed
        return -(-positions // 8) * 8

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the blob of a tensor with elements of `itemsize` bytes."""
        return self.values_start + itemsize * (self.numel if self.layout == "whole" else self.changed)


def smallest(changed: int, numel: int, itemsize: int) -> Change:
    layouts: tuple[Layout, ...] = ("whole", "bitmap", "offsets")
    return min((Change(layout, changed, numel) for layout in layouts), key=lambda change: change.nbytes(itemsize))


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """Planned sizes of syncs with `sync.delta`.

    nbytes: bytes of a sync in which `share` of every tensor's elements changed; the full size if they exceed `MAX_SHARE` of it. copy: bytes
    of the additional copy of the last version in the host memory of trainer rank 0; transports that push have such a copy anyway, for the
    version store.
    """

    share: float
    nbytes: int
    copy: int

    def line(self, size: Callable[[int], str]) -> str:
        """The sizes in words, formatted by `size`."""
        cause = "because all elements change in fp32" if self.share == 1 else f"if {self.share:.0%} of the elements change"
        copy = f"; trainer rank 0 keeps a copy of {size(self.copy)} in host memory" if self.copy else ""
        return f"later syncs send {size(self.nbytes)} {cause}{copy}"


def plan_delta(recipe: Recipe, sections: Mapping[str, Sequence[Bucket]]) -> DeltaPlan | None:
    """The sizes for these complete sections; None without `sync.delta`."""
    if not recipe.sync.delta:
        return None
    complete = sum(bucket.nbytes for buckets in sections.values() for bucket in buckets)
    share = 1.0 if changes_every_element(recipe) else EXPECTED_SHARE
    changed = delta_bytes(sections, share)
    return DeltaPlan(share, changed if changed <= MAX_SHARE * complete else complete, 0 if recipe.sync.transport in PUSHED else complete)


def delta_bytes(sections: Mapping[str, Sequence[Bucket]], share: float) -> int:
    """Bytes of a sync that changes this share of every tensor's elements."""
    total = 0
    for entry in (entry for buckets in sections.values() for bucket in buckets for entry in bucket.entries if entry.part_start == 0):
        numel = prod(entry.shape)
        total += smallest(round(share * numel), numel, DTYPE_BYTES[entry.dtype]).nbytes(DTYPE_BYTES[entry.dtype])
    return total
