"""A web server whose socket is bound in advance, which limits its clients, and which stops without stopping the caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

import uvicorn

from mtpctl.errors import UserError
from mtpctl.web.guard import Guard, with_timeouts

END_S = 5
"""Grace period for requests in flight when a server stops, in seconds."""


def listen(host: str, port: int, *, fields: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """Bind a listening socket; port 0 selects a free port. `fields`: the options or recipe keys of host and port, for errors.

    Raises UserError if the address is in use, or does not belong to this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm, which delays responses by up to 40 ms, only if the socket was created with IPPROTO_TCP.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1024)
    except socket.gaierror as error:
        raise UserError(f"{fields[0]}: {host} is not an address of this machine ({error.strerror})") from error
    except OSError as error:
        raise UserError(f"{fields[1]}: cannot listen on {host}:{port} ({error.strerror}); choose another") from error
    return bound


def allow_connections() -> None:
    """Raise this process's limit on open files, and so on connections, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16), hard))


@contextlib.asynccontextmanager
async def serving(app: Guard, bound: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on `bound` in the caller's event loop within the block, then close the socket. The caller handles signals."""
    allow_connections()
    server = WebServer(app, signals=False)
    task = asyncio.create_task(server.serve(sockets=[bound]), name="web server")
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
        bound.close()


def address_of(bound: socket.socket) -> str:
    """The URL of a bound socket, `http://HOST:PORT`."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WebServer(uvicorn.Server):
    """A server for `app`; run it with `serve(sockets=[…])`. It stops on a signal, or when `should_exit` is set.

    Unlike uvicorn's, it does not raise the signal again, because the caller still has actors to stop. `signals`: handle signals; if false,
    the caller handles them.
    """

    def __init__(self, app: Guard, *, signals: bool = True) -> None:
        header_s, stalled_s = app.bounds.header_s, app.bounds.stalled_s
        super().__init__(
            uvicorn.Config(
                app,
                http=with_timeouts(header_s, stalled_s),
                ws="none",
                lifespan="off",
                log_level=logging.ERROR,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(header_s),
                timeout_graceful_shutdown=END_S,
            )
        )
        self._signals = signals

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield


METRICS_TYPE = "text/plain; version=0.0.4"


@dataclass(frozen=True, slots=True)
class Series:
    """One value of a metric. `name` has no prefix."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def prometheus_text(prefix: str, series: Iterable[Series]) -> str:
    """Format metrics in Prometheus' text format, version 0.0.4. `prefix` is prepended to every name; names must be unique."""
    lines: list[str] = []
    for each in series:
        labels = ",".join(f'{label}="{_escaped(value, quotes=True)}"' for label, value in each.labels.items())
        name = prefix + each.name
        lines += [f"# HELP {name} {_escaped(each.help)}", f"# TYPE {name} {each.kind}"]
        lines.append(f"{name}{f'{{{labels}}}' if labels else ''} {_number(each.value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
