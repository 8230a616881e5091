"""Keeps megatron-core from looking for its own routers at the end of an update.

megatron-core searches every module of the model for counters to reset, and for biases to move. The routers here keep their counts elsewhere
(`mtpctl.model.router`) and their biases are moved by `mtpctl.trainer.balance`, so it finds none; with hundreds of experts a layer each
search takes the host longer than a layer takes a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mtpctl.compat.replaced import replaced

SEARCHES = ("reset_model_temporary_tensors", "_update_router_expert_bias")


@contextmanager
def without_router_updates() -> Iterator[None]:
    """Have `finalize_model_grads` leave both searches out while the block runs. Raises RuntimeError where megatron-core has renamed one."""
    with ExitStack() as stack:
        for name in SEARCHES:
            moved = f"megatron-core no longer updates routers by {name}"
            stack.enter_context(replaced("megatron.core.distributed.finalize_model_grads", name, _nothing, moved))
        yield


def _nothing(*_: object, **__: object) -> None:
    return None
