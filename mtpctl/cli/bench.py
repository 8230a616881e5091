"""`mtpctl bench`: measurements, each with a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli import bench_all, bench_experiments, bench_logprob, bench_rollout, bench_sync, bench_update
from mtpctl.cli.options import Json, answer

if TYPE_CHECKING:
    from mtpctl.bench.fused_kernels import Shape

app = typer.Typer(
    help="Measure throughput, latency, memory and learning.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    # Typer makes a group of `mtpctl bench` only where it has a callback.
    pass


@app.command("fused-kernels")
def fused_kernels(
    shape: Annotated[list[str] | None, typer.Option("--shape", metavar="ROWSxHIDDENxVOCAB", help="May be given several times.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Measure what others publish too, as far as it is installed.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Instead: the vocabulary sharded over that many cards of this host.")] = 1,
    drafts: Annotated[bool, typer.Option("--drafts", help="Instead: an MTP depth's losses, alone and beside a policy loss.")] = False,
    json: Json = False,
) -> None:
    """Log-probs and policy loss from hidden states: time, memory and error of each kernel. Exit code 6 when a bound is missed."""
    import torch

    from mtpctl.bench import fused_kernels as bench
    from mtpctl.bench.fused_cases import missing
    from mtpctl.errors import ThresholdMissed, UserError

    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = "8192x4096x151680" if device == "cuda" else "64x64x1000"
    try:
        shapes = [bench.Shape.parse(text) for text in shape or [default]]
    except ValueError as error:
        raise UserError(str(error)) from error
    if tp > 1:
        return _parallel(shapes, tp, json, device)
    if drafts:
        return _drafts(shapes, json, device)
    results = [result for each in shapes for result in bench.measure(each, with_peers=peers)]
    if json:
        answer(bench.as_json(results, device))
    else:
        answer(f"{bench.environment(device)}\nThe timer covers: {bench.TIMER}\n\n{bench.table(results)}\n")
        for line in bench.verdict(results):
            answer(line)
        if peers and (lacking := missing(device)):
            answer(f"not installed, not measured: {', '.join(lacking)}")
    missed = [r for r in results if r.misses]
    if missed:
        raise ThresholdMissed(
            f"{len(missed)} of {len(results)} measurements missed a bound, first: {missed[0].what} {missed[0].name}: {missed[0].misses[0]}"
        )


def _drafts(shapes: list[Shape], json: bool, device: str) -> None:
    from dataclasses import asdict

    from mtpctl.bench import document
    from mtpctl.bench.fused_drafts import drafts_table, measure_drafts
    from mtpctl.bench.fused_kernels import TIMER, environment
    from mtpctl.errors import ThresholdMissed

    results = [result for each in shapes for result in measure_drafts(each)]
    if json:
        answer(document.text({"environment": environment(device), "results": [asdict(r) for r in results]}))
    else:
        answer(f"{environment(device)}\nThe timer covers: {TIMER}\n\n{drafts_table(results)}")
    missed = [f"{r.mode} {r.loss} {r.where}: {'; '.join(r.misses)}" for r in results if r.misses]
    if missed:
        raise ThresholdMissed(f"{len(missed)} of {len(results)} measurements missed a bound, first: {missed[0]}")


def _parallel(shapes: list[Shape], tp: int, json: bool, device: str) -> None:
    from dataclasses import asdict

    from mtpctl.bench import document
    from mtpctl.bench.fused_parallel import BOUND, measure_parallel, parallel_table
    from mtpctl.errors import ThresholdMissed, UserError

    try:
        results = [result for each in shapes for result in measure_parallel(each, tp)]
    except ValueError as error:
        raise UserError(str(error)) from error
    answer(document.text([{**asdict(r), "ratio": r.ratio} for r in results]) if json else parallel_table(results))
    slow = [r for r in results if device == "cuda" and r.ratio > BOUND]
    if slow:
        raise ThresholdMissed(f"{slow[0].what} on {tp} cards takes {slow[0].ratio:.2f}x of one card's share, bound {BOUND}x")


@app.command("train-step")
def train_step(
    model: Annotated[str, typer.Option("--model", help="Folder, or hub id whose sizes are known; its weights are not read.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Packed tokens of the step.")] = 8192,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples of equal length that fill them.")] = 8,
    prompt_share: Annotated[float, typer.Option("--prompt-share", min=0, max=0.9, help="Share of each sample that is prompt.")] = 0.25,
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16.")] = "bf16",
    layers: Annotated[int, typer.Option("--layers", min=0, help="Only so many decoder layers; 0: all.")] = 0,
    mtp: Annotated[str, typer.Option("--mtp", help="mtp.mode: off, joint or isolated.")] = "isolated",
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks, with sequence parallelism.")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel ranks, which share the samples.")] = 1,
    json: Json = False,
) -> None:
    """Forward and backward of an update with MTP, weights random: on one device by one pass, by two, and with every logit materialised;
    over several ranks by one pass."""
    bench_update.check_step(precision, tokens, samples, recompute)
    import tempfile
    from pathlib import Path

    from pydantic import ValidationError

    from mtpctl.errors import UserError
    from mtpctl.recipe.model import MtpConfig

    try:
        trained = MtpConfig.model_validate({"mode": mtp})
    except ValidationError as error:
        raise UserError(f"--mtp: {mtp} is none of off, joint, isolated") from error

    config = bench_update.measured_config(model)
    from mtpctl.bench import document
    from mtpctl.bench import train_step as bench
    from mtpctl.bench.machine import machine

    with tempfile.TemporaryDirectory() as scratch:
        folder = bench.shape_folder(bench.with_layers(config, layers) if layers else config, Path(scratch))
        if not folder.shape.mtp_layers:
            trained = MtpConfig(mode="off")
        options = {
            "model": model,
            "tokens": tokens,
            "samples": samples,
            "prompt_share": prompt_share,
            "precision": precision,
            "layers": layers,
            "mtp": trained.mode,
            "recompute": recompute,
        }
        if tp * cp * ep > 1:
            from mtpctl.bench import layout_step

            parallel = layout_step.layout(tp, cp, ep, folder)
            load = layout_step.Load(tokens, samples, prompt_share, precision, trained, recompute)
            found = layout_step.measure_layout(folder, parallel, load)
            told = layout_step.as_json(found, machine(), options | {"tp": tp, "cp": cp, "ep": ep})
            answer(document.answer(told, layout_step.table(parallel, found), as_json=json))
            return
        results, rate = bench.measure(
            folder, tokens=tokens, count=samples, prompt_share=prompt_share, precision=precision, mtp=trained, recompute=recompute
        )
    answer(document.answer(bench.as_json(results, rate, machine(), options), bench.table(results, rate), as_json=json))


app.command("all")(bench_all.everything)
app.command("cycle-model")(bench_all.cycle_model)
app.command("mtp")(bench_experiments.mtp)
app.command("async")(bench_experiments.asynchrony)
app.command("compare")(bench_experiments.compare)
app.command("rollout")(bench_rollout.rollout)
app.command("sync-weights")(bench_sync.sync_weights)
app.command("logprob")(bench_logprob.logprob)
app.command("update")(bench_update.update)
