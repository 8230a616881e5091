"""Offloading: tensors whose device memory is freed between uses, while host memory holds their values.

An offloaded tensor keeps its identity, shape and views, and only its storage is empty, so that parameters, optimizer state and views into
one buffer can refer to it all the time. On a CPU the same happens from memory to memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

_ALIGN = 256  # bytes


class HostMemory:
    """Host memory for the storages of some tensors, as one block of exactly their size; pinned where there is a card.

    A tensor whose storage is empty already counts as offloaded, and holds zeros.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        end = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._places:
                nbytes = storage.nbytes() or tensor.nbytes
                self._places[storage._cdata] = (end, nbytes)
                end += -(-nbytes // _ALIGN) * _ALIGN
        self._room = torch.zeros(end, dtype=torch.uint8)
        if torch.cuda.is_available() and end:
            # PyTorch's own pinned allocator rounds up to a power of two.
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._room.data_ptr(), end, 0))
            weakref.finalize(self, _unpin, self._room)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors to the host and free their device memory; those that are offloaded already are skipped."""
        for storage in _storages(tensors):
            if storage.nbytes():
                here, _ = self._room_of(storage)
                here.copy_(_bytes(storage), non_blocking=True)
                storage.resize_(0)  # the allocator gives it to nothing that runs before the copy

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors back to the device; those that are there already are skipped."""
        for storage in _storages(tensors):
            if not storage.nbytes():
                here, nbytes = self._room_of(storage)
                storage.resize_(nbytes)
                _bytes(storage).copy_(here, non_blocking=True)

    def host(self, tensor: Tensor) -> Tensor:
        """An offloaded tensor's values as a view of host memory: what is written there comes back to the device with `load`."""
        here, _ = self._room_of(tensor.untyped_storage())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        values = here.view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())

    def _room_of(self, storage: torch.UntypedStorage) -> tuple[Tensor, int]:
        start, nbytes = self._places[storage._cdata]
        return self._room[start : start + nbytes], nbytes


def release(tensors: Iterable[Tensor]) -> None:
    """Free the memory of these tensors; their values are lost."""
    for storage in _storages(tensors):
        storage.resize_(0)


def allocate(tensors: Iterable[Tensor]) -> None:
    """Allocate memory again for those of these tensors that were released, with arbitrary values. Each must be the whole of its storage."""
    for tensor in tensors:
        if not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(tensor.nbytes)


def _unpin(room: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(room.data_ptr())


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
