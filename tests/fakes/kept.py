"""Measures the bytes that a computation leaves alive: tensors saved by autograd, and results."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTLES_S = 0.4


class Kept(TorchDispatchMode):
    """Counts memory that operations in the block allocate, except views of `before`, such as weights."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.before:
                    self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def bytes(self) -> int:
        """Bytes alive once the number is stable: a collective's thread releases its tensors shortly after the wait."""
        actual = -1
        while actual != (actual := self._alive()):
            time.sleep(SETTLES_S)
        return actual

    def _alive(self) -> int:
        return sum(size for alive, size in self.storages.values() if not alive.expired())
