"""The base class of recipe sections, and the types of their fields."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from mtpctl.user_code import is_reference


class Beside:
    """Marks a key that may name a file: one that lies beside the recipe file that names it is found there, by `loading`."""


BESIDE = Beside()


def _number(value: object) -> object:
    """Refuse `true` and `false`, which Python takes for 1 and 0."""
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
HomePath = Annotated[str, AfterValidator(os.path.expanduser), BESIDE]
"""A path, or a hub id. A leading `~` is replaced, when the recipe is loaded, by the home of the user who loads it."""


def known_or_own(value: str, names: tuple[str, ...]) -> str:
    """Validate a key that takes one of `names`, or code of the user's own as `FILE.py:NAME` or `MODULE:NAME`."""
    if value in names:
        return value
    if not is_reference(value):
        near = difflib.get_close_matches(value, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"must be {', '.join(names)}, or FILE.py:NAME or MODULE:NAME, got {value!r}{hint}")
    source, _, name = value.rpartition(":")
    return f"{os.path.expanduser(source)}:{name}"


class Section(BaseModel):
    """Base of all sections: an unknown key is an error, and so is a value of another type."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


Complaints = Iterator[str]
"""The result of a check: one line for each mistake, which begins with the recipe field and ends with what to set instead."""


def fitting(count: int) -> str:
    """The divisors of `count`, as text for a message."""
    return listed([n for n in range(1, count + 1) if count % n == 0])


def listed(numbers: list[int]) -> str:
    """Up to eight numbers, as text for a message."""
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
