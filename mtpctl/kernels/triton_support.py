"""Imports Triton. Without Triton, provides a stand-in with which kernels can be defined but not launched."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on a CPU."""

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:

    class _Missing:
        """Accepts every decorator and constant of a kernel's definition; launching a kernel raises ImportError."""

        def __getattr__(self, name: str) -> _Missing:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> _Missing:
            return self

        def __getitem__(self, grid: Any) -> _Missing:
            raise ImportError("Triton is not installed")

    triton = tl = TensorDescriptor = _Missing()

__all__ = ["INTERPRETED", "TensorDescriptor", "on_device_of", "tl", "triton"]


_UNCHANGED = contextlib.nullcontext()


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's device the current one; Triton launches kernels there."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else _UNCHANGED
