"""The controller's process trains nothing: importing it brings neither torch nor an engine along."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import mtpctl.controller

MODULES = [f"mtpctl.controller.{module.name}" for module in pkgutil.iter_modules(mtpctl.controller.__path__)]
HEAVY = {"torch", "vllm", "sglang", "megatron", "transformers"}
PROGRAM = """
import importlib, json, sys
loaded = {}
for module in sys.argv[1:]:
    importlib.import_module(module)
    loaded[module] = sorted({name.partition('.')[0] for name in sys.modules})
print(json.dumps(loaded))
"""
"""Imports modules one after another, and prints the packages that are loaded after each."""


def test_checked_modules_include_the_controller() -> None:
    assert {"mtpctl.controller.rl", "mtpctl.controller.run", "mtpctl.controller.buffer"} <= set(MODULES)


def test_controller_modules_import_no_heavy_package() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *MODULES], capture_output=True, text=True, timeout=120, check=True)
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    assert list(loaded) == MODULES and "mtpctl" in loaded[MODULES[0]]
    heavy = {module: HEAVY.intersection(packages) for module, packages in loaded.items()}
    assert not any(heavy.values()), "the first of them imports it"
