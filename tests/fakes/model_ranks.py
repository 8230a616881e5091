"""Bytes that a layer split over ranks saves, measured in separate processes: `python -m tests.fakes.model_ranks OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mtpctl.compat import cpu_device
from mtpctl.model.parallel import Rank
from tests.fakes.forked import run_ranks
from tests.fakes.tiny import mimo
from tests.model.test_memory import CASES, SHARED, kept_bytes, use_stand_ins


def elements(name: str, root: Path) -> float:
    """Elements per token that one layer saves, averaged over ranks."""
    case, parallel = SHARED[name]

    def kept_by(count: int) -> list[tuple[int, int]]:
        def work(rank: Rank) -> tuple[int, int]:
            folder = mimo(root / f"{name}-{count}-{rank.rank}", **CASES[case], num_hidden_layers=count)
            use_stand_ins(pytest.MonkeyPatch())
            return kept_bytes(folder, rank=rank, parallel=parallel)

        answers, error = run_ranks(parallel.world_size, work, 100)
        assert not error, error
        return answers

    each = [(more - less) / tokens / 4 for (less, _), (more, tokens) in zip(kept_by(1), kept_by(2), strict=True)]
    return sum(each) / len(each)


if __name__ == "__main__":
    cpu_device.install()
    import mtpctl.convert.bridge
    import mtpctl.trainer.engine  # noqa: F401

    out = Path(sys.argv[1])
    out.write_text(json.dumps({name: elements(name, out.parent) for name in SHARED}))
