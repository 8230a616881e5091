"""Gradient buffers and expert loads, and their reduction over ranks.

Reductions of gradients overlap with the last backward pass of an update. megatron-core starts the reduction of a bucket when autograd has
computed a gradient of each of its parameters. That does not work here: the gradients of this package's layers bypass autograd, and some
parameters have no gradient in some updates. Therefore a bucket's reduction starts when the backward pass has left the layers of the bucket
in all microbatches. Buckets are reduced in the same order on all ranks; the remaining buckets are reduced after the backward pass. The
embedding's bucket is the last, and its reduction overlaps with nothing. Therefore only the rows that have a gradient are exchanged, if they
are few (`SPARSE_SHARE`), the embedding is not tied, and the optimizer is not distributed.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout, pad_bucket_end, pad_param_start
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mtpctl.compat.megatron_core import fuse_gradient_accumulation, without_router_updates
from mtpctl.kernels.grouped import WeightStack
from mtpctl.kernels.products import accumulate_weight_grad, is_buffered, mark_stale, take_stale
from mtpctl.model.experts import Experts
from mtpctl.model.gpt import MtpModel
from mtpctl.model.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from mtpctl.model.router import Router
from mtpctl.trainer.offload import allocate, release

MIN_BUCKET_NUMEL = 40_000_000
"""Minimum size of a bucket of several layers: collectives of small buckets are bound by latency. megatron-core's default."""
SPARSE_SHARE = 0.5
"""An embedding's gradient is exchanged as rows if the rows of all ranks together are at most this fraction of the vocabulary."""
SLICE_NUMEL = 1 << 25
"""Maximum number of elements that a rank sends in one all-gather of embedding gradients."""
AFTER_BACKWARD = -1
"""Layer index of parameters whose gradients are complete only after the backward pass."""


def layer_indices(module: MtpModel) -> dict[Tensor, int]:
    """Map each parameter to the decoder layer of this stage whose backward pass completes its gradient.

    Parameters of the final norm, the MTP layers and the LM head have the number of layers as their index: their gradients are complete
    before the last layer's backward pass begins. All others, such as the embedding's, have `AFTER_BACKWARD`.
    """
    return {parameter: _layer_index(name, len(module.decoder.layers)) for name, parameter in module.named_parameters()}


def _layer_index(name: str, layers: int) -> int:
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        return int(match[1])
    return layers if name.startswith(("decoder.final_layernorm.", "mtp.", "output_layer.")) else AFTER_BACKWARD


def bucket_layout(index_of: Mapping[Tensor, int], *, distributed_optimizer: bool) -> FullParamLayout:
    """The order of parameters in gradient buffers, as in megatron-core, with buckets that end at layer boundaries.

    A weight that the first and last pipeline stage share (`shared_embedding`) has a separate bucket. megatron-core adds the gradients of
    the two stages shard by shard, and the distributed optimizer shards whole buckets. In a separate bucket, the shards of both stages
    contain the same rows.
    """
    layouts = {}
    for key, (parameters, indices) in group_params_for_buffers([p for p in index_of if p.requires_grad], True).items():
        ranks = _data_parallel_group(expert=key.is_expert_parallel).size()
        buckets = PerBufferParamLayout(param_indices=indices, num_optimizer_shards=ranks if distributed_optimizer else None)
        bucket_start = param_end = 0
        ordered = parameters[::-1]
        for parameter, next_parameter in itertools.zip_longest(ordered, ordered[1:]):
            param_start = pad_param_start(param_end) if distributed_optimizer else param_end
            param_end = param_start + parameter.numel()
            buckets.param_index_map[parameter] = (param_start, param_end, len(buckets.bucket_indices))
            if next_parameter is None or (ranks > 1 and _is_bucket_end(parameter, next_parameter, index_of, param_end - bucket_start)):
                buckets.per_bucket_numel_unpadded.append(param_end - bucket_start)
                # The distributed optimizer divides each bucket over the ranks.
                param_end = pad_bucket_end(param_end, ranks, False) if distributed_optimizer else param_end
                buckets.bucket_indices.append((bucket_start, param_end))
                bucket_start = param_end
        layouts[key] = buckets
    return FullParamLayout(layouts)


def _is_bucket_end(parameter: Tensor, next_parameter: Tensor, index_of: Mapping[Tensor, int], numel: int) -> bool:
    if any(getattr(each, "shared_embedding", False) or index_of[each] == AFTER_BACKWARD for each in (parameter, next_parameter)):
        return True
    return index_of[parameter] != index_of[next_parameter] and numel >= MIN_BUCKET_NUMEL


def _data_parallel_group(*, expert: bool) -> dist.ProcessGroup:
    group: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group() if expert else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return group


class GradReduceOverlap:
    """Starts the gradient reductions of `model` during the backward pass. It must have `overlap_grad_reduce`."""

    def __init__(
        self, module: MtpModel, model: DistributedDataParallel, index_of: Mapping[Tensor, int], prepare: Callable[[int], None]
    ) -> None:
        """prepare(index): called before the reduction of buckets whose layers all have this index or a higher one."""
        self._prepare = prepare
        groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        # In order of readiness, which is the same on all ranks, because they have the same parameters.
        self._groups = sorted(((min(index_of[p] for p in group.params), group) for group in groups), key=lambda entry: -entry[0])
        embedding = getattr(module, "embedding", None)
        # The embedding's weight, if ranks exchange only its rows with a gradient. Otherwise None: for a tied weight, because the head's
        # gradient has all rows, and with the distributed optimizer, whose shards split rows.
        self._sparse_weight: Any = None
        if embedding is not None and not (module.share_embeddings_and_output_weights or model.ddp_config.use_distributed_optimizer):
            self._sparse_weight = embedding.word_embeddings.weight
        self._microbatches, self._started_count = 0, 0
        self._input_grad_counts: dict[int, int] = {}
        layers: list[tuple[int, torch.nn.Module]] = list(enumerate(module.decoder.layers))
        if module.decoder.final_layernorm is not None:
            layers.append((len(layers), module.decoder.final_layernorm))
        for index, layer in layers:
            layer.register_forward_pre_hook(partial(self._hook_input_grad, index), with_kwargs=True)

    def begin(self, microbatches: int) -> None:
        """Start an update with this number of backward passes.

        Raises RuntimeError if the previous update failed during its reductions, because other ranks may not have started the same ones.
        """
        if any(group.grad_reduce_handle is not None for _, group in self._groups):
            raise RuntimeError("the previous update failed while its gradients were being reduced; start the trainer again")
        self._microbatches, self._started_count, self._input_grad_counts = microbatches, 0, {}

    def finish(self) -> None:
        """Start the remaining reductions, in the same order."""
        self._reduce_from(AFTER_BACKWARD)

    def _hook_input_grad(self, index: int, _: torch.nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
        """Call `_on_input_grad` when the gradient of the layer's input is complete.

        Autograd runs operations in reverse order of their creation. It therefore computes the input's gradient after the gradients of all
        parameters that the layer and later modules use. This does not hold for a leaf, whose gradient is accumulated earlier. A leaf
        therefore has no hook, and the layer's buckets are reduced with those of the preceding layer, or in `finish` if there is none. The
        input is a leaf in the first layer of later pipeline stages, and in the second run of a recomputed layer.
        """
        state = options.get("hidden_states", args[0] if args else None)
        if isinstance(state, Tensor) and state.grad_fn is not None:
            state.register_hook(partial(self._on_input_grad, index))

    def _on_input_grad(self, index: int, _: Tensor) -> None:
        count = self._input_grad_counts[index] = self._input_grad_counts.get(index, 0) + 1
        if count > self._microbatches:
            raise RuntimeError(f"decoder layer {index} ran more than once per microbatch; its gradients have been reduced already")
        if count == self._microbatches:
            self._reduce_from(index)

    def _reduce_from(self, index: int) -> None:
        """Reduce the buckets whose parameters all have this layer index or a higher one, unless they are reduced already."""
        ready_count = sum(lowest_layer >= index for lowest_layer, _ in self._groups)
        if ready_count > self._started_count:
            self._prepare(index)
        while self._started_count < ready_count:
            group = self._groups[self._started_count][1]
            if group.params == {self._sparse_weight} and sum_sparse_rows(self._sparse_weight.main_grad, group.data_parallel_group):
                group.grad_reduce_finished = True
            else:
                group.start_grad_sync()
            self._started_count += 1


def sum_sparse_rows(grad: Tensor, group: dist.ProcessGroup) -> bool:
    """Sum grad [vocab, H] over ranks by exchanging its non-zero rows. If too many rows are non-zero, returns False without changing it."""
    rows = torch.linalg.vector_norm(grad, torch.inf, dim=1).nonzero().squeeze(1)
    ranks = group.size()
    all_counts = rows.new_empty(ranks)
    dist.all_gather_into_tensor(all_counts, rows.new_tensor([len(rows)]), group=group)
    counts = all_counts.tolist()
    max_rows = max(counts)
    if max_rows * ranks > SPARSE_SHARE * len(grad):
        return False
    values = grad[rows]
    grad.index_fill_(0, rows, 0.0)
    step = max(1, SLICE_NUMEL // grad.shape[1])
    for start in range(0, max_rows, step):
        size = min(step, max_rows - start)
        sent_rows, sent_values = rows.new_zeros(size), values.new_zeros(size, grad.shape[1])
        sent_count = len(rows[start : start + size])
        sent_rows[:sent_count], sent_values[:sent_count] = rows[start : start + size], values[start : start + size]
        all_rows, all_values = rows.new_empty(ranks * size), values.new_empty(ranks * size, grad.shape[1])
        dist.all_gather_into_tensor(all_rows, sent_rows, group=group)
        dist.all_gather_into_tensor(all_values, sent_values, group=group)
        # One rank after the other, so that all ranks add in the same order.
        for count, rank_rows, rank_values in zip(counts, all_rows.split(size), all_values.split(size), strict=True):
            received_count = min(max(count - start, 0), size)
            grad.index_add_(0, rank_rows[:received_count], rank_values[:received_count])
    return True


class Gradients:
    """The fp32 buffers of all gradients. They are reduced over ranks during and after the last backward pass (`GradReduceOverlap`).

    In each update the first gradients of linear layers, experts and LM head overwrite their buffers. This avoids zeroing and reading the
    buffers, which are the largest data that a microbatch reads. The buffers of other weights are zeroed at the start of an update.
    """

    def __init__(self, module: MtpModel, config: TransformerConfig, *, distributed_optimizer: bool, head_uses_kernels: bool) -> None:
        """head_uses_kernels: all gradients of the head's weight are written by `mtpctl.kernels`, none by autograd."""
        # A weak reference: Megatron-Bridge caches configs that it exports with, and a cached config must not keep process groups alive.
        config.finalize_model_grads_func = partial(_finalize_grads, weakref.ref(self))
        overlaps = parallel_state.get_data_parallel_group(with_context_parallel=True).size() > 1
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=overlaps
        )
        index_of = layer_indices(module)
        buckets = bucket_layout(index_of, distributed_optimizer=distributed_optimizer) if overlaps else None
        self.model = DistributedDataParallel(config, settings, module, full_param_layout=buckets)
        # The bucket groups keep the asynchronous settings. The hooks on parameters must not start reductions.
        self.model.ddp_config = replace(settings, overlap_grad_reduce=False)
        self._experts = [part for part in module.modules() if isinstance(part, Experts)]
        self._expert_layer_indices = [
            max((index_of[weight] for weight in experts.parameters()), default=AFTER_BACKWARD) for experts in self._experts
        ]
        expert_weights = {weight for experts in self._experts for weight in experts.parameters()}
        self._other_weights = [weight for weight in self.model.params_with_grad if weight not in expert_weights]
        layers = [part for part in _linear_layers(module) if part.weight not in expert_weights and is_buffered(part.weight)]
        # Layers split by tp use upstream's backward pass, which then calls `accumulate_weight_grad`; `ReplicatedLinear` has its own.
        fuse_gradient_accumulation([part for part in layers if not isinstance(part, ReplicatedLinear)], accumulate_weight_grad)
        overwritten_weights = [part.weight for part in layers]
        if head_uses_kernels and module.post_process and not module.share_embeddings_and_output_weights:
            head = module.output_layer.weight
            overwritten_weights += [head] if is_buffered(head) else []
        self._overwritten_buffers: list[Tensor] = [cast(Any, weight).main_grad for weight in overwritten_weights]
        """Buffers that the first gradients overwrite, except those of experts."""
        self._overwritten_layer_indices = [index_of[weight] for weight in overwritten_weights]
        self._overlap = GradReduceOverlap(module, self.model, index_of, self._zero_stale) if overlaps else None
        self._zeroed_slices: list[Tensor] = []
        self._zeroed_slices_key: tuple[int, ...] = ()

    @property
    def _buffers(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in [*self.model.buffers, *self.model.expert_parallel_buffers]]

    def clear(self, microbatches: int) -> None:
        """Start an update: discard the previous gradients, and allocate buffers again that `release` freed."""
        if self._overlap is not None:
            self._overlap.begin(microbatches)
        allocate(self._buffers)
        stacks = [stack for experts in self._experts for stack in experts.weight_stacks()]
        for stack in stacks:
            stack.mark_stale()
        for buffer in self._overwritten_buffers:
            mark_stale(buffer)
        _zero_tensors(self._buffers_to_zero(stacks))
        for weight in self._other_weights:
            weight.grad_added_to_main_grad = False  # Set by the head's kernels, and by upstream's layers that are split by tp.
        for group in [*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups]:
            group.reset()

    def release(self) -> None:
        """Free the memory of the buffers until the next update."""
        release(self._buffers)

    def finish(self, model: list[torch.nn.Module], **options: object) -> None:
        """Run megatron-core's gradient reductions without its division by tokens: losses are already divided by global counts."""
        if self._overlap is None:
            self._zero_stale(AFTER_BACKWARD)
        else:
            self._overlap.finish()
        with without_router_updates():
            finalize_model_grads(model, None, **options)

    def _zero_stale(self, first_layer: int) -> None:
        """Zero the buffers that received no gradient in this update, for parameters with layer index `first_layer` or higher."""
        experts = (experts for index, experts in zip(self._expert_layer_indices, self._experts, strict=True) if index >= first_layer)
        stale = [buffer for layer_experts in experts for stack in layer_experts.weight_stacks() for buffer in stack.stale_buffers()]
        overwritten = zip(self._overwritten_layer_indices, self._overwritten_buffers, strict=True)
        _zero_tensors([*stale, *(buffer for index, buffer in overwritten if index >= first_layer and take_stale(buffer))])

    def _buffers_to_zero(self, stacks: list[WeightStack]) -> list[Tensor]:
        """The parts of the buffers that first gradients do not overwrite. Cached until the buffers are reallocated."""
        buffers = self._buffers
        key = (len(stacks), *(buffer.data_ptr() for buffer in buffers))
        if key != self._zeroed_slices_key:
            overwritten = [*self._overwritten_buffers, *(grad for stack in stacks for grad in stack.buffers)]
            ranges = sorted((grad.data_ptr(), grad.nbytes) for grad in overwritten)
            self._zeroed_slices = [piece for buffer in buffers for piece in _slices_outside(buffer, ranges)]
            self._zeroed_slices_key = key
        return self._zeroed_slices


def _finalize_grads(
    gradients: weakref.ref[Gradients], model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: object
) -> None:
    live_gradients = gradients()
    assert live_gradients is not None, "the gradient buffers were freed while the model still trains"
    live_gradients.finish(model, **options)


def _zero_tensors(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


def _linear_layers(module: MtpModel) -> list[ColumnParallelLinear | RowParallelLinear | ReplicatedLinear]:
    """The linear layers whose weight gradients `accumulate_weight_grad` computes. Excludes the LM head, which has its own kernels."""
    return [part for part in module.modules() if isinstance(part, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear)]


def _slices_outside(buffer: Tensor, ranges: Iterable[tuple[int, int]]) -> list[Tensor]:
    """The slices of a flat buffer outside `ranges`, a list of (address, bytes) sorted by address."""
    start, size = buffer.data_ptr(), buffer.element_size()
    inner_ranges = [((address - start) // size, nbytes // size) for address, nbytes in ranges if 0 <= address - start < buffer.nbytes]
    ends = [0, *(offset + length for offset, length in inner_ranges)]
    starts = [*(offset for offset, _ in inner_ranges), buffer.numel()]
    return [buffer[previous_end:next_start] for previous_end, next_start in zip(ends, starts, strict=True) if next_start > previous_end]


class ExpertBalance:
    """Expert load balance of an update: metrics, and updates of the router biases. `finish` is collective."""

    def __init__(self, model: torch.nn.Module, bias_update: float) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.bias_update, self.tokens = bias_update, 0

    def begin(self, tokens: int) -> None:
        """Start an update. tokens: number of its tokens on all ranks."""
        self.tokens = tokens
        Router.begin(self.routers, tokens)

    @torch.no_grad()
    def finish(self, *, applied: bool) -> dict[str, float]:
        """Update the biases if the optimizer step was applied, and return metrics (empty without experts)."""
        loads = self._gather_loads()
        if applied and self.bias_update:
            for router, load in zip(self.routers, loads, strict=True):
                # Experts above the mean load become less likely, those below become more likely (DeepSeek-V3, arXiv 2412.19437, section
                # 2.1.2). A router that was not used in this update has no load and keeps its bias, and so does a frozen one.
                if router.weight.requires_grad:
                    router.expert_bias += self.bias_update * (load.mean() - load).sign().float()
        return self._load_metrics(loads) | self._replay_agreement()

    def _replay_agreement(self) -> dict[str, float]:
        """`moe/replay_agreement`: fraction of replayed experts that the routers would also have chosen. Empty without replay."""
        counts = torch.zeros(2, dtype=torch.long, device=torch.cuda.current_device())
        for router in self.routers:
            counts += router.replay_counts
        if dist.get_world_size() > 1:
            dist.all_reduce(counts)
        agreed, replayed = counts.tolist()
        return {"moe/replay_agreement": agreed / replayed} if replayed else {}

    def _gather_loads(self) -> Tensor:
        """Rows per expert of each router [routers, E], summed over all ranks that share the routers."""
        if not self.routers:
            return torch.zeros(0, 1, dtype=torch.double, device=torch.cuda.current_device())
        loads = torch.stack([router.load for router in self.routers])
        if dist.get_world_size() > 1:
            dist.all_reduce(loads, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        return loads.double()

    def _load_metrics(self, loads: Tensor) -> dict[str, float]:
        rows = loads.sum(1)
        relative = loads / loads.mean(1, keepdim=True).clamp(min=1)
        expected = torch.tensor([router.topk * router.passes * self.tokens for router in self.routers], device=loads.device)
        used = rows > 0  # MTP layers that do not train are not computed.
        # On a stage without routers, torch would warn about the deviation of an empty tensor.
        deviation = relative.std(1, correction=0) if self.routers else rows
        router_values = [relative.amax(1), deviation, used.double(), used * expected.double(), rows]
        sums = torch.stack(router_values).sum(1)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        largest, spread, layers, expected_rows, routed_rows = sums.tolist()
        if not layers:
            return {}
        return {"moe/load_max": largest / layers, "moe/load_cv": spread / layers, "moe/dropped": 1 - routed_rows / expected_rows}
