"""Plain PyTorch layers for megatron-core's layer specs, replacing Transformer Engine's.

Parameters have Transformer Engine's fused names (`linear_qkv.layer_norm_weight`), so that Megatron-Bridge's mappings and checkpoints work
with these layers and with Transformer Engine's. Megatron-Bridge recognizes several classes by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear as UpstreamColumnParallelLinear
from megatron.core.tensor_parallel import RowParallelLinear as UpstreamRowParallelLinear
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from mtpctl.kernels import exact_grad
from mtpctl.kernels.activations import squared_relu, swiglu
from mtpctl.kernels.norm import gated_rms_norm, rms_norm
from mtpctl.kernels.products import buffered_linear, is_buffered

_BITWISE = "mtpctl_bitwise"


def set_bitwise(config: TransformerConfig) -> None:
    """For `numerics: bitwise`: let the layers compute with `mtpctl.kernels.exact_grad`, whose sums do not depend on the batch."""
    setattr(config, _BITWISE, True)


def is_bitwise(config: TransformerConfig) -> bool:
    """Whether the layers of this config compute bitwise log-probs, see `set_bitwise`."""
    return getattr(config, _BITWISE, False)


@contextmanager
def recompute_in_backward(value: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Recompute `value` with `compute` in the backward pass of operations in the block, instead of saving it.

    A linear layer saves its input for its weight's gradient. If that input is the output of a norm or activation, autograd also saves the
    inputs of the norm or activation, so recomputing the output saves memory at the cost of bandwidth only. `compute` must return
    bit-identical values. It runs without gradients, once per operation that would have saved `value`.
    """
    address, count = value.data_ptr(), value.numel()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        is_value = tensor.data_ptr() == address and tensor.numel() == count and tensor.is_contiguous()
        return tensor.shape if is_value else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return compute().view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class ColumnParallelLinear(UpstreamColumnParallelLinear):
    """[..., in] → [..., out / tp], and the bias if the caller adds it.

    A layer that is not split and has a gradient buffer bypasses upstream's forward pass. Upstream checks for collectives, mixed precision
    and offloading in each call and runs three autograd functions, a large part of a layer's time if the GPU is launch-bound.
    """

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        out = _bypass_upstream(self, input_, has_options=bool(args or kwargs))
        return super().forward(input_, *args, **kwargs) if out is None else out


class RowParallelLinear(UpstreamRowParallelLinear):
    """[..., in / tp] → [..., out], and the bias if the caller adds it. Bypasses upstream like `ColumnParallelLinear`."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        out = _bypass_upstream(self, input_, has_options=False)
        return super().forward(input_) if out is None else out


def _bypass_upstream(
    layer: ColumnParallelLinear | RowParallelLinear, x: Tensor, *, has_options: bool
) -> tuple[Tensor, Tensor | None] | None:
    """The layer's output, and the bias if the caller adds it; None if upstream's forward pass must compute them."""
    if is_bitwise(layer.config):
        assert not has_options or layer.tp_group.size() == 1, "numerics: bitwise does not support options of forward with tp > 1"
        out = _exact_product(layer, x)
    elif has_options or layer.tp_group.size() > 1 or not is_buffered(layer.weight):
        return None
    else:
        out = buffered_linear(x, layer.weight)
    if layer.skip_bias_add or layer.bias is None:
        return out, layer.bias if layer.skip_bias_add else None
    return out + layer.bias, None


def _exact_product(layer: ColumnParallelLinear | RowParallelLinear, x: Tensor) -> Tensor:
    """`exact_grad.linear` with the communication of a layer that is split over ranks."""
    group, splits_tokens = layer.tp_group, layer.sequence_parallel
    if group.size() == 1:
        return exact_grad.linear(x, layer.weight)
    assert getattr(layer, "input_is_parallel", True) and not getattr(layer, "gather_output", False), "this layer is not exact with tp > 1"
    if isinstance(layer, RowParallelLinear):
        out = exact_grad.linear(x, layer.weight, group)
        return scatter_to_sequence_parallel_region(out, group) if splits_tokens else out
    if not splits_tokens:
        return exact_grad.linear(copy_to_tensor_model_parallel_region(x, group), layer.weight)
    tokens = gather_from_sequence_parallel_region(x, group=group)
    with recompute_in_backward(tokens, partial(gather_from_sequence_parallel_region, x.detach(), group=group)):
        return exact_grad.linear(tokens, layer.weight)


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that is replicated on all tensor-parallel ranks; each rank applies it to its own tokens."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        # megatron-core sums the gradients of such parameters over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        if is_buffered(self.weight):
            return buffered_linear(x, self.weight), None
        # 2-D, because for 3-D input torch selects the matmul, and thus the rounding, by whether the weight requires a gradient.
        return F.linear(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1]), None


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    init = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = torch.nn.Parameter(init(size, dtype=config.params_dtype, device=device))
    # megatron-core sums the gradients of such parameters over the tensor-parallel ranks.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def norm_offset(config: TransformerConfig) -> float:
    """The offset that norms add to their weights."""
    return 1.0 if config.layernorm_zero_centered_gamma else 0.0


def _rms_norm(config: TransformerConfig, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = exact_grad.rms_norm if is_bitwise(config) else rms_norm
    return norm(x, weight, eps, norm_offset(config))


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; supports sequence-parallel input.

    is_head_sharded: the input has all tokens, but only this tensor-parallel rank's heads, so the weight gradient must be summed over ranks
    here. With sequence parallelism, and for QK norms, megatron-core sums it.
    """

    is_head_sharded = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(self.config, x, self.reduced_weight(), self.eps)

    def reduced_weight(self) -> Tensor:
        """The weight as it is; only its gradient is summed over ranks, if `is_head_sharded`."""
        return copy_to_tensor_model_parallel_region(self.weight) if self.is_head_sharded else self.weight


class GatedRMSNorm(RMSNorm):
    """Output norm of linear attention. Its weight is centered at 1, as in Hugging Face checkpoints, even if other norms are centered at 0.

    Subtracting 1 from the stored weight, to center it at 0, would round it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: object) -> None:
        super().__init__(config, hidden_size, eps, **options)
        torch.nn.init.ones_(self.weight)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """norm(x) · silu(gate), for x and gate of the same shape."""
        norm = exact_grad.gated_rms_norm if is_bitwise(self.config) else gated_rms_norm
        return norm(x, gate, self.reduced_weight(), self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm followed by a column-parallel linear layer.

    Only the norm's input is saved for the backward pass, which recomputes the linear layer's input.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        normed = self._norm(input_)
        with recompute_in_backward(normed, partial(self._norm, input_.detach())):
            return super().forward(normed, *args, **kwargs)

    def _norm(self, x: Tensor) -> Tensor:
        return _rms_norm(self.config, x, self.layer_norm_weight, self.config.layernorm_epsilon)


def activation_of(config: TransformerConfig) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The activation between the two linear layers of an MLP or an expert: SwiGLU, or a squared ReLU without a gate."""
    if is_bitwise(config):
        return exact_grad.swiglu
    return swiglu if config.gated_linear_unit else squared_relu


class Mlp(MLP):
    """An activation between two linear layers. The activation's input is saved for the backward pass, which recomputes its output."""

    def forward(self, hidden_states: Tensor, /, per_token_scale: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor | None]:
        inner, _bias = self.linear_fc1(hidden_states)
        return self.down(inner, per_token_scale)

    def down(self, inner: Tensor, per_token_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Second half of the forward pass: activation and down-projection."""
        activation = activation_of(self.config)
        product = activation(inner, per_token_scale)
        scale = None if per_token_scale is None else per_token_scale.detach()
        with recompute_in_backward(product, partial(activation, inner.detach(), scale)):
            return self.linear_fc2(product)
