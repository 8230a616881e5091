"""Imports Triton, and launches its kernels. Without Triton, provides a stand-in with which kernels can be defined but not launched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
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

__all__ = ["INTERPRETED", "TensorDescriptor", "launcher", "on_device_of", "tl", "triton"]

DIRECT_LAUNCH_VERSION = "3.7.1"
"""The release of Triton whose internals `launcher` uses. With other releases it returns Triton's public function."""
_IS_DIRECT = not INTERPRETED and getattr(triton, "__version__", None) == DIRECT_LAUNCH_VERSION
_compiled: dict[tuple[Any, ...], Any] = {}


_UNCHANGED = contextlib.nullcontext()


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's device the current one; Triton launches kernels there."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else _UNCHANGED


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """A function that launches `kernel` on `grid` with about half of Triton's work on the host.

    That work limits models with many small kernels. Compiled kernels are cached by device and by everything for which Triton specializes
    a kernel: types, alignment of pointers, divisibility of integers, constants and options, as Triton's binder returns them. Unlike
    `kernel[grid]`, a launch after the first builds no string from these as a cache key, does not check global variables, and does not call
    profilers' hooks.
    """
    # torch.compile recognizes only the public function.
    return kernel[grid] if not _IS_DIRECT or torch.compiler.is_compiling() else partial(_launch, kernel, grid)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    arguments, specialization, options = kernel.device_caches[device][4](*args, **kwargs)  # the binder
    key = (id(kernel), device, *specialization, *options.items())
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **kwargs)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.get_current_stream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments.values())
