"""Run megatron-core without CUDA: `torch.cuda` returns the CPU as the current device.

megatron-core calls `torch.cuda.current_device()` or passes `device="cuda"` in about eighty lines that are not specific to CUDA (RoPE
tables, gradient norms, loss scales, communication buffers), all of which fail without a GPU. `install` does nothing if there is a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from mtpctl.compat import replace_temporarily

_TENSOR_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "zeros_like",
    "empty_like",
    "ones_like",
)
_installed = False


def _is_cuda(device: object) -> bool:
    return isinstance(device, int | str | torch.device) and (isinstance(device, int) or torch.device(device).type == "cuda")


def _redirect_to_cpu[**P, T](factory: Callable[P, T]) -> Callable[P, T]:
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


class _NoOpStream:
    """Replaces CUDA streams and events with no-ops: work on a CPU already runs in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _NoOpStream:
        return self

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> _NoOpStream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _patch_split_sizes() -> None:
    """Pass split sizes of expert parallelism as numpy arrays on the CPU. megatron-core leaves them as tensors, which gloo rejects."""
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = vars(dispatcher).get("maybe_move_tensor_to_cpu")
    if move is None:
        raise RuntimeError("megatron-core's token dispatcher no longer moves split sizes by maybe_move_tensor_to_cpu")

    @functools.wraps(move)
    def to_numpy(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    vars(dispatcher)["maybe_move_tensor_to_cpu"] = to_numpy
    # The first dispatcher of a process would create this stream. By then other code may have replaced `torch.cuda.Stream`.
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoOpStream()


def _patch_random_state() -> None:
    """Replace the GPU's random state, which activation recomputation saves and restores, by an empty one. CPUs do not use it."""
    random = vars(importlib.import_module("megatron.core.tensor_parallel.random"))
    if not {"_get_cuda_rng_state", "_set_cuda_rng_state"} <= random.keys():
        raise RuntimeError("megatron-core's recomputation no longer stores the GPU's random state by _get_cuda_rng_state")
    random["_get_cuda_rng_state"] = lambda *_, **__: torch.empty(0, dtype=torch.uint8)
    random["_set_cuda_rng_state"] = lambda *_, **__: None


@contextmanager
def share_single_rank_groups() -> Iterator[None]:
    """Within the block, make megatron-core use one gloo group for all purposes of a single rank. Does nothing if there is a GPU.

    megatron-core creates about thirty groups. Each has threads, which gloo wakes a hundred times a second, and which take 10 ms to end. A
    collective of one rank never waits, so all purposes can share a group. Raises RuntimeError if megatron-core has renamed `create_group`.
    """
    if torch.cuda.is_available():
        yield
        return
    state = importlib.import_module("megatron.core.parallel_state")
    create, groups = getattr(state, "create_group", None), {}

    def create_group(ranks: Sequence[int], **options: object) -> object:
        assert create is not None
        if len(ranks) > 1:
            return create(ranks, **options)
        if tuple(ranks) not in groups:
            groups[tuple(ranks)] = create(ranks, **options)
        return groups[tuple(ranks)]

    with replace_temporarily(state.__name__, "create_group", create_group, "megatron-core no longer creates its groups by create_group"):
        yield


@contextmanager
def use_cuda_type_names() -> Iterator[None]:
    """Within the block, give CPU tensors the type names of CUDA tensors, by which megatron-core's optimizers distinguish precisions."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: str | torch.dtype | None = None, non_blocking: bool = False) -> str | torch.Tensor:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, non_blocking)

    torch.Tensor.type = type_name  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def install() -> None:
    """Install the replacements if CUDA is not available. Idempotent."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    vars(torch.cuda).update(
        current_device=lambda: torch.device("cpu"),
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        current_stream=lambda device=None: _NoOpStream(),
        default_stream=lambda device=None: _NoOpStream(),
        Stream=_NoOpStream,
        Event=_NoOpStream,
        stream=lambda stream: _NoOpStream(),
        empty_cache=lambda: None,
    )
    torch.Tensor.cuda = _tensor_to_cpu  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign, assignment, return-value]
    torch.nn.Module.cuda = _module_to_cpu  # type: ignore[method-assign, assignment]
    _patch_split_sizes()
    _patch_random_state()
    # `with torch.device(…)` changes a fixed list of functions, which torch collects at the first such block. It must collect the original
    # factories, because the replacements call them.
    with torch.device("meta"):
        torch.empty(0)
    for name in _TENSOR_FACTORIES:
        setattr(torch, name, _redirect_to_cpu(getattr(torch, name)))
    _installed = True
