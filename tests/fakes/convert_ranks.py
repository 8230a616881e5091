"""Loads converted checkpoints under other layouts and saves them again.

A case is `model:tp=2,pp=1`; the model's folder lies in `ROOT/model/hf`, its checkpoint next to it. With `:folder` behind it the
folder itself is loaded.
"""

from __future__ import annotations

from pathlib import Path

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.model.parallel import Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from tests.fakes.forked import run_ranks
from tests.fakes.tiny import engine

DEADLINE_S = 240


def layout_of(case: str) -> ParallelConfig:
    sizes = {name: int(size) for name, size in (part.split("=") for part in case.split(":")[1].split(","))}
    return ParallelConfig(sequence_parallel=sizes.get("tp", 1) > 1, **sizes)


def saved_again(root: Path, case: str) -> Path:
    return root / case.split(":")[0] / case.split(":")[1].replace("=", "").replace(",", "-")


def run(root: Path, case: str) -> str:
    """ "ok", or the error of the first rank that failed."""

    def save(rank: Rank) -> None:
        home = root / case.split(":")[0]
        folder = HfFolder.open(home / "hf")
        mtp, seed = MtpConfig(mode="load"), None if case.endswith(":folder") else 7
        with engine(folder, rank=rank, parallel=layout_of(case), train=False, mtp=mtp, random_seed=seed) as created:
            if seed is not None:
                created.restore(home / "checkpoint")
            created.save(saved_again(root, case))

    return run_ranks(layout_of(case).world_size, save, DEADLINE_S)[1] or "ok"
