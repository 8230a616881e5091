"""Gradient buffers and expert loads, and their reduction over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mtpctl.compat.megatron_core import fill_buffers, without_router_updates
from mtpctl.kernels.grouped import WeightStack
from mtpctl.kernels.main_grad import accumulate_weight_grad, is_buffered, mark_stale, take_stale
from mtpctl.model.experts import Experts
from mtpctl.model.gpt import MtpModel
from mtpctl.model.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from mtpctl.model.router import Router
from mtpctl.trainer.offload import allocate, release
from mtpctl.trainer.overlap import AFTER_BACKWARD, Overlap, layer_indices, layout


class Gradients:
    """The fp32 buffers of all gradients. They are reduced over ranks during and after the last backward pass (`mtpctl.trainer.overlap`).

    In each update the first gradients of linear layers, experts and LM head overwrite their buffers, which saves zeroing and reading them:
    buffers are larger than anything else that a microbatch reads. The buffers of other weights are zeroed at the start of an update.
    """

    def __init__(self, module: MtpModel, config: TransformerConfig, *, distributed_optimizer: bool, head_by_kernels: bool) -> None:
        """head_by_kernels: all gradients of the head's weight are written by `mtpctl.kernels`, none by autograd."""
        # A weak reference, because Megatron-Bridge caches the configs it exports with, which must not keep the process groups alive.
        config.finalize_model_grads_func = partial(_finish, weakref.ref(self))
        overlaps = parallel_state.get_data_parallel_group(with_context_parallel=True).size() > 1
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=overlaps
        )
        index_of = layer_indices(module)
        buckets = layout(index_of, distributed_optimizer=distributed_optimizer) if overlaps else None
        self.model = DistributedDataParallel(config, settings, module, full_param_layout=buckets)
        # The bucket groups keep the asynchronous settings. The hooks on parameters must not start reductions.
        self.model.ddp_config = replace(settings, overlap_grad_reduce=False)
        self._experts = [part for part in module.modules() if isinstance(part, Experts)]
        self._expert_indices = [
            max((index_of[weight] for weight in experts.parameters()), default=AFTER_BACKWARD) for experts in self._experts
        ]
        of_experts = {weight for experts in self._experts for weight in experts.parameters()}
        self._others = [weight for weight in self.model.params_with_grad if weight not in of_experts]
        layers = [part for part in _linear_layers(module) if part.weight not in of_experts and is_buffered(part.weight)]
        # Layers split by tp use upstream's backward pass, which then calls this function; `ReplicatedLinear` has its own.
        fill_buffers([part for part in layers if not isinstance(part, ReplicatedLinear)], accumulate_weight_grad)
        overwritten = [part.weight for part in layers]
        if head_by_kernels and module.post_process and not module.share_embeddings_and_output_weights:
            head = module.output_layer.weight
            overwritten += [head] if is_buffered(head) else []
        self._overwritten: list[Tensor] = [cast(Any, weight).main_grad for weight in overwritten]
        """Buffers that the first gradients overwrite, except those of experts."""
        self._overwritten_indices = [index_of[weight] for weight in overwritten]
        self._overlap = Overlap(module, self.model, index_of, self._zero_stale) if overlaps else None
        self._zeroed: list[Tensor] = []
        self._zeroed_key: tuple[int, ...] = ()

    @property
    def _buffers(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in [*self.model.buffers, *self.model.expert_parallel_buffers]]

    def clear(self, microbatches: int) -> None:
        """Start an update: discard the previous gradients, and allocate buffers again that `release` freed."""
        if self._overlap is not None:
            self._overlap.begin(microbatches)
        allocate(self._buffers)
        stacks = [stack for experts in self._experts for stack in experts.stacks()]
        for stack in stacks:
            stack.mark_stale()
        for buffer in self._overwritten:
            mark_stale(buffer)
        _zero(self._buffers_to_zero(stacks))
        for weight in self._others:
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

    def _zero_stale(self, first: int) -> None:
        """Zero buffers that received no gradient in this update, of parameters of layers from index `first` on."""
        experts = (experts for index, experts in zip(self._expert_indices, self._experts, strict=True) if index >= first)
        stale = [buffer for each in experts for stack in each.stacks() for buffer in stack.stale_buffers()]
        others = zip(self._overwritten_indices, self._overwritten, strict=True)
        _zero([*stale, *(buffer for index, buffer in others if index >= first and take_stale(buffer))])

    def _buffers_to_zero(self, stacks: list[WeightStack]) -> list[Tensor]:
        """The parts of the buffers that first gradients do not overwrite. Cached until the buffers are reallocated."""
        buffers = self._buffers
        key = (len(stacks), *(buffer.data_ptr() for buffer in buffers))
        if key != self._zeroed_key:
            overwritten = [*self._overwritten, *(grad for stack in stacks for grad in stack.buffers)]
            ranges = sorted((grad.data_ptr(), grad.nbytes) for grad in overwritten)
            self._zeroed = [part for buffer in buffers for part in _outside(buffer, ranges)]
            self._zeroed_key = key
        return self._zeroed


def _finish(gradients: weakref.ref[Gradients], model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: object) -> None:
    target = gradients()
    assert target is not None, "the gradients outlive the training of the model"
    target.finish(model, **options)


def _zero(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


def _linear_layers(module: MtpModel) -> list[ColumnParallelLinear | RowParallelLinear | ReplicatedLinear]:
    """The linear layers whose gradients `accumulate_weight_grad` adds to buffers. The LM head's kernels add their own."""
    return [part for part in module.modules() if isinstance(part, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear)]


def _outside(buffer: Tensor, ranges: Iterable[tuple[int, int]]) -> list[Tensor]:
    """The parts of a flat buffer outside `ranges`, which are (address, bytes) sorted by address."""
    start, size = buffer.data_ptr(), buffer.element_size()
    inside = [((at - start) // size, nbytes // size) for at, nbytes in ranges if 0 <= at - start < buffer.nbytes]
    ends = [0, *(at + length for at, length in inside)]
    starts = [*(at for at, _ in inside), buffer.numel()]
    return [buffer[end:begin] for end, begin in zip(ends, starts, strict=True) if begin > end]


class Balance:
    """Expert load balance of an update: metrics, and updates of the router biases. Methods are collective."""

    def __init__(self, model: torch.nn.Module, bias_update: float) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.bias_update, self.tokens = bias_update, 0

    def begin(self, tokens: int) -> None:
        """Start an update on this number of tokens of all ranks."""
        self.tokens = tokens
        Router.begin(self.routers, tokens)

    @torch.no_grad()
    def finish(self, *, applied: bool) -> dict[str, float]:
        """Update the biases if the optimizer step was applied, and return metrics (empty without experts)."""
        loads = self._loads()
        if applied and self.bias_update:
            for router, load in zip(self.routers, loads, strict=True):
                # Experts above the mean load become less likely, those below become more likely (DeepSeek-V3, arXiv 2412.19437, section
                # 2.1.2). A router that was not used in this update has no load and keeps its bias, and so does a frozen one.
                if router.weight.requires_grad:
                    router.expert_bias += self.bias_update * (load.mean() - load).sign().float()
        return self._metrics(loads) | self._agreement()

    def _agreement(self) -> dict[str, float]:
        """`moe/replay_agreement`: fraction of replayed experts that the routers would also have chosen. Empty without replay."""
        counts = torch.zeros(2, dtype=torch.long, device=torch.cuda.current_device())
        for router in self.routers:
            counts += router.replayed
        if dist.get_world_size() > 1:
            dist.all_reduce(counts)
        agreed, replayed = counts.tolist()
        return {"moe/replay_agreement": agreed / replayed} if replayed else {}

    def _loads(self) -> Tensor:
        """Rows per expert of each router [routers, E], over all ranks that share the routers."""
        if not self.routers:
            return torch.zeros(0, 1, dtype=torch.double, device=torch.cuda.current_device())
        loads = torch.stack([router.load for router in self.routers])
        if dist.get_world_size() > 1:
            dist.all_reduce(loads, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        return loads.double()

    def _metrics(self, loads: Tensor) -> dict[str, float]:
        rows = loads.sum(1)
        relative = loads / loads.mean(1, keepdim=True).clamp(min=1)
        expected = torch.tensor([router.topk * router.passes * self.tokens for router in self.routers], device=loads.device)
        used = rows > 0  # MTP layers that do not train are not computed.
        # On a stage without routers, torch would warn about the deviation of an empty tensor.
        deviation = relative.std(1, correction=0) if self.routers else rows
        parts = [relative.amax(1), deviation, used.double(), used * expected.double(), rows]
        sums = torch.stack(parts).sum(1)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        largest, spread, layers, expected_rows, routed_rows = sums.tolist()
        if not layers:
            return {}
        return {"moe/load_max": largest / layers, "moe/load_cv": spread / layers, "moe/dropped": 1 - routed_rows / expected_rows}
