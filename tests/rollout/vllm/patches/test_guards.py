"""Every patch refuses another release than the one that it was checked against, before it touches anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from vllm.platforms import current_platform

from mtpctl.rollout.vllm.patches.version import PINNED
from mtpctl.rollout.vllm.plugin import OURS

NO_PATCHES = {"assign", "draft_times", "route_requests", "route_slots", "version"}
FOR_CPUS = {"experts", "gemm", "packed", "rotary", "sampler", "seeds", "short_queries"}
PROGRAM = """
import asyncio, importlib, json, pkgutil, sys
from torch import nn
from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm import patches
from mtpctl.rollout.vllm.patches import version

version.installed = lambda: "0.33.0"
USES = {
    "derived": lambda patch: patch.refresh(nn.Module(), "float32"),
    "loop": lambda patch: patch.core_in_loop().__enter__(),
    "names": lambda patch: patch.renamer(nn.Module()),
    "pause": lambda patch: asyncio.run(patch.pause(None, "keep")),
}
said = {}
for name in {module.name for module in pkgutil.iter_modules(patches.__path__)} - set(sys.argv[1:]):
    patch = importlib.import_module(f"{patches.__name__}.{name}")
    try:
        said[name] = repr(USES.get(name, lambda patch: patch.install())(patch))
    except UpstreamMoved as moved:
        said[name] = str(moved)
print(json.dumps(said))
"""


def test_another_release_is_refused_by_every_patch() -> None:
    # In a process of its own: in this one patches may be in place, and those are not put in place again.
    outside = {name: value for name, value in os.environ.items() if name != OURS} | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", PROGRAM, *NO_PATCHES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=outside)
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() >= {"aborts", "derived", "loop", *FOR_CPUS}
    for name, answer in said.items():
        if name in FOR_CPUS and not current_platform.is_cpu():
            assert answer == "False"
        else:
            assert answer.startswith(f"mtpctl.rollout.vllm.patches.{name} was written for vLLM {PINNED}, found 0.33.0")
