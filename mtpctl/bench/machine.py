"""What a measurement ran on, as every bench prints and keeps it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mtpctl.telemetry.versions import collect_versions


def machine(versions: dict[str, Any] | None = None) -> dict[str, Any]:
    """Cards (`NVIDIA H200 x 2`), or the processor's cores where there is none, with the versions of what was measured.

    `versions`: of a run (`versions.json`) in place of this process's.
    """
    found = versions or collect_versions()
    cards = found["machine"].get("cards", [])
    kinds = [f"{kind} x {cards.count(kind)}" for kind in dict.fromkeys(cards)]
    # Runs of earlier days did not tell of their cards.
    processor = "CPU" if "cards" in found["machine"] else "cards not recorded"
    return {"device": ", ".join(kinds) or f"{processor}, {found['machine']['cores']} cores", "python": found["python"], **found["packages"]}


def machines(versions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs: what they agree on, and where they do not, all that there was."""
    found = [machine(each) for each in versions]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: " / ".join(dict.fromkeys(str(each.get(name, "none")) for each in found)) for name in names}


def visible_cards(cards: Sequence[int]) -> str:
    """`CUDA_VISIBLE_DEVICES` of a process that is to see these of the cards that this one may see."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = mine.split(",") if mine else [str(i) for i in range(max(cards) + 1)]
    return ",".join(names[i] for i in cards)


def told(environment: dict[str, Any]) -> str:
    """In a line."""
    return " · ".join([environment["device"], *(f"{name} {value}" for name, value in environment.items() if name != "device")])
