"""Device memory that lives in the host's between uses.

A tensor that is away keeps its identity, shape and views; its storage is empty. So whatever refers to it (parameters of
modules, optimizer state, views into one buffer) need not know. On a CPU the same happens, from memory to memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_ALIGN = 256  # bytes


class HostMemory:
    """Room in host memory for the storages of some tensors. Pinned where there is a card, as one piece of exactly this size.

    A tensor whose storage is empty already counts as away, and holds zeros.
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
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self._room.data_ptr(), end, 0))
            weakref.finalize(self, _unpin, runtime, self._room)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Copy these to the host and free their memory on the device; those that are away stay so."""
        for storage in _storages(tensors):
            if storage.nbytes():
                here, _ = self._room_of(storage)
                here.copy_(_bytes(storage), non_blocking=True)
                storage.resize_(0)  # the allocator gives it to nothing that runs before the copy

    def back(self, tensors: Iterable[Tensor]) -> None:
        """Bring these back; those that are here stay so."""
        for storage in _storages(tensors):
            if not storage.nbytes():
                here, nbytes = self._room_of(storage)
                storage.resize_(nbytes)
                _bytes(storage).copy_(here, non_blocking=True)

    def host(self, tensor: Tensor) -> Tensor:
        """What a tensor that is away holds, as host memory: reading and writing it there changes what comes back."""
        here, _ = self._room_of(tensor.untyped_storage())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        values = here.view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())

    def _room_of(self, storage: torch.UntypedStorage) -> tuple[Tensor, int]:
        start, nbytes = self._places[storage._cdata]
        return self._room[start : start + nbytes], nbytes


def release(tensors: Iterable[Tensor]) -> None:
    """Free their memory; what they held is gone."""
    for storage in _storages(tensors):
        storage.resize_(0)


def hold(tensors: Iterable[Tensor]) -> None:
    """Give each, which must be the whole of its storage, memory again where it was released; what it holds is arbitrary."""
    for tensor in tensors:
        if not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(tensor.nbytes)


def _unpin(runtime: Any, room: Tensor) -> None:
    torch.cuda.synchronize()
    runtime.cudaHostUnregister(room.data_ptr())


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
