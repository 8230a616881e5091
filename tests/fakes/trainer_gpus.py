"""Runs cases over two GPUs, in one pair of processes, and prints their progress: `python -m tests.fakes.trainer_gpus OUT [NAME …]`.

A case that does not end is named, with the stacks of its ranks, and those behind it are not run. Without GPUs: over gloo.
"""

from __future__ import annotations

import faulthandler
import io
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing as mp

from mtpctl.cluster.rendezvous import address_of, host_store
from mtpctl.model.parallel import Rank
from tests.fakes.trainer_cases import CASES, Case

NAMES = ("tp2", "sp2", "cp2", "pp2", "deepseek-sp2", "deepseek-cp2", "deepseek-ep2", "qwen3-moe-ep2")

PAIRS = [case for case in CASES if case.name in NAMES]
"""Cases over two ranks, run in fp32 and in bf16, as is the single-process case that each must match."""

IMPORTS_S, CASE_S, TOTAL_S = 120.0, 40.0, 200.0
"""Deadlines of imports, of a case and of all cases: several times the usual duration, to detect hangs."""
STACKS_S = 5.0
"""Ranks print their stacks this long before a case's deadline."""
OTHER_S = 3.0
"""How long messages of the other rank are read after one has failed."""


def cases(names: Collection[str] = NAMES) -> list[Case]:
    """The cases to run: single processes first, then pairs, each in fp32 and in bf16."""
    pairs = [case for case in PAIRS if case.name in names]
    single = {case.like for case in pairs}
    whole = [replace(case, saved=False) for case in [*(case for case in CASES if case.name in single), *pairs]]
    return [created for case in whole for created in (case, in_bf16(case))]


def in_bf16(case: Case) -> Case:
    """The same in half precision."""
    return replace(case, name=f"{case.name}-bf16", fields=case.fields | {"precision": "bf16"})


@dataclass
class Progress:
    """Messages of the ranks: `found` has the results of cases; `at` and `since` the current case of each rank."""

    results: dict[str, Any] = field(default_factory=dict)
    at: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(2), "imports"))
    since: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(2), time.monotonic()))

    def late(self) -> list[int]:
        """Ranks whose current case exceeds its deadline."""
        now = time.monotonic()
        return [rank for rank, what in self.at.items() if what and now - self.since[rank] > (IMPORTS_S if what == "imports" else CASE_S)]

    def where(self) -> str:
        """The current case of each rank, for a message."""
        now = time.monotonic()
        return ", ".join(f"rank {rank}: {what or 'between cases'} for {now - self.since[rank]:.0f} s" for rank, what in self.at.items())


def run(root: Path, names: Collection[str] = NAMES) -> dict[str, Any]:
    """Results by case name; for a case that failed, hung or was not reached, the reason as a string."""
    context, began = mp.get_context("spawn"), time.monotonic()
    to_other, from_first = context.Pipe()
    progress, processes, ends = Progress(), [], {}
    for number, between in enumerate((to_other, from_first)):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(number, names, root, theirs, between), daemon=True))
        processes[-1].start()
        theirs.close()
        ends[ours] = number
    failure = ""
    try:
        while ends and not failure:
            failure = "".join(_hear(end, ends, progress) for end in connection.wait(list(ends), timeout=1.0))
            if not failure and (late := progress.late()):
                failure = f"rank {late[0]} did not end {progress.at[late[0]]} in time; {progress.where()}"
            elif not failure and time.monotonic() - began > TOTAL_S:
                failure = f"all cases together took longer than {TOTAL_S:.0f} s; {progress.where()}"
        # Where one rank fails the other loses its connection to it, and may be first to say so: both are heard.
        while failure and (ready := connection.wait(list(ends), timeout=OTHER_S)):
            failure += "".join(_hear(end, ends, progress) for end in ready)
    finally:
        for process in processes:
            process.join(0 if failure else 10)
            if process.is_alive():
                process.kill()
    _say(f"{failure or 'done'}, {time.monotonic() - began:.1f} s in all")
    return {case.name: progress.results.get(case.name, failure) for case in cases(names)}


def _hear(end: Any, ends: dict[Any, int], progress: Progress) -> str:
    """Process one message of a rank. Returns an error, or an empty string."""
    rank = ends[end]
    try:
        kind, what, content = end.recv()
    except EOFError:
        del ends[end]
        return f"rank {rank} died at {progress.at[rank]}\n" if progress.at[rank] else ""
    if kind == "failed":
        progress.at[rank] = ""
        return f"rank {rank} failed at {what}: {content}"
    now = time.monotonic()
    if kind == "found":
        progress.results[what] = torch.load(io.BytesIO(content), weights_only=False)
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in progress.results[what]["seconds"].items())
        _say(f"{what}: {now - progress.since[rank]:.1f} s ({parts})")
    else:
        if progress.at[rank] == "imports":
            _say(f"rank {rank} has imported: {now - progress.since[rank]:.1f} s")
        progress.at[rank], progress.since[rank] = what, now
    return ""


def _say(line: str) -> None:
    print(f"two ranks: {line}", file=sys.stderr, flush=True)


def _rank(number: int, names: Collection[str], root: Path, parent: Any, other: Any) -> None:
    at = "imports"
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(number)
        torch.set_float32_matmul_precision("highest")
        # Every width, dtype and count of an expert's tokens would be compiled again, on both ranks; one GPU's tests try what is compiled.
        torch.compiler.set_stance("force_eager")
        for case, place in _turns(number, names, other):
            at = case.name
            parent.send(("at", at, None))
            faulthandler.dump_traceback_later(CASE_S - STACKS_S)
            results = _found(case, place, root)
            faulthandler.cancel_dump_traceback_later()
            if place.rank == 0:
                parent.send(("found", at, results))
            parent.send(("at", "", None))
    except BaseException:
        parent.send(("failed", at, traceback.format_exc()))
        raise


def _turns(number: int, names: Collection[str], other: Any) -> Iterator[tuple[Case, Rank]]:
    """This rank's cases. Single-process cases are divided: fp32 on the first rank, bf16 on the second."""
    import tests.fakes.trainer_ranks  # noqa: F401

    for case in cases(names):
        if case.parallel.world_size == 2:
            if number == 0:
                other.recv()
                meeting = host_store("127.0.0.1")  # held until they have met for the next case
                other.send(address := address_of(meeting))
            else:
                other.send(None)
                address = other.recv()
            yield case, Rank(number, 2, address, number, deadline_s=2 * CASE_S)
        elif number == int(case.name.endswith("-bf16")):
            yield case, Rank(local_rank=number)


def _found(case: Case, place: Rank, root: Path) -> bytes:
    from tests.fakes.trainer_ranks import found_by

    began = time.perf_counter()
    results = found_by(case, place, root)
    results["seconds"]["end"] = time.perf_counter() - began - sum(results["seconds"].values())
    results |= {part: {name: value.cpu() for name, value in results[part].items()} for part in ("weights", "gradients")}
    buffer = io.BytesIO()
    torch.save(results, buffer)
    return buffer.getvalue()


def main(out: str, *names: str) -> None:
    """Save the results. Exit code 1 if a case has none."""
    results = run(Path(out).parent / "models", names or NAMES)
    torch.save(results, out)
    sys.exit(any(isinstance(value, str) for value in results.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
