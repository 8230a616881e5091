"""`mtpctl bench all`, and `mtpctl bench cycle-model`, which makes a model that some of its measurements run on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtpctl.cli.options import made
from mtpctl.jobs.progress import print_progress


def everything(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Logs, JSON and runs; runs that it already holds are reused.")] = Path(
        "runs/bench"
    ),
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="This measurement and those that it depends on; may be repeated.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0, help="Start nothing that would not end within so many minutes.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the commands and stop.")] = False,
    on: Annotated[
        Literal["cards", "cpu"] | None,
        typer.Option("--on", help="The plan for H200s, or the one for a CPU at toy size; default: by this machine."),
    ] = None,
) -> None:
    """All measurements of docs/benchmarks on this machine's cards, or toys on a CPU. Exit code 6 when a bound is missed, 5 on failures."""
    import asyncio

    import torch

    from mtpctl.bench import everything as bench
    from mtpctl.bench import plans
    from mtpctl.errors import RuntimeFailure, ThresholdMissed

    cards = torch.cuda.device_count()
    on = on or ("cards" if cards else "cpu")
    tasks = bench.chosen(plans.ON_CARDS if on == "cards" else plans.ON_A_LAPTOP, only or [])
    if plan:
        for task in tasks:
            print(f"{task.name} ({bench.cards_of(task.cards)}, {task.minutes:g} min): mtpctl {shlex.join(task.words(out))}")
        return
    outcomes = asyncio.run(bench.run_all(tasks, cards=cards, out=made(out, "--out"), minutes=minutes, say=print_progress))
    print(bench.table(outcomes))
    failed = ", ".join(f"{o.task.name}: {o.verdict}" for o in outcomes if o.code != 0)
    if (code := bench.exit_code(outcomes)) == 6:
        raise ThresholdMissed(f"{failed}; see {out}")
    if code:
        raise RuntimeFailure(f"{failed}; logs in {out}")


def cycle_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model is written; one that it already holds is left.")],
    shape: Annotated[str, typer.Option("--shape", help="mimo7b, or tiny; default: mimo7b, on a CPU tiny.")] = "",
    acceptance: Annotated[float, typer.Option("--acceptance", min=0, max=1, help="Share of drafts that are right.")] = 0.75,
) -> None:
    """Make a model whose answers and draft acceptance are known: token t is followed by t + 1."""
    import torch

    from mtpctl.bench.cycle_model import write_cycle_model
    from mtpctl.bench.rollout_engines import config_of, known_shape
    from mtpctl.errors import UserError

    cuda = torch.cuda.is_available()
    config = config_of(known_shape(shape or ("mimo7b" if cuda else "tiny")))
    try:
        write_cycle_model(folder, config, acceptance=acceptance, device="cuda" if cuda else "cpu")
    except OSError as error:
        raise UserError(f"FOLDER: {folder} cannot be written ({error.strerror}); name another") from error
    print(f"{folder}: drafts after tokens of the lower half of the vocabulary are right with {acceptance:.0%}")
