"""Build megatron-core's gated delta net where flash-linear-attention is not installed.

Its constructor refuses without that package, though only its forward pass calls it; mtpctl has a forward pass of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from mtpctl.compat.replaced import replaced


def not_required() -> AbstractContextManager[None]:
    """Let the constructor pass inside the block. Raises RuntimeError where upstream no longer checks in that way."""
    moved = "megatron-core's gated delta net no longer tells by HAVE_FLA whether flash-linear-attention is there"
    return replaced("megatron.core.ssm.gated_delta_net.common", "HAVE_FLA", True, moved)
