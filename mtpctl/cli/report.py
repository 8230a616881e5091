"""`mtpctl report`: show a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run directory, or several to compare.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write; default: report.html in RUN; for several compare.html here."),
    ] = None,
) -> None:
    """Write one self-contained HTML page and print its path: a run's curves, or of several runs their curves over each other."""
    if len(runs) > 1:
        from mtpctl.telemetry.compare import write_comparison

        print(write_comparison(runs, out))
        return
    from mtpctl.telemetry.report import write_report

    print(write_report(runs[0], out))
