"""What start-up left on the heap, and the garbage collector of a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def settle_heap() -> None:
    """Have the collector never look again at what is on the heap by now. Call it once all is loaded that stays for good.

    A collection of the oldest generation visits every object. The modules of torch, transformers and vLLM alone make it last 0.4 s,
    in which nothing else of the process runs; a few hundred requests bring one about.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def importing() -> Iterator[None]:
    """The collector neither runs while the block imports, nor ever looks at what it has imported.

    Modules stay for good, and collecting among them is a fifth of what importing vLLM or Megatron takes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
