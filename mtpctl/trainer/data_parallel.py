"""The model as data-parallel ranks train it: gradient buffers, and their reduction over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from mtpctl.compat import router_counters
from mtpctl.kernels.grouped import Stack
from mtpctl.model.experts import Experts
from mtpctl.trainer.offload import allocate, release


class Gradients:
    """The fp32 buffers of all gradients, which the pipeline schedule reduces after its last backward pass.

    The gradients of an update's first micro-batch replace what the buffers of experts hold; all else is zeroed before and added to. For a
    mixture of experts that spares most of a pass over the buffers, which are larger than all that a micro-batch computes with.
    """

    def __init__(self, module: MegatronModule, config: TransformerConfig, *, distributed_optimizer: bool) -> None:
        config.finalize_model_grads_func = self._finish
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=False,
        )
        self.model = DistributedDataParallel(config, settings, module)
        self._experts = [part for part in module.modules() if isinstance(part, Experts)]
        of_experts = {weight for experts in self._experts for weight in experts.parameters()}
        self._others = [weight for weight in self.model.params_with_grad if weight not in of_experts]
        self._zeroed: list[Tensor] = []
        self._zeroed_for: tuple[int, ...] = ()

    @property
    def _buffers(self) -> list[Tensor]:
        return [buffer.grad_data for buffer in [*self.model.buffers, *self.model.expert_parallel_buffers]]

    def clear(self) -> None:
        """Begin an update: what the buffers hold no longer counts."""
        allocate(self._buffers)
        replaced = [stack for experts in self._experts for stack in experts.stacks()]
        for stack in replaced:
            stack.replaces = True
        for part in self._parts_beside(replaced):
            part.zero_()
        for weight in self._others:
            weight.grad_added_to_main_grad = False  # what the head's kernels set; experts' gradients never reach megatron-core's hook
        for group in [*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups]:
            group.reset()

    def release(self) -> None:
        """Free the memory of the buffers until the next update."""
        release(self._buffers)

    def _finish(self, model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: object) -> None:
        """megatron-core's gradient reductions without its division by tokens, since losses are divided by global counts already."""
        for experts in self._experts:
            for stack in experts.stacks():
                stack.zero_unreplaced()
        with router_counters.not_sought():
            finalize_model_grads(model, None, **options)

    def _parts_beside(self, replaced: list[Stack]) -> list[Tensor]:
        """The buffers without the places of these weights' gradients."""
        buffers = self._buffers
        now = (len(replaced), *(buffer.data_ptr() for buffer in buffers))
        if now != self._zeroed_for:
            places = sorted((grad.data_ptr(), grad.nbytes) for stack in replaced for grad in stack.buffers)
            self._zeroed = [part for buffer in buffers for part in _beside(buffer, places)]
            self._zeroed_for = now
        return self._zeroed


def _beside(buffer: Tensor, places: Iterable[tuple[int, int]]) -> list[Tensor]:
    """The parts of a flat buffer outside of these places (address, bytes), which are in order."""
    start, size = buffer.data_ptr(), buffer.element_size()
    inside = [((at - start) // size, nbytes // size) for at, nbytes in places if 0 <= at - start < buffer.nbytes]
    ends = [0, *(at + length for at, length in inside)]
    starts = [*(at for at, _ in inside), buffer.numel()]
    return [buffer[end:begin] for end, begin in zip(ends, starts, strict=True) if begin > end]
