"""Messages between the controller and the processes of reward functions: a pickle behind its length, over a socket."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("!Q")


def send(to: socket.socket, message: object) -> None:
    """Send a message over a socket that blocks."""
    to.sendall(_packed(message))


def receive(of: socket.socket) -> object:
    """The next message of a socket that blocks. Raises EOFError where the other end is closed."""
    (length,) = _LENGTH.unpack(_exactly(of, _LENGTH.size))
    message: object = pickle.loads(_exactly(of, length))
    return message


class Channel(asyncio.Protocol):
    """The controller's end: calls `received` with each message, and `ended` once, when the other end is closed."""

    def __init__(self, received: Callable[[object], None], ended: Callable[[], None]) -> None:
        self._received, self._ended = received, ended
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Take over the socket."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def send(self, message: object) -> None:
        """Send a message without waiting; one that the other end cannot take any more is lost, as `ended` tells."""
        assert self._transport is not None
        self._transport.write(_packed(message))

    def close(self) -> None:
        """Close this end. `ended` is called no more."""
        self._ended = lambda: None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            message = pickle.loads(memoryview(self._buffer)[_LENGTH.size : end].tobytes())
            del self._buffer[:end]
            self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


def _packed(message: object) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _exactly(of: socket.socket, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = of.recv(min(missing, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
