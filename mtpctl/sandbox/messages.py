"""Messages on a stream, each prefixed by its length in four bytes, and authenticated verdicts from the tests' process to the caller.

There is one verdict for each test, in order. Each has a MAC. The caller generates a random key for each judgement and passes it to the
tests' process only. A verdict that has a wrong MAC, is out of order, or repeats an earlier one invalidates all verdicts.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets

_MAC_BYTES = 32
_MAX_VERDICT_BYTES = 1 << 13
_MAX_ERROR_LENGTH = 500


def read_frame(descriptor: int, max_bytes: int = 1 << 32) -> bytes | None:
    """The next message; None if the stream has ended. Raises ValueError for a message of more than `max_bytes` bytes."""
    header = _read_exactly(descriptor, 4)
    if header is None:
        return None
    length = int.from_bytes(header, "big")
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes")
    return _read_exactly(descriptor, length)


def write_frame(descriptor: int, message: bytes) -> None:
    """Write a message. Raises OSError if the other end is closed."""
    remaining = memoryview(len(message).to_bytes(4, "big") + message)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def _read_exactly(descriptor: int, length: int) -> bytes | None:
    chunks = []
    while length:
        chunk = os.read(descriptor, min(length, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def new_key() -> str:
    return secrets.token_hex(_MAC_BYTES)


class VerdictWriter:
    """Writes the verdicts, in the tests' process."""

    def __init__(self, descriptor: int, key: str) -> None:
        self._descriptor, self._key, self._count = descriptor, bytes.fromhex(key), 0

    def write(self, error: str) -> None:
        """Report the result of the next test: `error` is empty if it passed."""
        verdict = json.dumps(error[:_MAX_ERROR_LENGTH]).encode()
        write_frame(self._descriptor, _mac(self._key, self._count, verdict) + verdict)
        self._count += 1


class VerdictReader:
    """Reads the verdicts, in the caller. `failures`: why each test failed, None if it passed. `forged`: whether a verdict was invalid."""

    def __init__(self, key: str, count: int) -> None:
        self.failures: list[str | None] = []
        self.forged = False
        self._key, self._count = bytes.fromhex(key), count
        self._stream = bytearray()

    def feed(self, data: bytes) -> None:
        """Process received bytes."""
        self._stream.extend(data)
        while not self.forged and len(self._stream) >= 4:
            end = 4 + int.from_bytes(self._stream[:4], "big")
            if end > _MAX_VERDICT_BYTES:
                self.forged = True
            elif len(self._stream) >= end:
                self._verify(bytes(self._stream[4:end]))
                del self._stream[:end]
            else:
                break

    def _verify(self, frame: bytes) -> None:
        mac, verdict = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        index = len(self.failures)
        if index >= self._count or not hmac.compare_digest(mac, _mac(self._key, index, verdict)):
            self.forged = True
            return
        self.failures.append(json.loads(verdict) or None)


def _mac(key: bytes, index: int, verdict: bytes) -> bytes:
    return hashlib.blake2b(index.to_bytes(8, "big") + verdict, key=key, digest_size=_MAC_BYTES).digest()
