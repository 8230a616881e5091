"""Fields of a Hugging Face config, read by type."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtpctl.errors import UserError
from mtpctl.families.registry import Flag


class Fields:
    """Config fields, read by type. The methods raise UserError for a field that is missing or of another type."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"model config: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default != 0):
            raise UserError(f"model config: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"model config: {key} must be a number above 0, got {value!r}")
        return float(value)

    def switch(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if value not in (None, False, True):
            raise UserError(f"model config: {key} must be true or false, got {value!r}")
        return bool(value)

    def flag(self, flag: Flag) -> bool:
        return self.switch(flag, False) if isinstance(flag, str) else flag


def mapping(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The object at `key`, empty if there is none."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"model config: {key} must be an object, got {value!r}")
    return value or {}
