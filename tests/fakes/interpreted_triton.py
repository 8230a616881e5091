"""Triton's interpreter in place of the Triton that vLLM switches off without a GPU.

TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType

import triton
import triton.language as tl


class LibDevice:
    """The function of CUDA's library that vLLM's verification kernels use, which the interpreter does not have."""

    @staticmethod
    @triton.jit
    def log1p(x):  # type: ignore[no-untyped-def]
        return tl.log(1.0 + x)


def install() -> None:
    """Make vLLM import what it imports on a GPU. Call it before any module of vLLM that uses Triton is imported."""
    import vllm.triton_utils

    module = ModuleType("vllm.triton_utils")
    vars(module).update(vars(vllm.triton_utils))
    vars(module).update(HAS_TRITON=True, triton=triton, tl=tl, tldevice=LibDevice, aggregate=lambda cls: cls)
    sys.modules["vllm.triton_utils"] = module
