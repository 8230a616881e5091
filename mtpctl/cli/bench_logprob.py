"""`mtpctl bench logprob`: the log-prob server compared with a forward pass of its engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtpctl.cli.options import Json, answer


def logprob(
    model: Annotated[
        str,
        typer.Option("--model", help="Folder, or hub id whose sizes are known; weights are random. Default: MiMo-7B, or a toy on a CPU."),
    ] = "",
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16; default: bf16 on a card.")] = "",
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="LEAST:MOST", help="Tokens of a request; default: 512:4096, on a CPU 64:512.")
    ] = "",
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, help="Requests at once.")] = 64,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of one round.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds.")] = 3,
    tokens_per_batch: Annotated[
        int | None, typer.Option("--tokens-per-batch", min=64, help="logprob.tokens_per_batch; default: 16384, on a CPU 2048.")
    ] = None,
    json: Json = False,
) -> None:
    """Tokens/s, latency, memory and answers of the log-prob server, against its engine alone. Exit code 6 when a bound is missed."""
    import asyncio
    import contextlib
    import tempfile

    from mtpctl.errors import ThresholdMissed, UserError

    if precision not in ("", "fp32", "bf16"):
        raise UserError(f"--precision: {precision} is neither fp32 nor bf16")
    import torch

    from mtpctl.bench import document
    from mtpctl.bench.machine import machine
    from mtpctl.recipe.cluster import ClusterConfig
    from mtpctl.recipe.model import ModelConfig, hf_config

    cuda = torch.cuda.is_available()
    precision = precision or ("bf16" if cuda else "fp32")
    try:
        least, most = (int(part) for part in (lengths or ("512:4096" if cuda else "64:512")).split(":"))
    except ValueError:
        raise UserError(f"--lengths: {lengths} is not LEAST:MOST, as in 512:4096") from None
    named = hf_config(ModelConfig(path=model or "XiaomiMiMo/MiMo-7B-RL"), fetch=False)
    from mtpctl.bench import logprob as bench
    from mtpctl.bench.train_step import shape_folder
    from mtpctl.cluster.local import cluster

    config = named if model or cuda else bench.TOY
    if config is None:
        raise UserError(f"--model: {model} is neither a folder with config.json nor a hub id whose sizes are known")
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = shape_folder(config, Path(scratch) / "model")
        positions = folder.shape.max_positions
        if not 2 <= least <= most <= positions:
            raise UserError(f"--lengths: {least}:{most} must lie between 2 and the model's {positions} positions, the least first")
        load = bench.Load(
            (least, most),
            in_flight=in_flight,
            requests=requests,
            rounds=rounds,
            single=min(512, positions),
            tokens_per_batch=tokens_per_batch or (16384 if cuda else 2048),
        )
        stack.enter_context(cluster(ClusterConfig(), cpus=0, gpus=float(cuda)))
        report = asyncio.run(bench.measure(folder.path, precision, load, Path(scratch), gpus=float(cuda)))
    answer(document.answer(bench.as_json(report, machine(), load), bench.table(report), as_json=json))
    missed = [finding for finding in report.findings if finding.missed]
    if missed:
        raise ThresholdMissed(f"{len(missed)} bound(s) missed, first: {missed[0].what}: {missed[0].value:.3g}, bound {missed[0].bound:.3g}")
