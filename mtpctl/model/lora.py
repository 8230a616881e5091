"""LoRA (Hu et al., arXiv 2106.09685) on Megatron's linear layers: y = W x + (alpha / rank) B A x, with W frozen.

A [rank, in] and B [out, rank] are split over the tensor-parallel ranks so that only [tokens, rank] is communicated:

column      W and B are split by rows, A is replicated. With sequence parallelism A is applied to a rank's tokens, and the result is
            gathered. A's gradient then covers these tokens only, and megatron-core sums it over the ranks.
row         W and A are split by columns, B is replicated. The partial results A x are summed (reduce-scattered with sequence parallelism)
            before B is applied.
expert      Tokens are gathered before the experts and outputs are summed after them, so the adapter needs no communication. A rank has a
            part of the replicated matrix's gradient, and megatron-core sums it over the ranks.
replicated  W, A and B are replicated and applied to a rank's tokens.

An adapter is a submodule of its layer, so the layer's parameters keep their names. MTP layers get no adapters, because inference engines do
not support adapters on drafters; their weights are trained instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mtpctl.errors import UserError
from mtpctl.kernels.grouped import Product, WeightStack, grouped_linear, library_product
from mtpctl.model.delta_net import GatedDeltaNet
from mtpctl.model.layers import ColumnParallelLinear, LayerNormColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from mtpctl.recipe.train import LoraConfig

ROW_PARALLEL_TARGETS = ("linear_proj", "linear_fc2", "out_proj")
REPLICATED_TARGETS = ("linear_q_down_proj", "linear_kv_down_proj")
"""Layer names of the targets of each kind. All other targets are column-parallel."""


class Adapter(torch.nn.Module):
    """This rank's shards of A and B of one layer. `segments`: rows of B for each output of a fused layer, such as gate and up."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, segments: dict[str, int]) -> None:
        super().__init__()
        self.lora_a, self.lora_b = torch.nn.Parameter(a), torch.nn.Parameter(b)
        self.scale, self.segments = scale, segments

    @torch.no_grad()
    def merge_into(self, weight: Tensor) -> Tensor:
        """W + scale B A as a new tensor in W's dtype, computed in fp32."""
        return torch.addmm(weight.float(), self.lora_b.float(), self.lora_a.float(), alpha=self.scale).to(weight.dtype)


class _AdaptedLinear(torch.nn.Module):
    """A linear layer with an adapter."""

    adapter: Adapter
    tp_group: dist.ProcessGroup
    explicit_expert_comm: bool
    split_matrix = ""
    """Name of the adapter matrix that is split over tp, if any."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict[str, dist.ProcessGroup] | None = None
    ) -> ShardedStateDict:
        assert metadata is not None
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        adapter_state = make_sharded_tensors_for_checkpoint(
            self.adapter.state_dict(keep_vars=True),
            f"{prefix}adapter.",
            {self.split_matrix: 0 if self.split_matrix == "lora_b" else 1},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if sizes := self.adapter.segments:
            name = f"{prefix}adapter.lora_b"
            adapter_state[name] = _split_tensor_factory(adapter_state[name], list(sizes.values()), list(sizes), 0)
        return {**state, **adapter_state}


class LoraColumnParallelLinear(_AdaptedLinear, ColumnParallelLinear):
    split_matrix = "lora_b"

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_, *args, **kwargs)
        low_rank = F.linear(input_, self.adapter.lora_a)
        if not self.explicit_expert_comm and self.tp_group.size() > 1:
            if self.sequence_parallel:
                low_rank = gather_from_sequence_parallel_region(low_rank, group=self.tp_group)
            else:
                low_rank = copy_to_tensor_model_parallel_region(low_rank, group=self.tp_group)
        return torch.add(out, F.linear(low_rank, self.adapter.lora_b), alpha=self.adapter.scale), bias


class LoraLayerNormColumnParallelLinear(LayerNormColumnParallelLinear, LoraColumnParallelLinear):
    """The adapter gets the normed input: in `LayerNormColumnParallelLinear.forward`, `super()` is `LoraColumnParallelLinear` here."""


class LoraRowParallelLinear(_AdaptedLinear, RowParallelLinear):
    split_matrix = "lora_a"

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_)
        low_rank = F.linear(input_, self.adapter.lora_a)
        if not self.explicit_expert_comm and self.tp_group.size() > 1:
            if self.sequence_parallel:
                low_rank = reduce_scatter_to_sequence_parallel_region(low_rank, group=self.tp_group)
            else:
                low_rank = reduce_from_tensor_model_parallel_region(low_rank, group=self.tp_group)
        return torch.add(out, F.linear(low_rank, self.adapter.lora_b), alpha=self.adapter.scale), bias


class LoraReplicatedLinear(ReplicatedLinear):
    adapter: Adapter

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out, bias = super().forward(x)
        return torch.add(out, F.linear(F.linear(x, self.adapter.lora_a), self.adapter.lora_b), alpha=self.adapter.scale), bias


class GroupedLayer:
    """The linear layers of many experts as one grouped product, with their LoRA adapters if attached."""

    def __init__(self, linears: Sequence[_Linear], product: Product = library_product) -> None:
        """product: see `grouped_linear`."""
        self._product = product
        self.weights = WeightStack([linear.weight for linear in linears])
        adapters: list[Adapter] = [linear.adapter for linear in linears if isinstance(linear, _AdaptedLinear)]
        self._adapters: tuple[WeightStack, WeightStack, float] | None = None
        if adapters:
            a, b = WeightStack([adapter.lora_a for adapter in adapters]), WeightStack([adapter.lora_b for adapter in adapters])
            self._adapters = a, b, adapters[0].scale

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Outputs [R, out] of rows [R, in] sorted by expert. `ends` [E] int32: end of each expert's rows."""
        out = grouped_linear(rows, ends, self.weights, self._product)
        if self._adapters is None:
            return out
        a, b, scale = self._adapters
        return torch.add(out, grouped_linear(grouped_linear(rows, ends, a), ends, b), alpha=scale)


type _Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear

_LORA_CLASS_OF: dict[type, type[torch.nn.Module]] = {
    ColumnParallelLinear: LoraColumnParallelLinear,
    LayerNormColumnParallelLinear: LoraLayerNormColumnParallelLinear,
    RowParallelLinear: LoraRowParallelLinear,
    ReplicatedLinear: LoraReplicatedLinear,
}


def attach_adapters(model: GPTModel, lora: LoraConfig, seed: int) -> None:
    """Freeze all but the MTP layers, and attach an adapter to every target in the decoder layers.

    A is initialized like a linear layer's weight (uniform, ±1/√in) from the seed and the layer's path in the whole model, so its values do
    not depend on the parallel layout. B is 0. Raises UserError if no layer matches a target.
    """
    for name, parameter in model.named_parameters():
        if not name.startswith("mtp."):
            parameter.requires_grad_(False)
    linears = list(_linear_layers(model))
    _check_targets(lora, {_leaf(path) for path, _, _ in linears})
    for path, linear, segments in linears:
        if _leaf(path) in lora.targets:
            linear.adapter = _create_adapter(linear, path, segments, lora, seed)
            cast(Any, linear).__class__ = _LORA_CLASS_OF[type(linear)]
    if model.pre_process and model.config.recompute_granularity == "full":
        # Recomputation gives adapters no gradient unless its input requires one.
        model.embedding.register_forward_hook(lambda _module, _args, out: out.requires_grad_() if torch.is_grad_enabled() else out)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _linear_layers(model: GPTModel) -> Iterator[tuple[str, _Linear, dict[str, int]]]:
    """Yield the linear layers of this rank's decoder layers: path in the whole model (decoder layer, expert, name), module, segments."""
    for layer in model.decoder.layers:
        for name, module in list(layer.named_modules()):
            if type(module) not in _LORA_CLASS_OF:
                continue
            parent = layer.get_submodule(name.rpartition(".")[0])
            segments: dict[str, int] = {}
            if isinstance(parent, GatedDeltaNet) and _leaf(name) == "in_proj":
                segments = dict(zip(parent.in_proj_split_names, parent.in_proj_split_sections, strict=True))
            elif isinstance(parent, MLP) and parent.config.gated_linear_unit and _leaf(name) == "linear_fc1":
                half = module.output_size_per_partition // 2
                segments = {"gate": half, "up": half}
            yield f"{layer.layer_number}.{_global_expert_name(layer, name)}", module, segments


def _global_expert_name(layer: torch.nn.Module, name: str) -> str:
    """Replace an expert's local index in a name by its global one."""
    head, separator, rest = name.partition(".local_experts.")
    if not separator:
        return name
    experts = layer.get_submodule(head)
    assert isinstance(experts, SequentialMLP)
    number, _, rest = rest.partition(".")
    return f"{head}{separator}{experts.ep_group.rank() * experts.num_local_experts + int(number)}.{rest}"


def _check_targets(lora: LoraConfig, local_names: set[str]) -> None:
    gathered: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(gathered, local_names)
    all_names: set[str] = set().union(*gathered)
    unknown = [target for target in lora.targets if target not in all_names]
    if unknown:
        raise UserError(f"train.lora.targets: no layer of this model is a {', '.join(unknown)}; it has {', '.join(sorted(all_names))}")


def _create_adapter(linear: _Linear, path: str, segments: dict[str, int], lora: LoraConfig, seed: int) -> Adapter:
    weight: Tensor = linear.weight
    is_row_parallel = isinstance(linear, RowParallelLinear)
    local_width = weight.shape[1]
    full_width, column_start = local_width, 0
    if isinstance(linear, RowParallelLinear):
        full_width, column_start = linear.input_size, linear.tp_group.rank() * local_width
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(path.encode()))
    a = (torch.rand(lora.rank, full_width, generator=generator) * 2 - 1) / full_width**0.5
    adapter = Adapter(
        a[:, column_start : column_start + local_width].to(weight.device, weight.dtype),
        torch.zeros(weight.shape[0], lora.rank, device=weight.device, dtype=weight.dtype),
        lora.alpha / lora.rank,
        segments,
    )
    replicated = [adapter.lora_a, adapter.lora_b]
    if not isinstance(linear, ReplicatedLinear):
        split = replicated.pop(0 if is_row_parallel else 1)
        set_tensor_model_parallel_attributes(split, is_parallel=True, dim=1 if is_row_parallel else 0, stride=1)
    for parameter in adapter.parameters():
        parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
    for parameter in replicated:
        # megatron-core sums the gradients of such parameters over the tensor-parallel ranks.
        parameter.sequence_parallel = _has_partial_gradient(linear)  # type: ignore[attr-defined]
    return adapter


def _has_partial_gradient(linear: _Linear) -> bool:
    """Whether this rank's gradient of a replicated matrix is partial: from the rank's tokens, or from its part of a sum."""
    if isinstance(linear, ReplicatedLinear):
        return bool(cast(Any, linear.weight).sequence_parallel)
    return bool(linear.config.sequence_parallel and linear.tp_group.size() > 1)
