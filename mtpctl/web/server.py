"""A web server with a socket that is bound in advance. It closes connections of slow clients, and stops without ending the process.

Also formats metrics for Prometheus.
"""

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
from typing import Literal, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtpctl.errors import UserError
from mtpctl.web.guard import Guard, HttpBounds

SHUTDOWN_S = 5
"""Grace period for requests in flight when a server stops, in seconds."""
MIN_RATE = 1024
"""Minimum rate at which a client must read its response, in bytes per second."""


def listen(host: str, port: int, *, fields: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """Bind a listening socket; port 0 selects a free port. `fields`: the options or recipe keys of host and port, for errors.

    Raises UserError if the address is in use, or does not belong to this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm, which delays responses by up to 40 ms, only if the socket was created with IPPROTO_TCP.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except socket.gaierror as error:
        raise UserError(f"{fields[0]}: {host} is not an address of this machine ({error.strerror})") from error
    except OSError as error:
        raise UserError(f"{fields[1]}: cannot listen on {host}:{port} ({error.strerror}); choose another address or port") from error
    return listener


def raise_open_file_limit() -> None:
    """Raise this process's limit on open files, and so on connections, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16), hard))


@contextlib.asynccontextmanager
async def serving(app: Guard, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on `listener` in the caller's event loop within the block, then close the socket. The caller handles signals."""
    raise_open_file_limit()
    server = WebServer(app, signals=False)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="web server")
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
        listener.close()


def address_of(listener: socket.socket) -> str:
    """The URL of a listening socket, `http://HOST:PORT`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WebServer(uvicorn.Server):
    """A server for `app`; run it with `serve(sockets=[…])`. It stops on a signal, or when `should_exit` is set.

    Unlike uvicorn's server, it does not raise the signal again, because the caller still has actors to stop. If `signals` is false, the
    caller handles signals.
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
                timeout_graceful_shutdown=SHUTDOWN_S,
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


def with_timeouts(header_s: float, stalled_s: float = HttpBounds.stalled_s) -> type[H11Protocol]:
    """uvicorn's HTTP protocol with timeouts.

    A connection is closed if no request head arrives within `header_s` seconds, or if a client reads more slowly than `MIN_RATE` for
    `stalled_s` seconds.
    """

    class TimeoutProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_head_timer()
            self._cancel_check()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._schedule_check(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            super().resume_writing()
            self._cancel_check()

        def _schedule_check(self, unread: int) -> None:
            """Check after `stalled_s` seconds how many of the `unread` bytes the client has read."""
            self._stall_timer = self.loop.call_later(stalled_s, self._check_client, unread)

        def _check_client(self, previous_unread: int) -> None:
            unread = self.transport.get_write_buffer_size()
            if previous_unread - unread < stalled_s * MIN_RATE:
                self.transport.abort()
            else:
                self._schedule_check(unread)

        def _cancel_check(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def _expect_head(self) -> None:
            is_idle = self.cycle is None or self.cycle.response_complete
            if not is_idle:
                self._cancel_head_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(header_s, self.transport.close)

        def _cancel_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return TimeoutProtocol


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
        labels = ",".join(f'{label}="{_escape(value, quotes=True)}"' for label, value in each.labels.items())
        name = prefix + each.name
        lines += [f"# HELP {name} {_escape(each.help)}", f"# TYPE {name} {each.kind}"]
        lines.append(f"{name}{f'{{{labels}}}' if labels else ''} {_format_number(each.value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
