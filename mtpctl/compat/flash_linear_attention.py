"""Build megatron-core's gated delta net where flash-linear-attention is not installed.

Its constructor refuses without that package, though only its forward pass calls it; mtpctl has a forward pass of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_required() -> Iterator[None]:
    """Let the constructor pass inside the block. Raises RuntimeError where upstream no longer checks in that way."""
    module = vars(importlib.import_module("megatron.core.ssm.gated_delta_net.common"))
    if "HAVE_FLA" not in module:
        raise RuntimeError("megatron-core's gated delta net no longer tells by HAVE_FLA whether flash-linear-attention is there")
    found = module["HAVE_FLA"]
    module["HAVE_FLA"] = True
    try:
        yield
    finally:
        module["HAVE_FLA"] = found
