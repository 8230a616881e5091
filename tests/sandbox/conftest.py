"""A sandbox of each kind of walls that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mtpctl.errors import EnvironmentMissing
from mtpctl.sandbox.sandbox import Sandbox
from mtpctl.sandbox.walls import ORDER, Walls


@pytest.fixture(scope="module", params=ORDER)
def walls(request: pytest.FixtureRequest) -> Walls:
    kind: Walls = request.param
    return kind


@pytest.fixture(scope="module")
def sandbox(walls: Walls) -> Iterator[Sandbox]:
    """One of these walls; where they cannot be had, the test is skipped with the reason."""
    with Sandbox(only=walls) as made:
        try:
            made.walls()
        except EnvironmentMissing as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture(scope="module")
def best() -> Iterator[Sandbox]:
    """The best walls that this machine has."""
    with Sandbox() as made:
        made.walls()
        yield made
