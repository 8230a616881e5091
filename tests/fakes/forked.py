"""Ranks forked from a process that has imported their modules, so that they start at once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkProcess
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.multiprocessing import start_processes

from mtpctl.cluster.rendezvous import address_of, host_store, join_store
from mtpctl.model.parallel import Rank

INHERITED: list[object] = []
"""In a forked rank: what it never destroys."""


def run_ranks(world: int, work: Callable[[Rank], Any], deadline_s: float) -> tuple[list[Any], str]:
    """The results of `work` by rank; or an empty list and the error of the first failed rank."""
    fork = multiprocessing.get_context("fork")
    ends, processes = [], []
    for number in range(world):
        ours, theirs = fork.Pipe()
        processes.append(start_forked(partial(_rank, work, number, world, deadline_s, theirs)))
        theirs.close()
        ends.append(ours)
    # Only now: the store has a thread, and a process forked while a thread runs may wait for ever for a lock that it held.
    meeting = host_store("127.0.0.1")
    for end in ends:
        end.send(address_of(meeting))
    answers = [end.recv() if end.poll(deadline_s) else ("error", "no answer in time") for end in ends]
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
    # Where one rank fails, the others lose their connection to it.
    errors = [answer for kind, answer in answers if kind == "error"]
    if errors:
        return [], min(errors, key=lambda text: "Connection closed" in text or "no answer" in text)
    return [answer for _, answer in answers], ""


def exit_code(work: Callable[[], object], deadline_s: float) -> int | None:
    """The exit code of a process that does `work`; None if it has not ended in time."""
    process = start_forked(work)
    process.join(deadline_s)
    return process.exitcode


def start_forked(work: Callable[[], object]) -> ForkProcess:
    """Start a process that does `work`."""
    process = multiprocessing.get_context("fork").Process(target=keeping_inherited, args=(work,))
    with collection_paused():
        process.start()
    return process


def fork_ranks(work: Callable[..., object], args: tuple[object, ...], nprocs: int) -> None:
    """`torch.multiprocessing.spawn` with forked processes."""
    with collection_paused():
        start_processes(partial(keeping_inherited, work), args, nprocs, start_method="fork")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in the block, nor in a process that it forks until `keeping_inherited` runs there."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keeping_inherited(work: Callable[..., object], *args: object) -> None:
    """In a forked process: do `work` without destroying process groups and garbage of earlier tests.

    The destructor of a gloo group waits for its threads, which were not forked, for ever.
    """
    gc.freeze()
    INHERITED.extend(vars(parallel_state).values())
    gc.enable()
    work(*args)


def _rank(work: Callable[[Rank], Any], number: int, world: int, deadline_s: float, pipe: Any) -> None:
    try:
        pipe.send(("ok", work(Rank(number, world, pipe.recv(), deadline_s=deadline_s))))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()
    os._exit(0)  # nothing of what was forked is this process's to tear down


def in_gloo_group[T](work: Callable[[Rank], T]) -> Callable[[Rank], T]:
    """Run `work` in a gloo process group of all ranks."""

    def joined(rank: Rank) -> T:
        store = join_store(rank.master, rank.deadline_s)
        dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
        try:
            return work(rank)
        finally:
            dist.destroy_process_group()

    return joined
