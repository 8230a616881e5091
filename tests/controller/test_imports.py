"""The controller's process trains nothing: importing it brings neither torch nor an engine along."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import mtpctl.controller

MODULES = [f"mtpctl.controller.{module.name}" for module in pkgutil.iter_modules(mtpctl.controller.__path__)]
HEAVY = {"torch", "vllm", "sglang", "megatron", "transformers"}
PROGRAM = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sorted({name.partition('.')[0] for name in sys.modules}))"


def test_modules_are_found() -> None:
    assert {"mtpctl.controller.rl", "mtpctl.controller.launch", "mtpctl.controller.buffer"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_controller_module_imports_no_heavy_package(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, timeout=120, check=True)
    result = set(done.stdout.split())
    assert "mtpctl" in result
    assert not HEAVY & result
