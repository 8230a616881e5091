"""ASGI middleware that checks the origin of requests, the API key and the size of bodies, and cancels requests of disconnected clients.

A body is read completely, within its limits, before it is passed to a route. The total size of all bodies is also limited, which bounds
the server's memory. A request whose client disconnects is cancelled, which frees its slot in the queue.

Web pages of other sites can reach these servers from a browser on the same machine or network. Any page can post to
`http://127.0.0.1:PORT`; the browser then sends the page's `Origin`. A page whose domain resolves to a local address (DNS rebinding) can
also read the responses; the browser then sends that domain as `Host`. So `Host` must be a name that such a page cannot have, and `Origin`,
if present, must be this server itself. Programs other than browsers send no `Origin`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtpctl.web.json_body import shown

if TYPE_CHECKING:
    from asyncio import BaseTransport, Transport
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


HOSTS = "MTPCTL_ALLOWED_HOSTS"
"""Environment variable with additional host names of the servers, such as that of a proxy; comma-separated."""
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)


def is_allowed_host(authority: str) -> bool:
    """Whether a request with this `Host` is allowed. DNS rebinding requires a domain that the attacker owns.

    True for IP addresses, `localhost`, names without a dot (which are not public domains), this machine's name, and
    `MTPCTL_ALLOWED_HOSTS`.
    """
    match = _AUTHORITY.fullmatch(authority.strip().lower())
    if match is None:
        return False
    name = match[1].removesuffix(".")
    return "." not in name or name.endswith(".localhost") or _is_address(name) or name in _own_names()


def is_same_origin(origin: str, authority: str) -> bool:
    """Whether `origin` has the host and port of the `Host` header. The scheme may differ, because a proxy may add TLS."""
    scheme, mark, rest = origin.strip().lower().partition("://")
    return bool(mark) and scheme in ("http", "https") and rest == authority.strip().lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _own_names() -> set[str]:
    allowed = os.environ.get(HOSTS, "").split(",")
    return {each.strip().lower().removesuffix(".") for each in (*allowed, socket.gethostname())} - {""}


MAX_DRAIN_BYTES = 256 << 20
"""Maximum bytes of a rejected body that are read and discarded (see `Guard._drain`)."""
OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths that require no key: health and documentation."""
MIN_RATE = 1024
"""Minimum rate at which a client must read its response, in bytes per second."""
_JSON = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


@dataclass(frozen=True)
class HttpBounds:
    """Limits of a server.

    body_bytes: size of one request body. held_bytes: total size of the bodies of all requests in progress. body_s: seconds to send a body.
    header_s: seconds to send the request head. drain_s: seconds for which a client may continue to send a rejected body. stalled_s: seconds
    after which a client that does not read its response is disconnected.
    """

    body_bytes: int = 8 << 20
    held_bytes: int = 128 << 20
    body_s: float = 20.0
    header_s: float = 10.0
    drain_s: float = 5.0
    stalled_s: float = 30.0


class _Rejected(Exception):
    def __init__(self, status: int, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers


def error_body(message: str, kind: str) -> dict[str, dict[str, str]]:
    """An error in the format of OpenAI's clients."""
    return {"error": {"message": message, "type": kind}}


async def http_error(_: Request, error: Exception) -> JSONResponse:
    """Starlette's handler of an HTTPException, such as an unknown route: replies with its detail and status."""
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)


class Guard:
    """ASGI middleware in front of `app` (see the module's docstring)."""

    def __init__(
        self, app: ASGIApp, bounds: HttpBounds, key: str | None, *, open_under: str | None = None, tokens: Mapping[str, str] | None = None
    ) -> None:
        """Wrap an application.

        Args:
            app: handles the accepted requests.
            bounds: limits on bodies and times.
            key: the required bearer token; None for no key.
            open_under: prefix of paths that require no key.
            tokens: if there is no key, the bearer tokens that non-GET requests to these paths require.
        """
        self.app, self.bounds, self.open_under, self.tokens = app, bounds, open_under, tokens or {}
        self.key = key
        self.pending_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, complete = bytearray(), False
        try:
            self._check(scope)
            await self._read(receive, body)
            complete = True
            self._check_type(scope, body)
            await self._respond(scope, receive, send, bytes(body))
        except _Rejected as rejected:
            if not complete:
                await self._drain(receive)
            await _reply(send, rejected)
        except _Disconnected:
            pass
        finally:
            self.pending_bytes -= len(body)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if (token := self._token(scope)) is not None:
            if not hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + token.encode()):
                raise _Rejected(401, "a key is needed: send `Authorization: Bearer KEY`", **{"www-authenticate": "Bearer"})
        elif not is_allowed_host(host := headers.get(b"host", b"localhost").decode("latin-1")):
            # Not checked with a key, which a web page of another site does not have.
            raise _Rejected(403, f"host: {shown(host)} is not a name of this server; use its address, or add the name to {HOSTS}")
        origin = headers.get(b"origin")
        if origin is not None and not is_same_origin(origin.decode("latin-1"), headers.get(b"host", b"").decode("latin-1")):
            raise _Rejected(403, f"origin: pages of {shown(origin.decode('latin-1'))} may not call this server")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self.bounds.body_bytes:
            raise self._too_large()

    def _check_type(self, scope: Scope, body: bytearray) -> None:
        """Require a JSON content type: browsers let other origins send forms without a preflight request, but not JSON."""
        kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        if body and not _JSON.match(kind):
            got = f"got {shown(kind)[1:-1]}" if kind else "got none"
            raise _Rejected(415, f"content-type: must be application/json, {got}; send the header 'content-type: application/json'")

    def _token(self, scope: Scope) -> str | None:
        """The bearer token that a request must have; None if it needs none."""
        if self.key is None:
            return None if scope["method"] in ("GET", "HEAD") else self.tokens.get(scope["path"])
        return None if self._open(scope["path"]) else self.key

    def _open(self, path: str) -> bool:
        return path in OPEN_PATHS or (self.open_under is not None and path.startswith(self.open_under))

    def _too_large(self) -> _Rejected:
        return _Rejected(413, f"a body may have at most {self.bounds.body_bytes} bytes; send less in one request")

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Read the whole body into `body`, and count its bytes in `pending_bytes`."""
        try:
            async with asyncio.timeout(self.bounds.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    chunk = message.get("body", b"")
                    if len(body) + len(chunk) > self.bounds.body_bytes:
                        raise self._too_large()
                    if self.pending_bytes + len(chunk) > self.bounds.held_bytes:
                        raise _Rejected(429, "too many bytes are in progress; try again", **{"retry-after": "1"})
                    body += chunk
                    self.pending_bytes += len(chunk)
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            raise _Rejected(408, f"the body did not arrive within {self.bounds.body_s:g} s") from None

    async def _drain(self, receive: Receive) -> None:
        """Discard the rest of a rejected body: a client that is still sending when the connection closes does not read the response."""
        left = MAX_DRAIN_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(self.bounds.drain_s):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return

    async def _respond(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        disconnected = asyncio.Event()
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected.set()

        answering = asyncio.ensure_future(self.app(scope, replay, send))
        watching = asyncio.create_task(watch())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
            await asyncio.gather(answering, return_exceptions=disconnected.is_set())
        finally:
            watching.cancel()
            answering.cancel()


class _Disconnected(Exception):
    """The client disconnected before its request was complete."""


async def _reply(send: Send, rejected: _Rejected) -> None:
    body = json.dumps(error_body(str(rejected), "invalid_request_error")).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **rejected.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": rejected.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def with_timeouts(header_s: float, stalled_s: float = HttpBounds.stalled_s) -> type[H11Protocol]:
    """uvicorn's HTTP protocol with timeouts.

    A connection is closed if no request head arrives within `header_s` seconds, or if the client reads a response more slowly than
    `MIN_RATE` for `stalled_s` seconds.
    """

    class TimeoutProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: BaseTransport) -> None:
            super().connection_made(cast("Transport", transport))
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

        def _check_client(self, before: int) -> None:
            unread = self.transport.get_write_buffer_size()
            if before - unread < stalled_s * MIN_RATE:
                self.transport.abort()
            else:
                self._schedule_check(unread)

        def _cancel_check(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def _expect_head(self) -> None:
            between = self.cycle is None or self.cycle.response_complete
            if not between:
                self._cancel_head_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(header_s, self.transport.close)

        def _cancel_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return TimeoutProtocol
