"""Is this machine fit to run: the pinned stack, devices, kernels, transports, Ray, and one round of sample and score.

Needs no torch: whatever imports a heavy package runs in a process of its own, with a deadline (`part`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.bench.doctor.examination import Check, Diagnosis, examine

__all__ = ["Check", "Diagnosis", "examine"]


def __getattr__(name: str) -> Any:
    """Import on first use: a part runs as a program of its own, and must not have been imported before."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mtpctl.bench.doctor import examination

    return getattr(examination, name)
