"""The base class of recipe sections, and the types of their fields."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: object) -> object:
    """Reject booleans, which Python accepts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {str(value).lower()}")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a hub id. A leading `~` is expanded when the recipe is loaded."""


class Section(BaseModel):
    """Base of all sections. Unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


Complaints = Iterator[str]
"""Result of a check: one line per mistake, which begins with the recipe field and ends with the fix."""


def divisors_text(count: int) -> str:
    """The divisors of `count`, for a message."""
    return listed([n for n in range(1, count + 1) if count % n == 0])


def listed(numbers: list[int]) -> str:
    """Up to eight numbers, for a message."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
