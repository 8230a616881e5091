"""`mtpctl add-drafter`: add a drafter to a model without one, and train it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mtpctl.cli.options import Sets, answer
from mtpctl.jobs import print_progress


def add_drafter(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face folder of the model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create: a copy of the model with the drafter.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FILE", help="Rows with a column `prompt`: .jsonl, .json or .parquet. Required unless --steps is 0."
        ),
    ] = None,
    kind: Annotated[
        Literal["mtp", "eagle3", "dflash"] | None,
        typer.Option(
            "--kind",
            help="mtp: MTP layers of the model's architecture; eagle3: an EAGLE-3 drafter; dflash: a DFlash drafter, which drafts all "
            "tokens in one pass. Default: mtp if vLLM supports MTP layers with the model's trunk, else eagle3.",
        ),
    ] = None,
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="MTP layers to add (a single one drafts all tokens), or layers of the DFlash drafter.")
    ] = 1,
    samples: Annotated[
        int,
        typer.Option(
            "--self-generate",
            metavar="N",
            min=0,
            help="Responses to generate with the model and train on; 0: train on the responses of the rows (a column `answer`).",
        ),
    ] = 16384,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Updates of the drafter; 0: leave it untrained.")] = 1000,
    drafts: Annotated[int, typer.Option("--drafts", metavar="K", min=1, help="Draft tokens per step that the drafter is trained for.")] = 3,
    loss: Annotated[
        Literal["ce", "soft_ce", "kl", "tv", "e2e_tv"], typer.Option("--loss", help="Loss of the drafter (mtp.loss).")
    ] = "soft_ce",
    sets: Sets = None,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live panel.")] = False,
) -> None:
    """Add a drafter to a model, and train it on the model's own samples. The model's weights stay bit-identical.

    If it is interrupted, the same command resumes the run. --set changes the run's recipe, for example rollout.temperature=0.7.
    """
    from mtpctl.errors import UserError
    from mtpctl.jobs.add_drafter import DrafterOptions, engine_commands
    from mtpctl.jobs.add_drafter import add_drafter as run

    if kind != "dflash" and layers > 1 and drafts > layers:
        raise UserError(f"--drafts: {drafts} draft tokens need one layer that repeats, or {drafts} layers; --layers is {layers}")
    options = DrafterOptions(kind, layers, data, samples, steps, drafts, loss, sets or ())
    code = run(source, target, options, plain=plain, report=print_progress)
    if not code:
        commands = engine_commands(target, drafts)
        which = "one of these commands" if len(commands) > 1 else "this command"
        answer(f"{target}: the model with its drafter; serve it with {which}:")
        for command in commands:
            answer(f"  {command}")
    raise typer.Exit(code)
