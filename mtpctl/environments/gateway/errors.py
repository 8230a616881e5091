"""The error of a request that the endpoint does not answer."""

from __future__ import annotations

from mtpctl.errors import MtpctlError

OVER_BUDGET, OVER_CONTEXT = "budget_exceeded", "context_length_exceeded"
"""Error codes of requests that exceed the budget of a trajectory."""


class RequestInvalid(MtpctlError):
    """A request that cannot be answered. `code`: the reason, for programs; `status`: the HTTP status."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status
