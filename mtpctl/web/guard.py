"""Handles requests of untrusted clients: ASGI middleware that checks them, and a strict JSON parser.

The middleware checks the origin of requests, the API key and the size of bodies, and cancels requests of disconnected clients.

A body is read completely, within its limits, before it is passed to a route. The total size of all bodies is also limited, which bounds
the server's memory. A request whose client disconnects is cancelled, which frees its slot in the queue.

Web pages of other sites can reach these servers from a browser on the same machine or network. Any page can post to
`http://127.0.0.1:PORT`; the browser then sends the page's `Origin`. A page whose domain resolves to a local address (DNS rebinding) can
also read the responses; the browser then sends that domain as `Host`. So `Host` must be a name that such a page cannot have, unless the
request needs a key, and `Origin`, if present, must be this server itself. Programs other than browsers send no `Origin`.

Python's JSON parser accepts input that RFC 8259 forbids or leaves undefined, and that fails later or is read differently by other parsers:
`NaN`, numbers beyond the range of a double, integers with thousands of digits, duplicate keys (the last one wins), and unlimited nesting.
`parse_json` rejects all of these.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import math
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


HOSTS_VARIABLE = "MTPCTL_ALLOWED_HOSTS"
"""Environment variable with additional host names of the servers, such as that of a proxy; comma-separated."""
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)


def is_allowed_host(authority: str) -> bool:
    """Whether a request with this `Host` is allowed: IP addresses, `localhost` and its subdomains, names without a dot, this
    machine's name, and `MTPCTL_ALLOWED_HOSTS`.

    DNS rebinding requires a public domain that the attacker owns, and a name without a dot is not a public domain.
    """
    match = _AUTHORITY.fullmatch(authority.strip().lower())
    if match is None:
        return False
    name = match[1].removesuffix(".")
    return "." not in name or name.endswith(".localhost") or _is_address(name) or name in _own_host_names()


def is_same_origin(origin: str, authority: str) -> bool:
    """Whether `origin` has the host and port of the `Host` header. The scheme may differ, because a proxy may add TLS."""
    scheme, separator, netloc = origin.strip().lower().partition("://")
    return bool(separator) and scheme in ("http", "https") and netloc == authority.strip().lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _own_host_names() -> set[str]:
    allowed = os.environ.get(HOSTS_VARIABLE, "").split(",")
    return {name.strip().lower().removesuffix(".") for name in (*allowed, socket.gethostname())} - {""}


MAX_DRAIN_BYTES = 256 << 20
"""Maximum bytes of a rejected body that are read and discarded (see `Guard._drain`)."""
PUBLIC_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths that require no key: health and documentation."""
_JSON = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


@dataclass(frozen=True)
class HttpBounds:
    """Limits of a server.

    body_bytes: size of one request body. total_bytes: total size of the bodies of all requests in progress. body_s: seconds to send a body.
    header_s: seconds to send the request head. drain_s: seconds for which a client may continue to send a rejected body. stalled_s: seconds
    after which a client that does not read its response is disconnected.
    """

    body_bytes: int = 8 << 20
    total_bytes: int = 128 << 20
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
        self,
        app: ASGIApp,
        bounds: HttpBounds,
        key: str | None,
        *,
        public_prefix: str | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap an application.

        Args:
            app: handles the accepted requests.
            bounds: limits on bodies and times.
            key: the required bearer token; None for no key.
            public_prefix: prefix of paths that require no key.
            tokens: by path, the bearer tokens that requests other than GET and HEAD require if there is no key.
        """
        self.app, self.bounds, self.public_prefix, self.tokens = app, bounds, public_prefix, tokens or {}
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
            # Requests that need a key may have any host, because a web page of another site does not know the key.
            raise _Rejected(
                403, f"host: {quote_value(host)} is not a name of this server; use its address, or add the name to {HOSTS_VARIABLE}"
            )
        origin = headers.get(b"origin")
        if origin is not None and not is_same_origin(origin.decode("latin-1"), headers.get(b"host", b"").decode("latin-1")):
            raise _Rejected(403, f"origin: pages of {quote_value(origin.decode('latin-1'))} may not call this server")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self.bounds.body_bytes:
            raise self._too_large()

    def _check_type(self, scope: Scope, body: bytearray) -> None:
        """Require a JSON content type: browsers let other origins send forms without a preflight request, but not JSON."""
        content_type = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        if body and not _JSON.match(content_type):
            got = f"got {quote_value(content_type)[1:-1]}" if content_type else "got none"
            raise _Rejected(415, f"content-type: must be application/json, {got}; send the header 'content-type: application/json'")

    def _token(self, scope: Scope) -> str | None:
        """The bearer token that a request must have; None if it needs none."""
        if self.key is None:
            return None if scope["method"] in ("GET", "HEAD") else self.tokens.get(scope["path"])
        is_public = scope["path"] in PUBLIC_PATHS or (self.public_prefix is not None and scope["path"].startswith(self.public_prefix))
        return None if is_public else self.key

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
                    if self.pending_bytes + len(chunk) > self.bounds.total_bytes:
                        raise _Rejected(429, "too many bytes are in progress; try again", **{"retry-after": "1"})
                    body += chunk
                    self.pending_bytes += len(chunk)
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            raise _Rejected(408, f"the body did not arrive within {self.bounds.body_s:g} s") from None

    async def _drain(self, receive: Receive) -> None:
        """Discard the rest of a rejected body: a client that is still sending when the connection closes does not read the response."""
        remaining_bytes = MAX_DRAIN_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(self.bounds.drain_s):
                while remaining_bytes > 0:
                    message = await receive()
                    remaining_bytes -= len(message.get("body", b""))
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

        app_task = asyncio.ensure_future(self.app(scope, replay, send))
        watch_task = asyncio.create_task(watch())
        try:
            await asyncio.wait({app_task, watch_task}, return_when=asyncio.FIRST_COMPLETED)
            if not app_task.done():
                app_task.cancel()
            await asyncio.gather(app_task, return_exceptions=disconnected.is_set())
        finally:
            watch_task.cancel()
            app_task.cancel()


class _Disconnected(Exception):
    """The client disconnected before its request was complete."""


async def _reply(send: Send, rejected: _Rejected) -> None:
    body = json.dumps(error_body(str(rejected), "invalid_request_error")).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **rejected.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": rejected.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


MAX_JSON_DEPTH = 64
"""Maximum nesting depth of objects and arrays."""
_LONG_INTEGER = re.compile(rb"[0-9]{20}")
_NON_FINITE = re.compile(rb"NaN|Infinity|[eE]\+?[0-9]{3}|[0-9]{200}")
"""A body without a match has only finite numbers."""
_MAX_SHOWN_CHARS = 60
"""Maximum number of characters of a client's value in an error message."""


class BodyInvalid(ValueError):
    """A body that is not acceptable JSON; the message is one line."""


def parse_json(body: bytes) -> object:
    """Parse JSON in UTF-8. Raises BodyInvalid."""
    # `parse_int` is slow on lists of token ids, so it is used only if a number may exceed 64 bits.
    parse_int = _parse_integer if _LONG_INTEGER.search(body) else None
    try:
        value: object = json.loads(body.decode(), object_pairs_hook=_build_object, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise BodyInvalid(f"body: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise BodyInvalid(f"body: not valid JSON: {error}") from error
    except RecursionError as error:
        raise _depth_error() from error
    # The depth is at most the number of opening brackets.
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH and _exceeds_depth(value, MAX_JSON_DEPTH):
        raise _depth_error()
    if _NON_FINITE.search(body) and (path := _non_finite_path(value)) is not None:
        raise BodyInvalid(f"{quote_value(path)[1:-1] or 'body'}: must be a finite number")
    return value


def parse_json_object(body: bytes) -> dict[str, object]:
    """Parse a JSON object. Raises BodyInvalid."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise BodyInvalid("body: must be a JSON object")
    return value


def check_text(value: object) -> None:
    """Raise BodyInvalid if a string in the value has a lone surrogate, which tokenizers cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BodyInvalid("body: a string has a lone surrogate, which is not a character") from error


def quote_value(value: object) -> str:
    """Format a client's value for an error message: on one line, and truncated."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def _depth_error() -> BodyInvalid:
    return BodyInvalid(f"body: nested too deeply; at most {MAX_JSON_DEPTH} levels are allowed")


def _exceeds_depth(value: object, levels: int) -> bool:
    level: list[object] = [value]
    for _ in range(levels):
        collections = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        # Most lists contain only token ids, for which checking the set of types is faster than checking each item.
        level = [
            child
            for items in collections
            if not {dict, list}.isdisjoint(map(type, items))
            for child in items
            if type(child) in (dict, list)
        ]
        if not level:
            return False
    return True


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise BodyInvalid(f"body: the key {quote_value(duplicate)} occurs twice in one object")
    return fields


def _non_finite_path(value: object, path: str = "") -> str | None:
    """The path of a number that is infinite or NaN; None if all are finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    paths = (_non_finite_path(item, f"{path}.{key}" if path else str(key)) for key, item in items)
    return next((item_path for item_path in paths if item_path is not None), None)


def _parse_integer(text: str) -> int:
    if len(text) > 20:
        raise BodyInvalid(f"body: the integer {text[:20]}… has {len(text)} characters; 64 bits take at most 20")
    return int(text)
