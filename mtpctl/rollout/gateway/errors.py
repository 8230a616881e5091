"""The error of a request that the endpoint does not answer."""

from __future__ import annotations

from mtpctl.errors import MtpctlError

OVER_BUDGET, OVER_CONTEXT = "budget_exceeded", "context_length_exceeded"
"""Codes of refusals because a trajectory has used up what it may."""


class RequestInvalid(MtpctlError):
    """A request that cannot be answered. `code` is what a client can tell the reason by; `status` is the one of HTTP."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status
