"""`mtpctl bench sync-weights`: the time of a weight sync, and how long generation stalls."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from mtpctl.cli.options import Json, answer
from mtpctl.jobs.progress import print_progress

_MIB = 1 << 20


def sync_weights(
    transport: Annotated[
        list[str] | None, typer.Option("--transport", help="May be repeated; default: nccl and ipc; shm on a CPU.")
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Trainer and engine on one card (ipc, shm).")] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measured syncs over each transport.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests in flight.")] = 64,
    prompt: Annotated[int, typer.Option("--prompt", min=0, help="Prompt tokens of each.")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Response tokens of each.")] = 0,
    bucket: Annotated[int, typer.Option("--bucket-mib", min=0, help="MiB of a bucket.")] = 0,
    eager: Annotated[bool, typer.Option("--eager", help="No compilation and no CUDA graphs: the engine starts sooner.")] = False,
    json: Json = False,
) -> None:
    """Weights from a trainer to an engine under load: wire, whole sync, stall, memory. Exit code 6 when a bound is missed."""
    from mtpctl.errors import EnvironmentMissing, ThresholdMissed, UserError
    from mtpctl.recipe.sync import TRANSPORTS

    for name in transport or ():
        if name not in TRANSPORTS:
            raise UserError(f"--transport: must be one of {', '.join(TRANSPORTS)}, got {name}")
        if shared and TRANSPORTS[name].one_process_a_card:
            raise UserError(f"--transport: {name} takes no card twice; with --shared measure another")
    import asyncio

    import torch

    from mtpctl.bench import document
    from mtpctl.bench import sync_weights as bench
    from mtpctl.bench.machine import machine
    from mtpctl.bench.sync_results import Options, as_json, table
    from mtpctl.families.configs import hub_config
    from mtpctl.recipe.loading import load_recipe

    cuda = torch.cuda.is_available()
    chosen = transport or ((["ipc"] if shared else ["nccl", "ipc"]) if cuda else ["shm"])
    if not cuda and (needing := [name for name in chosen if TRANSPORTS[name].cuda]):
        raise EnvironmentMissing(f"--transport: {needing[0]} needs CUDA; on a CPU measure shm")
    if cuda and not shared and torch.cuda.device_count() < 2:
        raise EnvironmentMissing("two cards are needed, this machine has one; with --shared trainer and engine share it")
    tiny = load_recipe("tiny_mtp").recipe.model.config
    assert tiny is not None

    with tempfile.TemporaryDirectory(prefix="mtpctl-bench-") as scratch:
        options = Options(
            config=hub_config("XiaomiMiMo/MiMo-7B-RL") if cuda else tiny,
            device="cuda" if cuda else "cpu",
            transports=tuple(chosen),
            repeats=repeats,
            batch=batch if cuda else min(batch, 16),
            prompt=prompt or (256 if cuda else 16),
            tokens=tokens or (2048 if cuda else 200),
            bucket_bytes=(bucket or (1024 if cuda else 16)) * _MIB,
            eager=eager,
            shared=shared,
            folder=Path(scratch),
        )
        results = asyncio.run(bench.measure(options, print_progress))
    answer(document.answer(as_json(results, machine(), options.as_json), table(results), as_json=json))
    missed = [f"{result.transport}: {miss}" for result in results for miss in result.misses]
    if missed:
        raise ThresholdMissed("; ".join(missed))
