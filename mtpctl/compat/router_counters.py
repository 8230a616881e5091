"""Finish gradients without looking for routers' counters among all modules.

Upstream's last step of an update zeroes counters of its own routers, which it seeks in every module of the model. Routers here keep their
counts elsewhere (`mtpctl.model.router`); with hundreds of experts a layer the search takes the host longer than a layer takes a card.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_sought() -> Iterator[None]:
    """Leave that step out inside the block. Raises RuntimeError where upstream no longer has it under this name."""
    module = vars(importlib.import_module("megatron.core.distributed.finalize_model_grads"))
    if "reset_model_temporary_tensors" not in module:
        raise RuntimeError("megatron-core no longer zeroes routers' counters by reset_model_temporary_tensors")
    found = module["reset_model_temporary_tensors"]
    module["reset_model_temporary_tensors"] = _nothing
    try:
        yield
    finally:
        module["reset_model_temporary_tensors"] = found


def _nothing(*_: object) -> None:
    return None
