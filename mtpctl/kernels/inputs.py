"""What the kernels accept: every argument checked once, here, before any of it reaches a device kernel.

Shape legend: N rows (tokens), n selected rows, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
IGNORE_INDEX = -100
"""A row with this label is not projected on the vocabulary: it costs no time, its results are 0 and it takes no gradient."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary: entries `start .. start + columns`, of `total` that exist on all ranks together."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    start: int
    columns: int
    total: int

    @property
    def valid(self) -> int:
        """How many of this rank's columns are vocabulary, not padding."""
        return max(0, min(self.columns, self.total - self.start))


@dataclass(frozen=True)
class Rows:
    """The rows that are projected. `index` is None when all N are; then nothing is gathered or scattered."""

    total: int
    count: int
    index: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Selected rows of `x` [N, ...] -> [n, ...]."""
        return x if self.index is None else x.index_select(0, self.index)

    def spread(self, x: Tensor) -> Tensor:
        """Selected rows back in their places, zero elsewhere: [n, ...] -> [N, ...]."""
        if self.index is None:
            return x
        out = x.new_zeros(self.total, *x.shape[1:])
        out[self.index] = x
        return out


def check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Raise ValueError, naming the argument and both values, where shapes, dtypes or devices do not fit together."""
    if hidden.dim() != 2:
        raise ValueError(f"hidden: shape {tuple(hidden.shape)} has {hidden.dim()} dimensions, expected 2: [rows, hidden size]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: shape {tuple(weight.shape)} does not fit hidden {tuple(hidden.shape)}: expected [vocab, {hidden.shape[1]}]"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"weight: shape {tuple(weight.shape)} holds no vocabulary entry, expected at least 1")
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


def vocab_shard(weight: Tensor, group: dist.ProcessGroup | None, valid_vocab: int | None) -> Shard:
    """Where this rank's columns lie in the whole vocabulary. All ranks of `group` hold equally many."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    columns = weight.shape[0]
    total = columns * world if valid_vocab is None else valid_vocab
    if not 0 < total <= columns * world:
        raise ValueError(f"valid_vocab: {valid_vocab}, expected 1 to {columns * world} (weight's {columns} rows on {world} ranks)")
    return Shard(group, rank, world, rank * columns, columns, total)


def check_temperature(temperature: float | Tensor, labels: Tensor) -> None:
    if isinstance(temperature, Tensor):
        if temperature.dim() and temperature.shape != labels.shape:
            raise ValueError(f"temperature: shape {tuple(temperature.shape)}, expected {tuple(labels.shape)}, one for each label")
        if temperature.device != labels.device:
            raise ValueError(f"temperature: on {temperature.device}, labels on {labels.device}")
    elif not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: {temperature}, expected a finite number above 0")


def select_rows(hidden: Tensor, labels: Tensor, rows: Tensor | None, temperature: float | Tensor, shard: Shard) -> Rows:
    """The rows that are both in the mask `rows` [N] and not ignored.

    Checks labels, temperatures and hidden states of these rows on the way, waiting for the device only once. Raises ValueError.
    """
    if rows is not None:
        _check_mask(rows, labels)
    total = labels.shape[0]
    if total == 0:
        return Rows(0, 0, None)
    keep = labels != IGNORE_INDEX if rows is None else (labels != IGNORE_INDEX) & rows
    # A sum is finite unless an addend is not (or it overflows: then `nonfinite` finds nothing).
    wide = torch.float64 if labels.device.type == "cpu" else torch.float32
    finite_sum = torch.isfinite(hidden.detach().sum(dtype=wide))
    kept = torch.where(keep, labels, 0)  # 0 is in every vocabulary, so that minimum and maximum are those of the kept labels
    count, low, high, finite = torch.stack([keep.sum(), *(x.long() for x in (*kept.aminmax(), finite_sum))]).tolist()
    if low < 0 or high >= shard.total:
        raise ValueError(
            f"labels: {low if low < 0 else high} is outside the vocabulary of {shard.total} entries (ignore_index is {IGNORE_INDEX})"
        )
    if not finite and (found := nonfinite("hidden", hidden)):
        raise found
    if isinstance(temperature, Tensor):
        coldest, hottest = torch.stack(torch.where(keep, temperature, 1).aminmax()).tolist()
        if not coldest > 0:
            raise ValueError(f"temperature: smallest value {coldest}, expected above 0")
        if hottest == float("inf"):
            raise ValueError(f"temperature: largest value {hottest}, expected finite values")
    return Rows(total, count, None if count == total else keep.nonzero().squeeze(1))


def _check_mask(rows: Tensor, labels: Tensor) -> None:
    if rows.device != labels.device:
        raise ValueError(f"rows: on {rows.device}, labels on {labels.device}")
    if rows.dtype != torch.bool:
        raise ValueError(f"rows: dtype {rows.dtype}, expected a bool mask")
    if rows.shape != labels.shape:
        raise ValueError(f"rows: mask of shape {tuple(rows.shape)}, expected {tuple(labels.shape)}, one for each label")


class FiniteCheck:
    """Checks that every row's statistics (log-sum-exp, plus entropy where that is asked for) are finite, without waiting for the device.

    The answer is copied to the host in the background, and read by `enforce`. A forward pass that a backward pass follows calls `enforce`
    there: waiting at once would leave the device idle while the backward pass is being launched.
    """

    def __init__(self, statistics: Tensor) -> None:
        finite = torch.isfinite(statistics).all()
        if statistics.is_cuda:
            self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._answer.copy_(finite, non_blocking=True)
            self._ready: torch.cuda.Event | None = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(statistics.device))
        else:
            self._answer, self._ready = finite, None

    def enforce(self, hidden: Tensor, weight: Tensor, name: str = "hidden") -> None:
        """Raises ValueError, naming what is not finite in `hidden` (as given by the caller, who calls it `name`) or `weight`."""
        if self._ready is not None:
            self._ready.synchronize()
        if not self._answer:
            raise explain_nonfinite(hidden, weight, name)


def nonfinite(name: str, x: Tensor) -> ValueError | None:
    """The error that names the first value of `x` [·, ·] that is not finite, if there is one."""
    bad = (~torch.isfinite(x)).nonzero()
    if not len(bad):
        return None
    row, col = bad[0].tolist()
    return ValueError(f"{name}: {x[row, col].item()} at [{row}, {col}], expected finite values in all of {tuple(x.shape)}")


def explain_nonfinite(hidden: Tensor, weight: Tensor, name: str = "hidden") -> ValueError:
    """Which argument made a row's statistics not finite."""
    for argument, x in ((name, hidden), ("weight", weight)):
        if found := nonfinite(argument, x):
            return found
    most = [x.abs().max().item() for x in (hidden, weight)]
    return ValueError(f"{name}: logits overflow {torch.float32}: largest |{name}| {most[0]}, largest |weight| {most[1]}")
