"""`mtpctl doctor`: check whether this machine can run mtpctl, and which parts of it work here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.options import Json, print_result

if TYPE_CHECKING:
    from mtpctl.doctor.checks import Diagnosis
    from mtpctl.doctor.mismatch import Mismatch

MARKS = {"ok": "[green]✓[/]", "absent": "[dim]–[/]", "skipped": "[yellow]–[/]", "loaded": "[yellow]?[/]", "failed": "[red]✗[/]"}


def doctor(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run: only verify its checkpoints against their checksums.")] = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the self-check, which samples and scores with real engines.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="ADDRESS", help="Only measure the network between every two hosts of this Ray cluster."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME|FOLDER|CONFIG", help="Only report whether this model is supported, and with which drafter."),
    ] = None,
    mismatch: Annotated[
        str | None,
        typer.Option(
            "--mismatch",
            metavar="RECIPE|RUN",
            help="Only compare one response module by module in engine and trainer, and name the first that differs.",
        ),
    ] = None,
) -> None:
    """Check versions, devices, kernels, transports and Ray, and compare vLLM's log-probs with the trainer's.

    Exit code 3 if something required is missing, 6 if the log-probs differ, a link between hosts is slow, or a checkpoint is damaged.
    With --model: 2 if the model is not supported. With --mismatch: 6 if a module or the log-probs differ by more than rounding explains.
    """
    from rich.console import Console

    from mtpctl.doctor.checks import examine, examine_cluster, examine_run

    if mismatch is not None:
        _mismatch(mismatch, as_json)
        return
    with Console(stderr=True).status("checking the installed packages …") as status:
        if model is not None:
            from mtpctl.doctor.checks import examine_model

            diagnosis = examine_model(model)
        elif run is not None:
            status.update(f"reading the checkpoints of {run} …")
            diagnosis = examine_run(run)
        elif cluster is not None:
            status.update(f"measuring the links between the hosts of {cluster} …")
            diagnosis = examine_cluster(cluster)
        else:
            diagnosis = examine(quick=quick, on_check=lambda check: status.update(f"{check.name}: {check.finding.state}"))
    if as_json:
        print_result(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        _print(diagnosis)
    if diagnosis.error is not None:
        sys.stdout.flush()
        raise diagnosis.error


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True, style="dim")
    for check in diagnosis.checks:
        finding = check.finding
        table.add_row(MARKS[finding.state], f"[bold]{check.name}[/]", escape(finding.summary), f"{check.seconds:.1f} s")
    console = Console(highlight=False)
    console.print(table)
    skipped = [check.name for check in diagnosis.checks if check.finding.state == "skipped"]
    console.print(f"\n{diagnosis.verdict}{f', without the {skipped[0]}' if skipped else ''}, after {diagnosis.seconds:.1f} s")


def _mismatch(target: str, as_json: bool) -> None:
    from rich.console import Console

    from mtpctl.doctor.mismatch import examine_mismatch

    with Console(stderr=True).status("running one response through engine, log-prob server and trainer …"):
        result = examine_mismatch(target)
    if as_json:
        print_result(json.dumps(result.to_dict(), indent=2))
    else:
        _print_mismatch(result)
    if result.error is not None:
        sys.stdout.flush()
        raise result.error


def _print_mismatch(result: Mismatch) -> None:
    from rich.console import Console
    from rich.table import Table

    modules = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "module", "same inputs", "worst token", "own inputs", "prefill"):
        modules.add_column(title, no_wrap=True, justify="left" if title in ("", "module") else "right")
    for module in result.modules:
        mark = MARKS["failed" if module.exceeds(result.limit) else "ok"]
        figures = (module.mean, module.worst, module.total, module.prefill)
        modules.add_row(mark, result.label(module.name), *(f"{figure:.1e}" for figure in figures))
    logprobs = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "log-probs against the trainer's", "mean, nats", "largest"):
        logprobs.add_column(title, no_wrap=True, justify="right" if title in ("mean, nats", "largest") else "left")
    for line in result.logprobs:
        logprobs.add_row(MARKS["ok" if line.mean <= result.bound else "failed"], line.source, f"{line.mean:.1e}", f"{line.largest:.1e}")
    console = Console(highlight=False)
    console.print(modules)
    console.print()
    console.print(logprobs)
    if result.error is None:
        print_result(f"\n{result.verdict}")
