"""Keeps megatron-core from resetting the counters of its own routers at the end of an update.

megatron-core looks for these counters in every module of the model. The routers here keep their counts elsewhere (`mtpctl.model.router`),
so it finds none; with hundreds of experts a layer the search takes the host longer than a layer takes a card.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_counter_reset() -> Iterator[None]:
    """Have `finalize_model_grads` leave the reset out while the block runs. Raises RuntimeError where megatron-core has renamed it."""
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
