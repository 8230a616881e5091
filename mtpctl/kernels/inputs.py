"""Arguments of the LM-head kernels: validation, row selection, and gradient buffers.

Shape legend: N rows (tokens), n selected rows, H hidden size, V vocabulary entries of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.backend import Problem, Shard, sum_shards, vocab_shard
from mtpctl.kernels.products import take_stale

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
IGNORE_INDEX = -100
"""Rows with this label are skipped: their results are 0 and they get no gradient."""
DEFAULT_WORKSPACE_BYTES = 1 << 30


class HeadOptions(TypedDict, total=False):
    """Keyword arguments that all `linear_*` functions accept.

    temperature: a number, or [N] fp32, one per token (default 1).
    group: ranks that share the vocabulary. `weight` has this rank's V of the V x world entries, in rank order. Labels index the whole
        vocabulary and are equal on all ranks, as are results. Every rank must compute the same loss. The gradient of hidden is already
        summed over ranks.
    rows: bool mask [N]. Rows outside it are skipped, like rows with the label `IGNORE_INDEX`: their results are 0 and they get no gradient.
    valid_vocab: size of the whole vocabulary if the weight is padded; later entries have probability 0.
    workspace_bytes: memory in addition to inputs, results and gradients (default 1 GiB). Logits that fit are saved for the backward pass.
    main_grad: add the weight's gradient to its Megatron buffer `main_grad`, if it has one, and set `grad_added_to_main_grad`.
    """

    temperature: float | Tensor
    group: dist.ProcessGroup | None
    rows: Tensor | None
    valid_vocab: int | None
    workspace_bytes: int | None
    main_grad: bool


@dataclass(frozen=True)
class Rows:
    """The selected rows. `index` is None if all N are selected, which avoids gathers and scatters."""

    total: int
    count: int
    index: Tensor | None

    def select(self, x: Tensor) -> Tensor:
        """[N, ...] -> selected rows [n, ...]."""
        return x if self.index is None else x.index_select(0, self.index)

    def scatter(self, x: Tensor) -> Tensor:
        """Selected rows [n, ...] -> [N, ...], zero in other rows."""
        if self.index is None:
            return x
        out = x.new_zeros(self.total, *x.shape[1:])
        out[self.index] = x
        return out


@dataclass(frozen=True)
class Call:
    """The checked arguments of a call, except its tensors."""

    shard: Shard
    rows: Rows
    temperature: float | Tensor
    workspace_bytes: int
    main_grad: bool

    def selected_inputs(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Problem:
        """The inputs of the backend: the selected rows and this rank's vocabulary entries."""
        inverse: float | Tensor
        if isinstance(self.temperature, Tensor):
            wide_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            inverse = self.rows.select(self.temperature.detach().to(wide_dtype).expand(self.rows.total).reciprocal())
        else:
            inverse = 1.0 / self.temperature
        targets = self.rows.select(labels).long() - self.shard.start
        return Problem(
            self.rows.select(hidden).contiguous(), weight, targets, inverse, self.shard.vocab_columns, self.workspace_bytes, self.shard
        )

    def partial_dtype(self, hidden: Tensor) -> torch.dtype:
        """Dtype of this rank's part of the hidden gradient: fp32 (fp64 from fp64) if it is summed over ranks, else the dtype of hidden."""
        return hidden.dtype if self.shard.world == 1 or hidden.dtype == torch.float64 else torch.float32

    def reduce_hidden_grad(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum each rank's part `local` [n, H] over vocabulary shards -> gradient of hidden [N, H]."""
        return self.rows.scatter(sum_shards(local, self.shard).to(dtype))


def prepare_call(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    rows: Tensor | None = None,
    valid_vocab: int | None = None,
    workspace_bytes: int | None = None,
    main_grad: bool = False,
) -> Call:
    """Check the arguments (see `HeadOptions`) and select the rows. Raises ValueError naming the argument."""
    _check_tensors(hidden, weight, labels)
    _check_temperature(temperature, labels)
    shard = vocab_shard(weight, group, valid_vocab)
    workspace = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    if workspace <= 0:
        raise ValueError(f"workspace_bytes: {workspace}, expected above 0")
    selected = _select_rows(hidden, labels, rows, temperature, shard)
    return Call(shard, selected, temperature, workspace, main_grad)


def _check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden: shape {tuple(hidden.shape)} has {hidden.dim()} dimensions, expected 2: [rows, hidden size]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} does not fit hidden {tuple(hidden.shape)}: expected [vocab, {hidden.shape[1]}]"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"weight: shape {tuple(weight.shape)} has no vocabulary entry, expected at least 1")
    if hidden.dtype not in FLOATS:
        raise ValueError(f"hidden: dtype {hidden.dtype}, expected one of {', '.join(map(str, FLOATS))}")
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight: dtype {weight.dtype} differs from hidden's {hidden.dtype}")
    if weight.device != hidden.device:
        raise ValueError(f"weight: on {weight.device}, hidden on {hidden.device}")
    if labels.device != hidden.device:
        raise ValueError(f"labels: on {labels.device}, hidden on {hidden.device}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels: dtype {labels.dtype}, expected torch.int64 or torch.int32")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels: shape {tuple(labels.shape)}, expected ({hidden.shape[0]},), one for each row of hidden")


def _check_temperature(temperature: float | Tensor, labels: Tensor) -> None:
    if isinstance(temperature, Tensor):
        if temperature.dim() and temperature.shape != labels.shape:
            raise ValueError(f"temperature: shape {tuple(temperature.shape)}, expected {tuple(labels.shape)}, one for each label")
        if temperature.device != labels.device:
            raise ValueError(f"temperature: on {temperature.device}, labels on {labels.device}")
    elif not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: {temperature}, expected a finite number above 0")


def _check_mask(rows: Tensor, labels: Tensor) -> None:
    if rows.device != labels.device:
        raise ValueError(f"rows: on {rows.device}, labels on {labels.device}")
    if rows.dtype != torch.bool:
        raise ValueError(f"rows: dtype {rows.dtype}, expected a bool mask")
    if rows.shape != labels.shape:
        raise ValueError(f"rows: mask of shape {tuple(rows.shape)}, expected {tuple(labels.shape)}, one for each label")


def _select_rows(hidden: Tensor, labels: Tensor, rows: Tensor | None, temperature: float | Tensor, shard: Shard) -> Rows:
    """Select the rows in the mask `rows` [N] whose label is not `IGNORE_INDEX`.

    Checks their labels and temperatures, and the hidden states of all rows. Raises ValueError. Synchronizes with the host once, and once
    again for temperatures in a tensor.
    """
    if rows is not None:
        _check_mask(rows, labels)
    total = labels.shape[0]
    if total == 0:
        return Rows(0, 0, None)
    is_selected = labels != IGNORE_INDEX if rows is None else (labels != IGNORE_INDEX) & rows
    # The sum is not finite if an element is not, or if it overflows; in the latter case `_nonfinite_error` returns None.
    wide_dtype = torch.float64 if labels.device.type == "cpu" else torch.float32
    finite_sum = torch.isfinite(hidden.detach().sum(dtype=wide_dtype))
    selected_labels = torch.where(is_selected, labels, 0)  # 0 is a valid label, so minimum and maximum are those of the selected labels
    count, min_label, max_label, finite = torch.stack(
        [is_selected.sum(), *(x.long() for x in (*selected_labels.aminmax(), finite_sum))]
    ).tolist()
    if min_label < 0 or max_label >= shard.total:
        raise ValueError(
            f"labels: {min_label if min_label < 0 else max_label} is outside the vocabulary of {shard.total} entries "
            f"(ignore_index is {IGNORE_INDEX})"
        )
    if not finite and (error := _nonfinite_error("hidden", hidden)):
        raise error
    if isinstance(temperature, Tensor):
        min_temperature, max_temperature = torch.stack(torch.where(is_selected, temperature, 1).aminmax()).tolist()
        if not min_temperature > 0:
            raise ValueError(f"temperature: smallest value {min_temperature}, expected above 0")
        if max_temperature == float("inf"):
            raise ValueError(f"temperature: largest value {max_temperature}, expected finite values")
    return Rows(total, count, None if count == total else is_selected.nonzero().squeeze(1))


class HostCopy:
    """Copies a scalar to the host asynchronously. `item` waits for the copy, but not for later work on the device."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._ready: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(value.device))

    def item(self) -> float:
        if self._ready is not None:
            self._ready.synchronize()
        return self._value.item()


class FiniteCheck:
    """Checks without a host synchronization that every row's statistics (log-sum-exp, plus entropy if requested) are finite.

    `enforce` waits for the result. If a backward pass follows, `enforce` is called there: waiting earlier would leave the device idle while
    the backward pass is being launched.
    """

    def __init__(self, statistics: Tensor) -> None:
        self._finite = HostCopy(torch.isfinite(statistics).all())

    def enforce(self, hidden: Tensor, weight: Tensor, name: str = "hidden") -> None:
        """If the check failed, raise ValueError naming the non-finite value in `hidden` (argument `name`) or `weight`, or the overflow."""
        if self._finite.item():
            return
        for argument, x in ((name, hidden), ("weight", weight)):
            if error := _nonfinite_error(argument, x):
                raise error
        maxima = [x.abs().max().item() for x in (hidden, weight)]
        raise ValueError(f"{name}: logits overflow {torch.float32}: largest |{name}| {maxima[0]}, largest |weight| {maxima[1]}")


def _nonfinite_error(name: str, x: Tensor) -> ValueError | None:
    """An error naming the first non-finite value of `x` [·, ·], if there is one."""
    nonfinite = (~torch.isfinite(x)).nonzero()
    if not len(nonfinite):
        return None
    row, col = nonfinite[0].tolist()
    return ValueError(f"{name}: {x[row, col].item()} at [{row}, {col}], expected finite values in all of {tuple(x.shape)}")


@dataclass(frozen=True)
class WeightGradBuffer:
    """Buffer of the weight gradient.

    out: None if no gradient is needed. accumulates: add to `out` instead of overwriting it. finish: returns the gradient for autograd.
    shared: `out` is Megatron's buffer; other gradients are added to it as well.
    """

    out: Tensor | None
    accumulates: bool
    finish: Callable[[], Tensor | None]
    shared: bool = False


def weight_grad_buffer(weight: Tensor, needed: bool, main_grad: bool) -> WeightGradBuffer:
    """Buffer of the weight gradient: Megatron's if `main_grad` is set and the weight has one, else a new tensor."""
    if not needed:
        return WeightGradBuffer(None, False, lambda: None)
    if not (main_grad and hasattr(weight, "main_grad")):
        grad = torch.empty_like(weight)
        return WeightGradBuffer(grad, False, lambda: grad)

    def finish() -> Tensor | None:
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # Megatron's hooks run only for parameters that get a gradient. They add it to the buffer if the weight is tied to the embedding
        # (`zero_out_wgrad`) and ignore its values otherwise.
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)

    return WeightGradBuffer(weight.main_grad, not take_stale(weight.main_grad), finish, shared=True)


@dataclass
class PrecomputedGrads:
    """Gradients that the forward pass computed for the upstream gradient `expected`, and a check that runs before they are used."""

    hidden: list[Tensor | None]
    weight: WeightGradBuffer
    expected: float
    check: Callable[[], None]

    def rescale(self, upstream: Tensor) -> tuple[list[Tensor | None], Tensor | None]:
        """The gradients of the states and the weight for `upstream`. Call it in a backward pass.

        If `upstream` differs from `expected`, rescales them, or raises ValueError if `expected` is 0. Gradients in `main_grad` cannot be
        rescaled, so any difference raises ValueError, at the end of the backward pass: reading `upstream` here would leave the device idle
        while the rest of the pass is launched.
        """
        if self.weight.shared:
            torch.autograd.Variable._execution_engine.queue_callback(partial(_verify, HostCopy(upstream), self.expected, self.check))
            return self.hidden, self.weight.finish()
        self.check()
        factor = upstream.item()
        if not math.isclose(factor, self.expected, rel_tol=1e-6):
            if not self.expected:
                raise _scale_error(self.expected, factor, "0 cannot be rescaled")
            for x in (*self.hidden, self.weight.out):
                if x is not None:
                    x.mul_(factor / self.expected)
        return self.hidden, self.weight.finish()


def _verify(upstream: HostCopy, expected: float, check: Callable[[], None]) -> None:
    check()
    if not math.isclose(factor := upstream.item(), expected, rel_tol=1e-6):
        raise _scale_error(expected, factor, "main_grad has already been added to")


def _scale_error(expected: float, upstream: float, reason: str) -> ValueError:
    return ValueError(f"grad_scale: {expected}, but the loss received a gradient of {upstream}; {reason}")
