"""How the fake model writes tool calls, and the sampled tokens of a trajectory."""

from __future__ import annotations

from typing import Any

from mtpctl.samples import Sample


def reader(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """Calls are `CALL name arguments` in this form."""
    before, mark, call = text.partition("CALL ")
    name, _, arguments = call.partition(" ")
    return (before, [(name, arguments)]) if mark else (text, [])


def sampled(sample: Sample) -> list[int]:
    return [token for token, retained in zip(sample.response_ids, sample.loss_mask, strict=True) if retained]
