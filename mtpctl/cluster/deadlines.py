"""Waiting for actors: every wait ends, and says for whom it waited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from mtpctl.errors import MtpctlError, RuntimeFailure


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
        raise RuntimeFailure(f"{what}: {told(error)}") from error
    except ray.exceptions.RayError as error:
        raise RuntimeFailure(f"{what}: {told(error)}") from error


def told(error: BaseException) -> str:
    """An error in one line: its kind and the first line of its message; of one that an actor raised, the actor's own."""
    cause = getattr(error, "cause", None)  # Ray's wrapper carries the traceback in its message.
    shown = cause if isinstance(cause, BaseException) else error
    lines = [line.strip() for line in str(shown).splitlines() if line.strip()]
    return f"{type(shown).__name__}: {lines[0] if lines else 'no message'}"
