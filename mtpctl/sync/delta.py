"""Encodes the elements of a tensor that changed since the receiver's version, and decodes them on the receiver.

A delta contains new values, not differences, and elements are compared as integers. A decoded tensor is therefore bitwise equal to the sent
one, including NaN and -0.0. `mtpctl.plan.buckets` describes the layouts of a blob. Layout and number of changed elements are in the
manifest, so that neither end has to read them from a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtpctl.plan.buckets import BLOCK, Bucket, Change, smallest_change

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 28}
"""Elements per comparison. On a CPU they fit into the cache. On a GPU, torch's `nonzero` supports at most 2^31 elements."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8
"""Bytes that are compared as one integer. Most words are equal, so few are compared element by element."""
_SPARSE = 16
"""`offsets` can be the smallest layout only if fewer than 1 in 16 elements changed: it takes 16 bits per changed element,
`bitmap` 1 bit per element."""


@torch.no_grad()
def compare(new: torch.Tensor, old: torch.Tensor) -> tuple[Change, torch.Tensor | None]:
    """Compare two tensors of equal shape, dtype and device. Returns the change, and the positions of the changed elements if they are few.

    Raises ValueError for an element width that is not 1, 2, 4 or 8 bytes.
    """
    new, old = _integers(new), _integers(old)
    positions = _positions(new, old, new.numel() // _SPARSE)
    if positions is not None:
        num_changed = len(positions)
    else:
        chunks = zip(new.split(_chunk_elements(new)), old.split(_chunk_elements(old)), strict=True)
        num_changed = int(torch.stack([torch.count_nonzero(a != b) for a, b in chunks]).sum())
    return smallest_change(num_changed, new.numel(), new.element_size()), positions


def _chunk_elements(tensor: torch.Tensor) -> int:
    """Elements of `tensor` per comparison."""
    return CHUNK.get(tensor.device.type, CHUNK["cpu"])


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The flattened elements as integers. They are copied if their storage offset is not a multiple of `_WORD` bytes."""
    if tensor.element_size() not in _INTEGERS:
        raise ValueError(f"no delta for dtype {tensor.dtype}")
    flat_elements = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    return flat_elements if flat_elements.storage_offset() * flat_elements.element_size() % _WORD == 0 else flat_elements.clone()


def _positions(new: torch.Tensor, old: torch.Tensor, limit: int) -> torch.Tensor | None:
    """Positions of the elements that differ, ascending; None if there are more than `limit`."""
    per_word = _WORD // new.element_size()
    aligned_elements, chunk_elements = new.numel() // per_word * per_word, _chunk_elements(new)
    positions, count = [], 0
    for start in range(0, aligned_elements, chunk_elements):
        a, b = new[start : min(start + chunk_elements, aligned_elements)], old[start : min(start + chunk_elements, aligned_elements)]
        words = (a.view(torch.int64) != b.view(torch.int64)).nonzero().view(-1)
        if len(words) > limit:
            return None
        elements = (a.view(-1, per_word)[words] != b.view(-1, per_word)[words]).view(-1).nonzero().view(-1)
        positions.append(words[elements // per_word] * per_word + elements % per_word + start)
        count += len(elements)
        if count > limit:
            return None
    if aligned_elements < new.numel() or not positions:
        positions.append((new[aligned_elements:] != old[aligned_elements:]).nonzero().view(-1) + aligned_elements)
        count += len(positions[-1])
    return torch.cat(positions) if count <= limit else None


@torch.no_grad()
def encode(new: torch.Tensor, old: torch.Tensor, change: Change, positions: torch.Tensor | None) -> torch.Tensor:
    """The blob `[nbytes]` (uint8) of a change that `compare` returned, on the tensors' device."""
    new = _integers(new)
    if change.layout == "whole":
        return new.view(torch.uint8).clone()
    blob = new.new_zeros(change.nbytes(new.element_size()), dtype=torch.uint8)
    values = blob[change.values_start :].view(new.dtype)
    if change.layout == "bitmap":
        _write_bitmap(new, _integers(old), blob, values)
        return blob
    assert positions is not None, "layout offsets needs the positions"
    counts, offsets = _offset_views(change, blob)
    bounds = torch.searchsorted(positions, torch.arange(0, (len(counts) + 1) * BLOCK, BLOCK, device=blob.device))
    counts.copy_(bounds.diff())
    # The conversion keeps the low 16 bits.
    offsets.copy_(positions.to(torch.int16))
    torch.index_select(new, 0, positions, out=values)
    return blob


def _write_bitmap(new: torch.Tensor, old: torch.Tensor, blob: torch.Tensor, values: torch.Tensor) -> None:
    weights = 1 << torch.arange(8, device=blob.device, dtype=torch.uint8)
    chunk_elements, bitmap_end, values_end = _chunk_elements(new), 0, 0
    for a, b in zip(new.split(chunk_elements), old.split(chunk_elements), strict=True):
        mask = a != b
        packed = (torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        blob[bitmap_end : bitmap_end + len(packed)] = packed
        selected = a[mask]
        values[values_end : values_end + len(selected)] = selected
        bitmap_end, values_end = bitmap_end + len(packed), values_end + len(selected)


def _offset_views(change: Change, blob: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts per block (int32) and positions (the bits of uint16) of a blob with the layout `offsets`."""
    end = 4 * -(-change.numel // BLOCK)
    return blob[:end].view(torch.int32), blob[end : end + 2 * change.num_changed].view(torch.int16)


@torch.no_grad()
def decode(change: Change, blob: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Positions (int64, ascending; None: all elements) and values of the changed elements, flattened, on the blob's device.

    Raises ValueError if the blob does not have the size of its change.
    """
    if blob.numel() != (expected := change.nbytes(dtype.itemsize)):
        elements = f"{change.num_changed} of {change.numel} elements changed"
        raise ValueError(f"expected {expected} bytes for layout {change.layout} with {elements}, got {blob.numel()}")
    values = blob[change.values_start :].view(dtype)
    if change.layout == "whole":
        return None, values
    if change.layout == "bitmap":
        bit_indices = torch.arange(8, device=blob.device, dtype=torch.uint8)
        chunk_elements = _chunk_elements(blob)
        bitmap_chunks = blob[: -(-change.numel // 8)].split(chunk_elements // 8)
        masks = ((chunk[:, None] >> bit_indices) & 1 for chunk in bitmap_chunks)
        return torch.cat([mask.view(-1).nonzero().view(-1) + i * chunk_elements for i, mask in enumerate(masks)]), values
    counts, offsets = _offset_views(change, blob)
    # A position is the start of its block, with the offset in the low 16 bits. The code has few operations, because on a GPU each takes
    # longer to launch than to run.
    positions = torch.repeat_interleave(counts.to(torch.int64), output_size=change.num_changed).mul_(BLOCK)
    positions.view(torch.int16)[::4] = offsets
    return positions, values


@torch.no_grad()
def apply(change: Change, blob: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the changed elements into a contiguous tensor that has the previous values."""
    positions, values = decode(change, blob.to(tensor.device), tensor.dtype)
    if positions is None:
        tensor.view(-1).copy_(values)
    else:
        tensor.view(-1)[positions] = values


class BlobAssembler:
    """Collects blobs from the buckets of a section. A blob may span several buckets."""

    def __init__(self) -> None:
        self._partial: dict[str, torch.Tensor] = {}

    def read(self, bucket: Bucket, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and blobs that this bucket completes. A blob may be a view of `data`."""
        for entry in bucket.entries:
            piece = data[entry.offset : entry.offset + entry.nbytes]
            if entry.is_whole:
                yield entry.name, piece
                continue
            blob = self._partial.setdefault(entry.name, piece.new_empty(entry.shape))
            blob[entry.part_start : entry.part_stop] = piece
            if entry.is_last:
                yield entry.name, self._partial.pop(entry.name)
