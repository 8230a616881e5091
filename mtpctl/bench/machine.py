"""The environment of a measurement, which every benchmark prints and writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mtpctl.telemetry.versions import Versions, collect_versions

Environment = dict[str, str]
"""The device of a measurement under `device`, and versions by package."""


def machine(versions: Versions | None = None) -> Environment:
    """The cards (`NVIDIA H200 x 2`), or the processor's cores where there is no card, and the versions of python and packages.

    `versions`: those of a run (`versions.json`) instead of this process's.
    """
    found = versions or collect_versions()
    host, packages = found["machine"], found["packages"]
    cards = host.get("cards", [])
    kinds = [f"{kind} x {cards.count(kind)}" for kind in dict.fromkeys(cards)]
    processor = "CPU" if "cards" in host else "cards not recorded"
    return {"device": ", ".join(kinds) or f"{processor}, {host['cores']} cores", "python": found["python"], **packages}


def machines(versions: Sequence[Versions | None]) -> Environment:
    """The environments of several runs as one; a value that differs between them lists all of them."""
    found = [machine(each) for each in versions]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: " / ".join(dict.fromkeys(str(each.get(name, "none")) for each in found)) for name in names}


def visible_cards(cards: Sequence[int]) -> str:
    """`CUDA_VISIBLE_DEVICES` of a child process that may use only these of this process's cards."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = mine.split(",") if mine else [str(i) for i in range(max(cards) + 1)]
    return ",".join(names[i] for i in cards)


def told(environment: Mapping[str, object]) -> str:
    return " · ".join([str(environment["device"]), *(f"{name} {value}" for name, value in environment.items() if name != "device")])
