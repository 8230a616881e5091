"""Checks of HTTP responses."""

from __future__ import annotations

import httpx


def assert_rejected(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in (statuses or range(400, 500)), (answer.status_code, answer.text)
    message = answer.json()["error"]["message"]
    assert message and "\n" not in message and len(message) < 500 and "Traceback" not in message
