"""What `linear_logprob` and `linear_policy_loss` share: checked arguments, selected rows, and whole gradients from each rank's share.

Shape legend: N rows (tokens), n selected rows, H hidden size, V this rank's vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels import inputs, reduce
from mtpctl.kernels.main_grad import take_stale
from mtpctl.kernels.problem import Problem

DEFAULT_WORKSPACE_BYTES = 1 << 30


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call, beside its tensors."""

    shard: inputs.Shard
    rows: inputs.Rows
    temperature: float | Tensor
    workspace_bytes: int
    main_grad: bool

    def problem(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Problem:
        """The problem of the selected rows and this rank's vocabulary entries."""
        inverse: float | Tensor
        if isinstance(self.temperature, Tensor):
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            inverse = self.rows.take(self.temperature.detach().to(wide).expand(self.rows.total).reciprocal())
        else:
            inverse = 1.0 / self.temperature
        targets = self.rows.take(labels).long() - self.shard.start
        return Problem(self.rows.take(hidden).contiguous(), weight, targets, inverse, self.shard.valid, self.workspace_bytes)

    def share_dtype(self, hidden: Tensor) -> torch.dtype:
        """The dtype of this rank's share of the hidden gradient: fp32 where shares are summed over ranks, else that of the result."""
        return hidden.dtype if self.shard.world == 1 or hidden.dtype == torch.float64 else torch.float32

    def whole_hidden_grad(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of hidden [N, H] from every rank's share `local` [n, H], summed over vocabulary shards."""
        return self.rows.spread(reduce.sum_ranks(local, self.shard).to(dtype))


def prepare(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor,
    group: dist.ProcessGroup | None,
    rows: Tensor | None,
    valid_vocab: int | None,
    workspace_bytes: int | None,
    main_grad: bool,
) -> Call:
    """Check the arguments (ValueError naming the one that is wrong) and select the rows."""
    inputs.check_tensors(hidden, weight, labels)
    inputs.check_temperature(temperature, labels)
    shard = inputs.vocab_shard(weight, group, valid_vocab)
    workspace = DEFAULT_WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    if workspace <= 0:
        raise ValueError(f"workspace_bytes: {workspace}, expected above 0")
    selected = inputs.select_rows(hidden, labels, rows, temperature, shard)
    return Call(shard, selected, temperature, workspace, main_grad)


@dataclass(frozen=True)
class WeightSink:
    """Where the weight's gradient is written (None: nowhere), or added where `add` is set. `finish` gives what backward returns for it.

    `shared`: `out` is Megatron's buffer, to which other gradients are added as well.
    """

    out: Tensor | None
    add: bool
    finish: Callable[[], Tensor | None]
    shared: bool = False


def weight_sink(weight: Tensor, wanted: bool, main_grad: bool) -> WeightSink:
    """The weight's own new gradient, or with `main_grad` Megatron's buffer where the weight has one."""
    if not wanted:
        return WeightSink(None, False, lambda: None)
    if not (main_grad and hasattr(weight, "main_grad")):
        grad = torch.empty_like(weight)
        return WeightSink(grad, False, lambda: grad)

    def finish() -> Tensor | None:
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # Megatron's hooks fire only for parameters that get a gradient. They add it where the weight is tied to the embedding
        # (`zero_out_wgrad`), and never read it for any other weight.
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)

    return WeightSink(weight.main_grad, not take_stale(weight.main_grad), finish, shared=True)
