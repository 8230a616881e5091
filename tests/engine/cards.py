"""Runs parallel cases over two cards and writes down what rank 0 found: `python -m tests.engine.cards OUT`."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtpctl.engine import Rank
from tests.engine.cases import CASES, Case

NAMES = ("tp2", "sp2", "cp2", "pp2", "deepseek-sp2", "deepseek-cp2", "deepseek-ep2", "qwen3-moe-ep2")

PAIRS = [case for case in CASES if case.name in NAMES]
"""Over two ranks; each is run in fp32 and in bf16, and so is the single process that it must equal."""


def cases() -> list[Case]:
    """Everything to run, the single ones too."""
    single = {case.like for case in PAIRS}
    whole = [replace(case, saved=False) for case in CASES if case.name in single or case in PAIRS]
    return whole + [replace(case, name=f"{case.name}-bf16", fields=case.fields | {"precision": "bf16"}) for case in whole]


def _rank(number: int, masters: dict[str, str], out: str) -> None:
    from tests.engine.ranks import found_by

    found: dict[str, Any] = {}
    for case in cases():
        world = case.parallel.world_size
        if number < world:
            place = Rank(number, world, masters[case.name], number, deadline_s=120)
            got = found_by(case, place, Path(out).parent / "models")
            found[case.name] = got | {part: {name: value.cpu() for name, value in got[part].items()} for part in ("weights", "gradients")}
    if number == 0:
        torch.save(found, out)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def main(out: str) -> None:
    masters = {case.name: _free_address() for case in cases()}
    torch.multiprocessing.spawn(_rank, (masters, out), nprocs=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
