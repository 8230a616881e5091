"""Serves the state of a run over HTTP: a status page, the same as JSON, and metrics for Prometheus (`telemetry.http`)."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

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
