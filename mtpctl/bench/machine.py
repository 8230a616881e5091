"""What a measurement ran on, as every bench prints and keeps it."""

from __future__ import annotations

from typing import Any

from mtpctl.telemetry.versions import collect_versions


def machine() -> dict[str, Any]:
    """Cards (`NVIDIA H200 x 2`), or the processor's cores where there is none, with the versions of what was measured."""
    import torch

    found = collect_versions()
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    kinds = [f"{kind} x {cards.count(kind)}" for kind in dict.fromkeys(cards)]
    return {"device": ", ".join(kinds) or f"CPU, {found['machine']['cores']} cores", "python": found["python"], **found["packages"]}


def told(environment: dict[str, Any]) -> str:
    """In a line."""
    return " · ".join([environment["device"], *(f"{name} {value}" for name, value in environment.items() if name != "device")])
