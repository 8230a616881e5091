"""Waiting for actors: every wait ends, and says for whom it waited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from mtpctl.recipe import MtpctlError, RuntimeFailure


async def within[T](waited: Awaitable[T], seconds: float, what: str) -> T:
    """The result of `waited`.

    Raises RuntimeFailure naming `what` where it takes longer than `seconds`, where its actor dies, or where it raises
    anything that does not name itself.
    """
    import ray

    async def run() -> T:
        return await waited

    try:
        return await asyncio.wait_for(run(), seconds)
    except TimeoutError as error:
        raise RuntimeFailure(f"{what}: no answer within {seconds:g} s") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MtpctlError):
            raise cause from error
        raise RuntimeFailure(f"{what}: {type(cause).__name__}: {_line(cause)}") from error
    except ray.exceptions.RayError as error:
        raise RuntimeFailure(f"{what}: {type(error).__name__}: {_line(error)}") from error


def _line(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
