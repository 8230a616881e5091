"""Write checkpoints without a second process.

megatron-core's file writer hands its results over through a queue that lives in a process of its own, spawned at the
first save; spawning runs the caller's main module again, which a Ray actor or a notebook does not survive. The writer
runs in threads of this process, for which a plain queue is enough.
"""

from __future__ import annotations

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def install() -> None:
    """Give the writer a queue of this process. Raises RuntimeError where upstream keeps its queue elsewhere."""
    module = vars(filesystem_async)
    if "_results_queue" not in module or "get_write_results_queue" not in module:
        raise RuntimeError("megatron-core's checkpoint writer no longer keeps its result queue in filesystem_async._results_queue")
    if module["_results_queue"] is None:
        module["_results_queue"] = queue.Queue()


def clear() -> None:
    """Drop the results of a save that failed elsewhere, which nobody will fetch."""
    results = vars(filesystem_async)["_results_queue"]
    while not results.empty():
        results.get()
