"""`mtpctl bench rollout`: throughput through mtpctl against vLLM's own, and the gain by speculation."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtpctl.cli.options import Json, answer, made


def rollout(
    shape: Annotated[str, typer.Option("--shape", help="mimo7b, or tiny for a CPU.")] = "",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="FOLDER", help="Where the model is written, unless it is there already; default: a temporary folder."
        ),
    ] = None,
    part: Annotated[list[str] | None, typer.Option("--part", metavar="path|speculation", help="Measure this; default: both.")] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Requests at once; default: 8, 64, 256.")] = None,
    drafts: Annotated[int, typer.Option("--drafts", min=1, max=8, help="Most draft tokens a step.")] = 3,
    acceptance: Annotated[float, typer.Option("--acceptance", min=0, max=1, help="Share of drafts that are right.")] = 0.75,
    prompt: Annotated[int, typer.Option("--prompt", min=2, help="Prompt tokens.")] = 128,
    tokens: Annotated[int | None, typer.Option("--tokens", min=8, help="Response tokens; default: 256, of tiny 192.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured rounds, after one that warms up.")] = 3,
    eager: Annotated[bool, typer.Option("--eager", help="No compilation and no CUDA graphs.")] = False,
    json: Json = False,
) -> None:
    """Tokens/s through mtpctl's pool and through vLLM alone, idle slots, and the gain by k drafts. Exit code 6 when a bound is missed."""
    from mtpctl.errors import ThresholdMissed, UserError

    parts = part or ["path", "speculation"]
    for name in parts:
        if name not in ("path", "speculation"):
            raise UserError(f"--part: must be path or speculation, got {name}")
    import torch

    from mtpctl.bench import document
    from mtpctl.bench import rollout as bench
    from mtpctl.bench.machine import machine, told
    from mtpctl.bench.rollout_engines import Options, known_shape

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    named = known_shape(shape or ("mimo7b" if device == "cuda" else "tiny"))
    if named == "mimo7b" and device == "cpu":
        raise UserError("--shape: mimo7b has 7.8 billion parameters and this machine no card; take tiny")

    say = partial(print, flush=True)
    with tempfile.TemporaryDirectory(prefix="mtpctl-bench-") as scratch:
        options = Options(
            shape=named,
            folder=Path(scratch) / "model" if model is None else made(model, "--model"),
            batches=tuple(sorted(set(batch or (8, 64, 256)))),
            prompt=prompt,
            tokens=tokens or (192 if named == "tiny" else 256),
            drafts=drafts,
            acceptance=acceptance,
            rounds=rounds,
            device=device,
            eager=eager,
        )
        say(f"{told(machine())}\nThe timer covers: {bench.TIMER}.\n{bench.HEAD}\n{bench.RULE}")
        results = bench.run(options, parts, say)
    for line in bench.verdict(results):
        say(line)
    if json:
        answer(document.text({"environment": machine(), **bench.as_dict(options, results)}))
    missed = [r for r in results if r.misses]
    if missed:
        first = missed[0]
        raise ThresholdMissed(
            f"{len(missed)} of {len(results)} measurements missed a bound, first: {first.what}, {first.load}: {first.misses[0]}"
        )
