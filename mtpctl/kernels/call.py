"""What the two public functions share: arguments checked, rows selected, and the way back from a rank's share to whole gradients.

Shape legend: N rows (tokens), n selected rows, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels import inputs, reduce
from mtpctl.kernels.problem import Problem

DEFAULT_WORKSPACE_BYTES = 1 << 30


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call, beside its tensors."""

    shard: inputs.Shard
    rows: inputs.Rows
    temperature: float | Tensor
    sequence_parallel: bool
    deterministic: bool
    workspace_bytes: int
    main_grad: bool

    def problem(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Problem:
        """This rank's local problem; gathers sequence shards and selected rows."""
        if self.sequence_parallel:
            hidden = reduce.gather_rows(hidden, self.shard)
        inverse: float | Tensor
        if isinstance(self.temperature, Tensor):
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            inverse = self.rows.take(self.temperature.detach().to(wide).expand(self.rows.total).reciprocal())
        else:
            inverse = 1.0 / self.temperature
        targets = self.rows.take(labels).long() - self.shard.start
        return Problem(self.rows.take(hidden).contiguous(), weight, targets, inverse, self.shard.valid, self.workspace_bytes)

    def share_dtype(self, hidden: Tensor) -> torch.dtype:
        """In which a rank's share of the hidden gradient is best made: several are summed in fp32; alone it is final."""
        return hidden.dtype if self.shard.world == 1 or hidden.dtype == torch.float64 else torch.float32

    def whole_hidden_grad(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's share [n, H], summed over vocabulary shards, in its rows' places."""
        if self.sequence_parallel:
            return reduce.scatter_sum(self.rows.spread(local), self.shard, self.deterministic).to(dtype)
        return self.rows.spread(reduce.sum_ranks(local, self.shard, self.deterministic).to(dtype))


def prepare(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor,
    group: dist.ProcessGroup | None,
    ignore_index: int,
    rows: Tensor | None,
    valid_vocab: int | None,
    sequence_parallel: bool,
    workspace_bytes: int | None,
    deterministic: bool,
    main_grad: bool,
) -> Call:
    """Checks the arguments (ValueError naming the one that is wrong) and selects the rows."""
    inputs.check_tensors(hidden, weight, labels, group, sequence_parallel)
    inputs.check_temperature(temperature, labels)
    shard = inputs.vocab_shard(weight, group, valid_vocab)
    workspace = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    if workspace <= 0:
        raise ValueError(f"workspace_bytes: {workspace}, expected above 0")
    selected = inputs.select_rows(None if sequence_parallel else hidden, labels, rows, ignore_index, temperature, shard)
    return Call(shard, selected, temperature, sequence_parallel, deterministic, workspace, main_grad)


@dataclass(frozen=True)
class WeightSink:
    """Where the weight's gradient goes (None: nowhere), whether it is added there, and what autograd is given for it in the end."""

    out: Tensor | None
    add: bool
    finish: Callable[[], Tensor | None]


def weight_sink(weight: Tensor, wanted: bool, main_grad: bool) -> WeightSink:
    if not wanted:
        return WeightSink(None, False, lambda: None)
    if not (main_grad and hasattr(weight, "main_grad")):
        grad = torch.empty_like(weight)
        return WeightSink(grad, False, lambda: grad)

    def finish() -> Tensor | None:
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # Megatron's hooks fire only for parameters that are given a gradient. Of a weight that is also the embedding they add it to what
        # the embedding brings; of any other they never read it.
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)

    return WeightSink(weight.main_grad, True, finish)
