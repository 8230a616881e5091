"""Reports what a run is doing and waiting for, and serves a status page, JSON and Prometheus metrics (`telemetry.http`)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mtpctl.cluster.process import read_newest_line
from mtpctl.recipe.schema import TelemetryConfig
from mtpctl.telemetry.names import describe
from mtpctl.telemetry.runs import LiveStatus, ReplicaCounts, render_status
from mtpctl.web.guard import Guard, HttpBounds, http_error
from mtpctl.web.server import METRICS_TYPE, Series, listen, prometheus_text

REFRESH_S = 5
"""Refresh interval of the page in a browser, in seconds."""

GetReplicaCounts = Callable[[], ReplicaCounts | None]
"""Returns the counts of rollout replicas; None before they are started."""


def bind_status_socket(telemetry: TelemetryConfig) -> socket.socket | None:
    """The bound socket of the status page; None without `telemetry.http`. Raises UserError if the address is in use or not of this host."""
    address = telemetry.http_address
    return None if address is None else listen(*address, fields=("telemetry.http", "telemetry.http"))


def create_status_app(live_status: LiveStatus, get_counts: GetReplicaCounts) -> Guard:
    """The ASGI application with the routes `/`, `/status.json` and `/metrics`."""

    async def page(_: Request) -> Response:
        return HTMLResponse(render_status(live_status, get_counts()), headers={"refresh": str(REFRESH_S)})

    async def status_json(_: Request) -> Response:
        counts = get_counts()
        return JSONResponse(live_status.as_json() | {"replicas": None if counts is None else asdict(counts)})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(prometheus_text("mtpctl_", _series(live_status, get_counts())), media_type=METRICS_TYPE)

    routes = [Route("/", page), Route("/status.json", status_json), Route("/metrics", metrics)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: http_error})
    app.router.redirect_slashes = False
    return Guard(app, HttpBounds(body_bytes=0), None)


def _series(live_status: LiveStatus, counts: ReplicaCounts | None) -> Iterator[Series]:
    """The series of `/metrics`: the progress of the run, its replicas, and the latest value of each metric."""
    overview = live_status.overview()
    run_labels = {"run": live_status.path.name}
    labels = run_labels | {"stage": overview.stage}
    yield Series("run_step", "gauge", "Updates that are done.", overview.step, labels)
    if overview.steps is not None:
        yield Series("run_steps", "gauge", "Number of updates of the whole stage.", overview.steps, labels)
    yield Series("run_age_seconds", "gauge", "Seconds since the newest row of metrics.", overview.age_s, run_labels)
    yield Series("run_waits", "gauge", "Number of waits in progress, such as for a host.", len(live_status.waiting), run_labels)
    if counts is not None:
        yield Series("run_replicas_serving", "gauge", "Rollout replicas that serve.", counts.serving, run_labels)
        yield Series("run_replicas_requested", "gauge", "Rollout replicas that are requested.", counts.requested, run_labels)
        yield Series("run_replica_restarts_total", "counter", "Rollout replicas that replaced a failed one.", counts.restarts, run_labels)
    # Characters such as `/` are replaced. If two metrics then have the same name, only one is reported: Prometheus rejects duplicates.
    metrics = {re.sub(r"\W", "_", name, flags=re.ASCII): (name, value) for name, value in list(live_status.metrics.items())}
    for name, (metric, value) in metrics.items():
        yield Series(name, "gauge", describe(metric).meaning or metric, value, run_labels)


REPORT_INTERVAL_S = 1.0
"""Interval of reports of waits, in seconds."""


@dataclass(eq=False)
class Wait:
    """One wait: its reason, its actors, and the time of its start, by the wall clock and by the monotonic clock."""

    reason: str
    actors: Sequence[str] = ()
    wall_start: float = field(default_factory=time.time)
    _started_at: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Duration until now."""
        return time.monotonic() - self._started_at

    def describe(self, logs: Path) -> str:
        """The wait as text, such as `trainer: loading, 12 s`, and the newest log line since its start.

        If several actors have logged a line, that of the last one in `actors`.
        """
        lines = [line for actor in self.actors if (line := read_newest_line(logs, actor, start_time=self.wall_start))]
        newest_log_line = f" · {lines[-1]}" if lines else ""
        return f"{self.reason}, {self.seconds:.0f} s{newest_log_line}"


class Waits:
    """The waits in progress. `run` reports a line for each, every second. An empty list is reported when the last wait ends."""

    def __init__(self, report: Callable[[Sequence[str]], None], logs: Path) -> None:
        self._report, self._logs, self._waits = report, logs, list[Wait]()

    @contextlib.contextmanager
    def show(self, reason: str, *actors: str) -> Iterator[Wait]:
        """Show a wait while the block runs. `actors`: the names of the actors' logs."""
        wait = Wait(reason, actors)
        self._waits.append(wait)
        try:
            yield wait
        finally:
            self._waits.remove(wait)
            if not self._waits:
                self._report([])

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            if self._waits:
                self._report([wait.describe(self._logs) for wait in self._waits])
