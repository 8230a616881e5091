"""Serves the state of a run over HTTP: a status page, the same as JSON, and metrics for Prometheus (`telemetry.http`)."""

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

from mtpctl.cluster.process import newest_line
from mtpctl.recipe.telemetry import TelemetryConfig
from mtpctl.telemetry.live import LiveStatus, ReplicaCounts, render
from mtpctl.telemetry.names import describe
from mtpctl.web.guard import Guard, HttpBounds, error_body
from mtpctl.web.prometheus import MEDIA_TYPE, Series, text_of
from mtpctl.web.server import listen

REFRESH_S = 5
"""Seconds after which a browser loads the page again."""

Replicas = Callable[[], ReplicaCounts | None]
"""Counts the rollout replicas; None before there are any."""


def status_socket(telemetry: TelemetryConfig) -> socket.socket | None:
    """The bound socket of the status page; None for a recipe without `telemetry.http`.

    Raises UserError where the address is taken, or is not one of this machine.
    """
    address = telemetry.http_address
    return None if address is None else listen(*address, fields=("telemetry.http", "telemetry.http"))


def status_app(live: LiveStatus, replicas: Replicas) -> Guard:
    """The ASGI application with the routes `/`, `/status.json` and `/metrics`."""

    async def shown(_: Request) -> Response:
        return HTMLResponse(render(live, replicas()), headers={"refresh": str(REFRESH_S)})

    async def as_json(_: Request) -> Response:
        counts = replicas()
        return JSONResponse(live.as_json() | {"replicas": None if counts is None else asdict(counts)})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(text_of("mtpctl_", _series(live, replicas())), media_type=MEDIA_TYPE)

    routes = [Route("/", shown), Route("/status.json", as_json), Route("/metrics", metrics)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
    app.router.redirect_slashes = False
    return Guard(app, HttpBounds(body_bytes=0), None)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)


def _series(live: LiveStatus, counts: ReplicaCounts | None) -> Iterator[Series]:
    """What `/metrics` has: the progress of the run, its replicas, and the newest value of each metric."""
    found = live.overview()
    labels = {"run": live.path.name, "stage": found.stage}
    yield Series("run_step", "gauge", "Updates that are done.", found.step, labels)
    if found.steps is not None:
        yield Series("run_steps", "gauge", "Updates that the stage has.", found.steps, labels)
    yield Series("run_age_seconds", "gauge", "Seconds since the newest row of metrics.", found.age_s)
    yield Series("run_waits", "gauge", "Things that the run waits for, such as a host.", len(live.waiting))
    if counts is not None:
        yield Series("run_replicas_serving", "gauge", "Rollout replicas that serve.", counts.serving)
        yield Series("run_replicas_asked", "gauge", "Rollout replicas that are asked for.", counts.asked)
        yield Series("run_replica_restarts_total", "counter", "Rollout replicas that took the place of one that failed.", counts.restarts)
    # Names that differ only in characters such as `/` become one name. Prometheus refuses a series with two values, so one of them is kept.
    named = {re.sub(r"\W", "_", name, flags=re.ASCII): (name, value) for name, value in list(live.metrics.items())}
    for name, (metric, value) in named.items():
        yield Series(name, "gauge", describe(metric).meaning or metric, value)


# What a run waits for, so that loading, compiling and saving are seen to go on.

LOOK_S = 1.0
"""Seconds between two looks at the logs."""


@dataclass(eq=False)
class Wait:
    """One wait: its reason, its actors, and its start. `begun` is wall-clock time, which may be adjusted during the wait."""

    what: str
    actors: Sequence[str] = ()
    begun: float = field(default_factory=time.time)
    _mark: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self._mark

    def told(self, logs: Path) -> str:
        """`trainer: loading, 12 s`, and the newest line that one of the actors has printed since, such as a share of weights loaded."""
        lines = [line for actor in self.actors if (line := newest_line(logs, actor, since=self.begun))]
        said = f" · {lines[-1]}" if lines else ""
        return f"{self.what}, {self.seconds:.0f} s{said}"


class Waits:
    """The waits that are under way. `tell` gets a line for each while `run` runs, and an empty list once there are none."""

    def __init__(self, tell: Callable[[Sequence[str]], None], logs: Path) -> None:
        self._tell, self._logs, self._waits = tell, logs, list[Wait]()

    @contextlib.contextmanager
    def on(self, what: str, *actors: str) -> Iterator[Wait]:
        """A wait as long as the block runs. `actors` by their names, as their logs have them."""
        wait = Wait(what, actors)
        self._waits.append(wait)
        try:
            yield wait
        finally:
            self._waits.remove(wait)
            if not self._waits:
                self._tell([])

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._waits:
                self._tell([wait.told(self._logs) for wait in self._waits])
