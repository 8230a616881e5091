"""Asynchronous tests without a plugin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an asynchronous test with a deadline."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run
