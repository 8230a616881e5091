"""Loads converted checkpoints under other layouts and saves them again: `python -m tests.convert.ranks ROOT CASE…`.

A case is `model:tp=2,pp=1`; the model's folder lies in `ROOT/model/hf`, its checkpoint beside it. With `:folder` behind it the
folder itself is loaded. megatron-core is imported once; the ranks of a case are forked from there.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from mtpctl.cluster import address_of, host_store
from mtpctl.compat import cpu_device
from mtpctl.convert import HfFolder
from mtpctl.engine import Rank
from mtpctl.recipe.schema import MtpConfig, ParallelConfig

DEADLINE_S = 240


def layout_of(case: str) -> ParallelConfig:
    sizes = {name: int(size) for name, size in (part.split("=") for part in case.split(":")[1].split(","))}
    return ParallelConfig(sequence_parallel=sizes.get("tp", 1) > 1, **sizes)


def saved_again(root: Path, case: str) -> Path:
    return root / case.split(":")[0] / case.split(":")[1].replace("=", "").replace(",", "-")


def _rank(root: Path, case: str, rank: Rank, pipe: Any) -> None:
    from tests.engine.tiny import engine

    home = root / case.split(":")[0]
    try:
        folder = HfFolder.open(home / "hf")
        mtp, seed = MtpConfig(mode="load"), None if case.endswith(":folder") else 7
        with engine(folder, rank=rank, parallel=layout_of(case), train=False, mtp=mtp, random_seed=seed) as made:
            if seed is not None:
                made.restore(home / "checkpoint")
            made.save(saved_again(root, case))
        pipe.send("ok")
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.close()
    os._exit(0)  # nothing of what was forked is this process's to tear down


def run(root: Path, case: str) -> str:
    """ "ok", or the error of the first rank that failed."""
    meeting = host_store("127.0.0.1")
    fork = multiprocessing.get_context("fork")
    world = layout_of(case).world_size
    ends, processes = [], []
    for number in range(world):
        ours, theirs = fork.Pipe(duplex=False)
        place = Rank(number, world, address_of(meeting), deadline_s=DEADLINE_S)
        processes.append(fork.Process(target=_rank, args=(root, case, place, theirs)))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    answers = [end.recv() if end.poll(DEADLINE_S) else "no answer in time" for end in ends]
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
    return min((answer for answer in answers if answer != "ok"), key=lambda text: "Connection closed" in text, default="ok")


def main(root: str, *cases: str) -> None:
    torch.set_num_threads(1)
    cpu_device.install()
    import mtpctl.convert.bridge
    import mtpctl.engine.engine  # noqa: F401

    gc.collect()
    gc.freeze()  # forked ranks then share what is imported
    failed = {case: answer for case in cases if (answer := run(Path(root), case)) != "ok"}
    for case, answer in failed.items():
        print(f"{case}\n{answer}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
