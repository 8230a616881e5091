"""Loads converted checkpoints under other layouts and saves them again: `python -m tests.fakes.convert_ranks ROOT CASE…`.

A case is `model:tp=2,pp=1`; the model's folder lies in `ROOT/model/hf`, its checkpoint beside it. With `:folder` behind it the
folder itself is loaded. megatron-core is imported once; the ranks of a case are forked from there.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from mtpctl.compat import cpu_device
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.model.parallel import Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from tests.fakes.forked import run_ranks

DEADLINE_S = 240


def layout_of(case: str) -> ParallelConfig:
    sizes = {name: int(size) for name, size in (part.split("=") for part in case.split(":")[1].split(","))}
    return ParallelConfig(sequence_parallel=sizes.get("tp", 1) > 1, **sizes)


def saved_again(root: Path, case: str) -> Path:
    return root / case.split(":")[0] / case.split(":")[1].replace("=", "").replace(",", "-")


def run(root: Path, case: str) -> str:
    """ "ok", or the error of the first rank that failed."""
    from tests.fakes.tiny import engine

    def save(rank: Rank) -> None:
        home = root / case.split(":")[0]
        folder = HfFolder.open(home / "hf")
        mtp, seed = MtpConfig(mode="load"), None if case.endswith(":folder") else 7
        with engine(folder, rank=rank, parallel=layout_of(case), train=False, mtp=mtp, random_seed=seed) as created:
            if seed is not None:
                created.restore(home / "checkpoint")
            created.save(saved_again(root, case))

    return run_ranks(layout_of(case).world_size, save, DEADLINE_S)[1] or "ok"


def main(root: str, *cases: str) -> None:
    torch.set_num_threads(1)
    cpu_device.install()
    import mtpctl.convert.bridge
    import mtpctl.trainer.engine  # noqa: F401

    gc.collect()
    gc.freeze()  # forked ranks then share what is imported
    failed = {case: answer for case in cases if (answer := run(Path(root), case)) != "ok"}
    for case, answer in failed.items():
        print(f"{case}\n{answer}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
