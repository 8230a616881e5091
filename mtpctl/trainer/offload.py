"""Offloads tensors to host memory and frees their device memory between uses.

An offloaded tensor keeps its identity, shape and views, and its storage is empty. Parameters, optimizer state and views of a shared buffer
therefore stay valid. On a CPU, tensors are copied from memory to memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

_ALIGN = 256  # bytes


class HostMemory:
    """One block of host memory for the storages of some tensors; pinned if there is a GPU.

    A tensor whose storage is already empty counts as offloaded, with values of 0.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        end = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._ranges:
                nbytes = storage.nbytes() or tensor.nbytes
                self._ranges[storage._cdata] = (end, nbytes)
                end += -(-nbytes // _ALIGN) * _ALIGN
        self._block = torch.zeros(end, dtype=torch.uint8)
        if torch.cuda.is_available() and end:
            # PyTorch's pinned allocator would round the size up to a power of two.
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), end, 0))
            weakref.finalize(self, _unpin, self._block)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors to the host and free their device memory; offloaded tensors are skipped."""
        for storage in _storages(tensors):
            if storage.nbytes():
                self._host_bytes(storage).copy_(_bytes(storage), non_blocking=True)
                storage.resize_(0)  # Safe: the allocator reuses the memory in stream order, after the copy.

    def load(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors back to the device; resident tensors are skipped."""
        for storage in _storages(tensors):
            if not storage.nbytes():
                host = self._host_bytes(storage)
                storage.resize_(host.nbytes)
                _bytes(storage).copy_(host, non_blocking=True)

    def host_view(self, tensor: Tensor) -> Tensor:
        """A view of an offloaded tensor's values in host memory. `load` copies values written there to the device."""
        host = self._host_bytes(tensor.untyped_storage())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        values = host.view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())

    def _host_bytes(self, storage: torch.UntypedStorage) -> Tensor:
        start, nbytes = self._ranges[storage._cdata]
        return self._block[start : start + nbytes]


def release(tensors: Iterable[Tensor]) -> None:
    """Free the memory of these tensors; their values are lost."""
    for storage in _storages(tensors):
        storage.resize_(0)


def allocate(tensors: Iterable[Tensor]) -> None:
    """Allocate memory, with undefined values, for those tensors that were released. Each must cover its whole storage."""
    for tensor in tensors:
        if not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(tensor.nbytes)


def _unpin(block: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
