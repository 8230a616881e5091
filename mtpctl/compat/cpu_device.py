"""Let megatron-core run where there is no CUDA: its calls for the current CUDA device get the CPU.

megatron-core asks for `torch.cuda.current_device()` and `device="cuda"` in some eighty places that have nothing to do
with CUDA itself (RoPE tables, gradient norms, loss scales, rank-to-rank buffers). On a machine without a card every
one of them fails. `install()` answers them with the CPU, and does nothing where a card exists, so that a CUDA run never
sees a stand-in.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "zeros_like", "empty_like", "ones_like")
_installed = False


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int | str | torch.device) and (isinstance(device, int) or torch.device(device).type == "cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _module_to_cpu(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return self


def _tensor_to_cpu(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return self


class _NoStream:
    """Stands for a CUDA stream or event: work on a CPU is in order already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _NoStream:
        return self

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _move_split_sizes() -> None:
    """Expert parallelism takes its split sizes from the card as numpy; already on the CPU they stayed tensors, which gloo refuses."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = vars(dispatcher).get("maybe_move_tensor_to_cpu")
    if move is None:
        raise RuntimeError("megatron-core's token dispatcher no longer moves split sizes by maybe_move_tensor_to_cpu")

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    vars(dispatcher)["maybe_move_tensor_to_cpu"] = moved
    # Made once a process, by whoever builds a dispatcher first; by then something else may have replaced `torch.cuda.Stream`.
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoStream()


def _forget_cuda_random_state() -> None:
    """Recomputed activations restore the card's random state; here there is none, and nothing draws from it."""
    random = vars(importlib.import_module("megatron.core.tensor_parallel.random"))
    if not {"_get_cuda_rng_state", "_set_cuda_rng_state"} <= random.keys():
        raise RuntimeError("megatron-core's recomputation no longer keeps the card's random state by _get_cuda_rng_state")
    random["_get_cuda_rng_state"] = lambda *_, **__: torch.empty(0, dtype=torch.uint8)
    random["_set_cuda_rng_state"] = lambda *_, **__: None


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Tensors on a CPU give the type names of CUDA's, by which megatron-core's optimizers tell precisions apart."""
    if torch.cuda.is_available():
        yield
        return
    plain: Any = torch.Tensor.type

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and not args and not kwargs:
            return plain(self).replace("torch.", "torch.cuda.", 1)
        return plain(self, dtype, *args, **kwargs)

    torch.Tensor.type = named  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = plain  # type: ignore[method-assign]


def install() -> bool:
    """Put the stand-ins in place where CUDA is absent. Returns whether they are in place. May be called again."""
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = cuda.default_stream = lambda device=None: _NoStream()
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = lambda stream: _NoStream()
    cuda.empty_cache = lambda: None
    torch.Tensor.cuda = _tensor_to_cpu  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign, assignment, return-value]
    torch.nn.Module.cuda = _module_to_cpu  # type: ignore[method-assign, assignment]
    _move_split_sizes()
    _forget_cuda_random_state()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _installed = True
    return True
