"""What every section of the recipe is made of: strict models, and numbers that YAML's `true` is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> Any:
    """YAML's `true` is not 1."""
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
"""A path (or a hub id) in which `~` is the home of whoever loads the recipe: what reads it later need not know."""


class Section(BaseModel):
    """Base of all sections: an unknown key is an error, and so is a value of another type."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


Complaints = Iterator[str]
"""What a check yields: one line each, which begins with the field and ends with the mend."""


def fitting(count: int) -> str:
    """The divisors of `count`, for a message."""
    return listed([n for n in range(1, count + 1) if count % n == 0])


def listed(numbers: list[int]) -> str:
    """Up to eight numbers, for a message."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
