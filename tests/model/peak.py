"""The most that is alive at once of what a computation makes."""

from __future__ import annotations

from typing import Any

import torch

from tests.model.kept import Kept


class Peak(Kept):
    """Looks after each operation; `peak` in bytes."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__(*before)
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.found = {at: held for at, held in self.found.items() if not held[0].expired()}
        self.peak = max(self.peak, self._alive())
        return out
