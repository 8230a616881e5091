"""`mtpctl report`: show a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write; default: report.html in RUN.")] = None,
) -> None:
    """Write one self-contained HTML page with a run's curves, and print its path."""
    from mtpctl.telemetry.report import write_report

    print(write_report(run, out))
