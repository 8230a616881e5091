"""Keeps megatron-core from resetting the counters of its own routers at the end of an update.

megatron-core looks for these counters in every module of the model. The routers here keep their counts elsewhere (`mtpctl.model.router`),
so it finds none; with hundreds of experts a layer the search takes the host longer than a layer takes a card.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from mtpctl.compat.replaced import replaced


def without_counter_reset() -> AbstractContextManager[None]:
    """Have `finalize_model_grads` leave the reset out while the block runs. Raises RuntimeError where megatron-core has renamed it."""
    moved = "megatron-core no longer zeroes routers' counters by reset_model_temporary_tensors"
    return replaced("megatron.core.distributed.finalize_model_grads", "reset_model_temporary_tensors", _nothing, moved)


def _nothing(*_: object) -> None:
    return None
