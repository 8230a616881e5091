"""Let megatron-core run without CUDA: where it asks for the current CUDA device, it gets the CPU.

megatron-core asks for `torch.cuda.current_device()` and `device="cuda"` in some eighty places that have nothing to do
with CUDA itself (RoPE tables, gradient norms, loss scales, rank-to-rank buffers). On a machine without a card every
one of them fails. `install()` makes them return the CPU. It does nothing where a card exists, so that a CUDA run never
has a stand-in.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "zeros_like", "empty_like", "ones_like")
_installed = False


def _is_cuda(device: object) -> bool:
    return isinstance(device, int | str | torch.device) and (isinstance(device, int) or torch.device(device).type == "cuda")


def _on_cpu[**P, T](factory: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(factory)
    def create(*args: P.args, **kwargs: P.kwargs) -> T:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _module_to_cpu(self: torch.nn.Module, device: object = None) -> torch.nn.Module:
    return self


def _tensor_to_cpu(self: torch.Tensor, device: object = None, non_blocking: bool = False, **_: object) -> torch.Tensor:
    return self


class _NoStream:
    """Stands in for a CUDA stream or event: work on a CPU is already in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _NoStream:
        return self

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _move_split_sizes() -> None:
    """Make expert parallelism read split sizes on the CPU as numpy arrays. megatron-core leaves them tensors there, which gloo refuses."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = vars(dispatcher).get("maybe_move_tensor_to_cpu")
    if move is None:
        raise RuntimeError("megatron-core's token dispatcher no longer moves split sizes by maybe_move_tensor_to_cpu")

    @functools.wraps(move)
    def moved(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    vars(dispatcher)["maybe_move_tensor_to_cpu"] = moved
    # The first dispatcher of a process makes this stream; by then other code may have replaced `torch.cuda.Stream`.
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoStream()


def _forget_cuda_random_state() -> None:
    """Replace the card's random state, which recomputed activations restore, by an empty one; nothing draws from it."""
    random = vars(importlib.import_module("megatron.core.tensor_parallel.random"))
    if not {"_get_cuda_rng_state", "_set_cuda_rng_state"} <= random.keys():
        raise RuntimeError("megatron-core's recomputation no longer keeps the card's random state by _get_cuda_rng_state")
    random["_get_cuda_rng_state"] = lambda *_, **__: torch.empty(0, dtype=torch.uint8)
    random["_set_cuda_rng_state"] = lambda *_, **__: None


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Give CPU tensors the type names of CUDA tensors, by which megatron-core's optimizers tell precisions apart."""
    if torch.cuda.is_available():
        yield
        return
    plain = torch.Tensor.type

    def named(self: torch.Tensor, dtype: str | torch.dtype | None = None, non_blocking: bool = False) -> str | torch.Tensor:
        if dtype is None:
            return plain(self).replace("torch.", "torch.cuda.", 1)
        return plain(self, dtype, non_blocking)

    torch.Tensor.type = named  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = plain  # type: ignore[method-assign]


def install() -> bool:
    """Install the stand-ins where CUDA is absent. Returns whether they are installed. May be called again."""
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    vars(torch.cuda).update(
        current_device=lambda: torch.device("cpu"),
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        current_stream=lambda device=None: _NoStream(),
        default_stream=lambda device=None: _NoStream(),
        Stream=_NoStream,
        Event=_NoStream,
        stream=lambda stream: _NoStream(),
        empty_cache=lambda: None,
    )
    torch.Tensor.cuda = _tensor_to_cpu  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign, assignment, return-value]
    torch.nn.Module.cuda = _module_to_cpu  # type: ignore[method-assign, assignment]
    _move_split_sizes()
    _forget_cuda_random_state()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _installed = True
    return True
