"""Patches of megatron-core 0.19.2. Importing this module imports neither torch nor megatron-core."""

from __future__ import annotations

import functools
import importlib
import io
import queue
import sys
from collections.abc import Buffer, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from mtpctl.compat import replace_temporarily, require_release

if TYPE_CHECKING:
    from torch import Tensor, nn

RELEASE = "0.19.2"
_PACKAGE = "megatron.core"
_WRITER_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"

# ------------------------------------------------------------------------------------- import without torch's compiler


def skip_compilation() -> None:
    """Make megatron-core's import skip `torch.compile` if there is no GPU. Idempotent.

    megatron-core decorates about fifty small functions with `torch.compile`, so its import loads torch's compiler, which takes seconds in
    every trainer and log-prob process. On a CPU, the first call of each function would also wait for a C++ compiler.
    """
    if _PACKAGE not in sys.modules and not any(isinstance(finder, _CompileHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CompileHook())


class _CompileHook(MetaPathFinder):
    """Import hook that replaces `torch.compile` immediately before megatron-core is imported. It finds no module itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == _PACKAGE:
            sys.meta_path.remove(self)
            import torch

            if not torch.cuda.is_available():
                torch.compile = _skip_for_megatron(torch.compile)
        return None


def _skip_for_megatron(torch_compile: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that returns megatron-core's functions unchanged, and compiles all others."""

    @functools.wraps(torch_compile)
    def compile_or_not(model: Any = None, **options: Any) -> Any:
        if not sys._getframe(1).f_globals["__name__"].startswith("megatron."):
            return torch_compile(model, **options)
        return (lambda function: function) if model is None else model

    return compile_or_not


# ------------------------------------------------------------------------------------------------------------- modules


def without_flash_linear_attention() -> AbstractContextManager[None]:
    """Within the block, allow gated delta nets to be constructed without flash-linear-attention.

    Their constructor requires the package, but only their forward pass calls it, which mtpctl replaces. Raises RuntimeError if
    megatron-core no longer has this check.
    """
    error_message = "megatron-core's gated delta net no longer checks HAVE_FLA for flash-linear-attention"
    return replace_temporarily("megatron.core.ssm.gated_delta_net.common", "HAVE_FLA", True, error_message)


Accumulate = Callable[["Tensor", "Tensor", "Tensor"], None]
"""(buffer [out, in], grad [R, out], x [R, in]): adds the weight's gradient to its buffer."""


class _GradientAccumulator:
    """Replaces Apex's library, with the function that megatron-core calls."""

    def __init__(self, accumulate: Accumulate) -> None:
        self._accumulate = accumulate

    def wgrad_gemm_accum_fp32(self, x: Tensor, grad: Tensor, buffer: Tensor) -> None:
        self._accumulate(buffer, grad, x)


def fuse_gradient_accumulation(modules: Sequence[nn.Module], accumulate: Accumulate) -> None:
    """Make linear layers call `accumulate` in their backward pass, for weights with a `main_grad`.

    megatron-core uses a compiled library of Apex for this, which is rarely installed. Without it, the gradient is first computed in the
    weight's precision, and a hook then adds it to the fp32 buffer. Raises RuntimeError if the layers no longer look for Apex's library.
    """
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    if not hasattr(layers, "_grad_accum_fusion_available") or any(
        not hasattr(module, "gradient_accumulation_fusion") for module in modules
    ):
        raise RuntimeError("megatron-core's linear layers no longer use Apex's library for weight gradients")
    vars(layers)["fused_weight_gradient_mlp_cuda"] = _GradientAccumulator(accumulate)
    for module in modules:
        vars(module)["gradient_accumulation_fusion"] = True


ROUTER_UPDATE_FUNCTIONS = ("reset_model_temporary_tensors", "_update_router_expert_bias")


@contextmanager
def without_router_updates() -> Iterator[None]:
    """Make `finalize_model_grads` skip its two searches for routers within the block. Raises RuntimeError if one of them has been renamed.

    Upstream searches every module of the model for counters to reset and biases to update. It would find none: mtpctl's routers store their
    counts elsewhere (`mtpctl.model.router`), and the trainer updates their biases. With hundreds of experts per layer, a search takes more
    time on the host than a layer takes on the GPU.
    """
    with ExitStack() as stack:
        for name in ROUTER_UPDATE_FUNCTIONS:
            error_message = f"megatron-core no longer updates routers by {name}"
            stack.enter_context(
                replace_temporarily("megatron.core.distributed.finalize_model_grads", name, lambda *_, **__: None, error_message)
            )
        yield


# --------------------------------------------------------------------------------------------------- checkpoint writer


def use_local_queue() -> None:
    """Give megatron-core's checkpoint writer a local result queue. Raises RuntimeError if upstream stores its queue elsewhere.

    Upstream's queue lives in a manager process that is spawned at the first save. Spawning imports the caller's main module again, which
    fails in a Ray actor or a notebook. mtpctl's writer runs in threads of this process, so a plain queue is sufficient.
    """
    module = vars(importlib.import_module(_WRITER_MODULE))
    if "_results_queue" not in module or "get_write_results_queue" not in module:
        raise RuntimeError("megatron-core's checkpoint writer no longer keeps its result queue in filesystem_async._results_queue")
    if module["_results_queue"] is None:
        module["_results_queue"] = queue.Queue()


def discard_results() -> None:
    """Discard the results of a save that failed on another rank."""
    results = vars(importlib.import_module(_WRITER_MODULE))["_results_queue"]
    while not results.empty():
        results.get()


_MIN_THREADED_BYTES = 1 << 20
"""Minimum size of a buffer whose checksum is computed in another thread, in bytes."""


class RunningChecksum[E](Protocol):
    """An incremental checksum; `entry` returns its result."""

    def update(self, data: Buffer) -> None: ...

    @property
    def entry(self) -> E: ...


class _ChecksumOpener[E]:
    """Replaces `open` for writing, and stores the entries of closed files until `take_checksums` removes them."""

    def __init__(self, checksum: type[RunningChecksum[E]]) -> None:
        self.checksum = checksum
        self.entries: dict[str, E] = {}

    def __call__(self, path: str, mode: str) -> _ChecksumFile[E]:
        assert mode == "wb", f"megatron-core opens {path} with mode {mode}"
        return _ChecksumFile(path, self)


class _ChecksumFile[E](io.BufferedWriter):
    """A file that computes its checksum. Large buffers are hashed in another thread while they are written."""

    def __init__(self, path: str, files: _ChecksumOpener[E]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._path, self._files, self._checksum = path, files, files.checksum()
        self._thread = ThreadPoolExecutor(1, "checksum")

    def write(self, data: Buffer) -> int:
        if memoryview(data).nbytes < _MIN_THREADED_BYTES:
            self._checksum.update(data)
            return super().write(data)
        update = self._thread.submit(self._checksum.update, data)
        try:
            return super().write(data)
        finally:
            update.result()  # The caller may reuse the buffer after this call.

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._thread.shutdown()
            self._files.entries[self._path] = self._checksum.entry


def compute_checksums[E](checksum: type[RunningChecksum[E]]) -> None:
    """Compute checksums of shards while megatron-core writes them, which saves reading them again. Idempotent.

    Replaces the name `open` in the writer's module. Raises RuntimeError for another release.
    """
    require_release("megatron-core", RELEASE, __name__)
    module = vars(importlib.import_module(_WRITER_MODULE))
    if not isinstance(module.get("open"), _ChecksumOpener):
        module["open"] = _ChecksumOpener(checksum)


def take_checksums(paths: Iterable[str]) -> dict[str, object]:
    """Return and remove the entries of these files. Files without an entry are skipped."""
    entries = vars(importlib.import_module(_WRITER_MODULE))["open"].entries
    return {path: entry for path in paths if (entry := entries.pop(path, None)) is not None}
