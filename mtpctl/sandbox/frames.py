"""Messages on a stream, each behind its length in four bytes."""

from __future__ import annotations

import os


def read_frame(descriptor: int) -> bytes | None:
    """The next message; None where the stream has ended."""
    head = _read(descriptor, 4)
    return None if head is None else _read(descriptor, int.from_bytes(head, "big"))


def write_frame(descriptor: int, message: bytes) -> None:
    """Inverse of `read_frame`. Raises OSError where nobody reads."""
    left = memoryview(len(message).to_bytes(4, "big") + message)
    while left:
        left = left[os.write(descriptor, left) :]


def _read(descriptor: int, length: int) -> bytes | None:
    parts = []
    while length:
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
