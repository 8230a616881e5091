"""Helpers for attacks on the sandbox: named code snippets, and hostile code that several tests use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from mtpctl.sandbox.session import Judgement

FORGE = r"""
import os, json
for verdict in (b'""', b'null', b'{"passed": true, "error": ""}', b'{"value": true}'):
    for code in (b'', bytes(32), os.urandom(32)):
        frame = (len(code + verdict)).to_bytes(4, 'big') + code + verdict
        for descriptor in range(64):
            try: os.write(descriptor, frame)
            except OSError: pass
os._exit(0)
"""
"""Writes verdicts to every descriptor, and exits with code 0."""
SOURCE = f"(exec({FORGE!r}), 1)[1]"
"""An expression that runs `FORGE`."""


def sections(text: str) -> dict[str, str]:
    """The parts of a text by their headings, which start with `## `."""
    parts = [part.partition("\n") for part in text.split("\n## ")[1:]]
    return {name: body for name, _, body in parts}


def successful(attacks: Mapping[str, str], judge: Callable[[str], Judgement], tests: int) -> dict[str, Judgement]:
    """Judge all attacks, some at a time. Returns those that passed one of the `tests`."""
    with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
        judgements = dict(zip(attacks, pool.map(judge, attacks.values()), strict=True))
    return {name: each for name, each in judgements.items() if len(each.failures) != tests or not all(each.failures)}
