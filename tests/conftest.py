"""For all tests."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is; what hangs is pytest-timeout's business.
settings.register_profile("mtpctl", deadline=None)
settings.load_profile("mtpctl")


def pytest_configure(config: pytest.Config) -> None:
    """Keep bytecode in pytest's cache where the environment writes none and its packages came without.

    Tests start dozens of processes that import torch, Megatron or vLLM, and each would compile them anew, which is half of its start.
    """
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.cached is None or Path(torch.cached).exists():
        return
    kept = str(config.cache.mkdir("bytecode")) if config.cache else None
    if kept is None:
        return
    sys.dont_write_bytecode, sys.pycache_prefix = False, kept
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = kept
