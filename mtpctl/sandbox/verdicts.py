"""Authenticated verdicts from the tests' process to the caller: one for each test, in order, each with a MAC.

The caller draws a random key for each judgement and passes it to the tests' process only. A verdict that has a wrong MAC, is out of order,
or repeats an earlier one invalidates all verdicts.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets

from mtpctl.sandbox.frames import write_frame

_CODE_BYTES = 32
_LARGEST = 1 << 13
_LONGEST_ERROR = 500


def new_key() -> str:
    """A key for one judgement."""
    return secrets.token_hex(_CODE_BYTES)


class VerdictWriter:
    """The end in the tests' process."""

    def __init__(self, descriptor: int, key: str) -> None:
        self._descriptor, self._key, self._count = descriptor, bytes.fromhex(key), 0

    def write(self, error: str) -> None:
        """Report the next test: `error` is empty if it passed."""
        verdict = json.dumps(error[:_LONGEST_ERROR]).encode()
        write_frame(self._descriptor, _code(self._key, self._count, verdict) + verdict)
        self._count += 1


class VerdictReader:
    """The caller's end. `failures`: for each test so far None, or why it failed. `forged`: whether a verdict was not authentic."""

    def __init__(self, key: str, count: int) -> None:
        self.failures: list[str | None] = []
        self.forged = False
        self._key, self._count = bytes.fromhex(key), count
        self._stream = bytearray()

    def feed(self, piece: bytes) -> None:
        """Process received bytes."""
        self._stream.extend(piece)
        while not self.forged and len(self._stream) >= 4:
            end = 4 + int.from_bytes(self._stream[:4], "big")
            if end > _LARGEST:
                self.forged = True
            elif len(self._stream) >= end:
                self._accept(bytes(self._stream[4:end]))
                del self._stream[:end]
            else:
                break

    def _accept(self, frame: bytes) -> None:
        code, verdict = frame[:_CODE_BYTES], frame[_CODE_BYTES:]
        number = len(self.failures)
        if number >= self._count or not hmac.compare_digest(code, _code(self._key, number, verdict)):
            self.forged = True
            return
        self.failures.append(json.loads(verdict) or None)


def _code(key: bytes, number: int, verdict: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big") + verdict, key=key, digest_size=_CODE_BYTES).digest()
