"""Fixtures: an event loop and engines that live as long as a test module."""

from tests.fakes.engines import run as run
from tests.fakes.engines import start_engine as start_engine
