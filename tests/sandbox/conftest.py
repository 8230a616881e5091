"""Sandboxes with each isolation mechanism of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mtpctl.errors import PrerequisiteMissing
from mtpctl.sandbox.isolation import MECHANISMS_BY_STRENGTH, Mechanism
from mtpctl.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module", params=MECHANISMS_BY_STRENGTH)
def mechanism(request: pytest.FixtureRequest) -> Mechanism:
    parameter: Mechanism = request.param
    return parameter


@pytest.fixture(scope="module")
def sandbox(mechanism: Mechanism) -> Iterator[Sandbox]:
    """A sandbox with this mechanism. Skips the test, with the reason, if the mechanism does not work here."""
    with Sandbox(only=mechanism) as sandbox:
        try:
            sandbox.mechanism()
        except PrerequisiteMissing as error:
            pytest.skip(str(error))
        yield sandbox


@pytest.fixture(scope="module")
def best() -> Iterator[Sandbox]:
    """A sandbox with the best mechanism of this machine."""
    with Sandbox() as sandbox:
        sandbox.mechanism()
        yield sandbox
