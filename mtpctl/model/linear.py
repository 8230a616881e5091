"""megatron-core's linear layers, with a short way for ranks that hold a layer whole.

Upstream's forward pass asks for collectives, mixed precision and offloading at each call, and passes through three autograd functions.
Where a card finishes as fast as the host can launch, this overhead is a large part of a layer's time. Megatron-Bridge knows the classes by
their names.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import ColumnParallelLinear as UpstreamColumnParallelLinear
from megatron.core.tensor_parallel import RowParallelLinear as UpstreamRowParallelLinear
from torch import Tensor

from mtpctl.kernels.linear import buffered_linear
from mtpctl.kernels.main_grad import is_buffered


class ColumnParallelLinear(UpstreamColumnParallelLinear):
    """[..., in] → [..., out / tp], and the bias where the caller adds it."""

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        if args or kwargs or self.tp_group.size() > 1 or not is_buffered(self.weight):
            found: tuple[Tensor, Tensor | None] = super().forward(input_, *args, **kwargs)
            return found
        return _with_bias(buffered_linear(input_, self.weight), self.bias, added_later=self.skip_bias_add)


class RowParallelLinear(UpstreamRowParallelLinear):
    """[..., in / tp] → [..., out], and the bias where the caller adds it."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.tp_group.size() > 1 or not is_buffered(self.weight):
            found: tuple[Tensor, Tensor | None] = super().forward(input_)
            return found
        return _with_bias(buffered_linear(input_, self.weight), self.bias, added_later=self.skip_bias_add)


def _with_bias(out: Tensor, bias: Tensor | None, *, added_later: bool) -> tuple[Tensor, Tensor | None]:
    if added_later or bias is None:
        return out, bias if added_later else None
    return out + bias, None
