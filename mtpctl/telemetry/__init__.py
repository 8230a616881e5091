"""What a run says about itself: its directory, its metrics, the live panel, the report."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.telemetry.history import Event, History, Row, load_history
    from mtpctl.telemetry.names import Metric, describe, format_value
    from mtpctl.telemetry.report import write_report
    from mtpctl.telemetry.run_directory import RunDirectory
    from mtpctl.telemetry.session import Telemetry
    from mtpctl.telemetry.summary import SummaryRow, before_and_after

__all__ = [
    "Event",
    "History",
    "Metric",
    "Row",
    "RunDirectory",
    "SummaryRow",
    "Telemetry",
    "before_and_after",
    "describe",
    "format_value",
    "load_history",
    "write_report",
]

_HOME = {
    "Event": "history",
    "History": "history",
    "Metric": "names",
    "Row": "history",
    "RunDirectory": "run_directory",
    "SummaryRow": "summary",
    "Telemetry": "session",
    "before_and_after": "summary",
    "describe": "names",
    "format_value": "names",
    "load_history": "history",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
