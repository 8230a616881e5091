"""Python's own `gc.freeze`. `conftest.py`, which imports this first, replaces the one that vLLM calls."""

from gc import freeze

__all__ = ["freeze"]
