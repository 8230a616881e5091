"""How many bytes of what a computation made are alive after it: what autograd keeps, and the results."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTLES_S = 0.4


class Kept(TorchDispatchMode):
    """Counts memory that operations within it allocate. Views of what was there before, such as weights, are not counted."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.before:
                    self.found[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def bytes(self) -> int:
        """Once nothing more of it goes: a collective's thread lets go of its tensors a moment after it is waited for."""
        found = -1
        while found != (found := self._alive()):
            time.sleep(SETTLES_S)
        return found

    def _alive(self) -> int:
        return sum(size for alive, size in self.found.values() if not alive.expired())
