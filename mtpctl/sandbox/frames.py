"""Messages on a stream, each behind its length in four bytes."""

from __future__ import annotations

import os


def read_frame(descriptor: int, largest: int = 1 << 32) -> bytes | None:
    """The next message; None if the stream has ended. Raises ValueError for a message of more than `largest` bytes."""
    head = _read(descriptor, 4)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > largest:
        raise ValueError(f"a message of {length} bytes")
    return _read(descriptor, length)


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
