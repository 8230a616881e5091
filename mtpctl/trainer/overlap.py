"""Reductions of gradients over ranks that overlap with the last backward pass of an update.

megatron-core can start the reduction of a bucket when autograd has visited all of its parameters, but it requires a gradient from autograd
for each of them in every update. Ours bypass autograd, and some parameters have no gradient in some updates. Therefore a bucket's reduction
starts when the backward pass has left the layers of the bucket in all microbatches. Buckets are reduced in the same order on all ranks;
those that the backward pass has not released are reduced after it. The last is that of the embedding, which overlaps with nothing, so only
the rows that have a gradient are exchanged.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout, pad_bucket_end, pad_param_start
from torch import Tensor

from mtpctl.model.gpt import MtpModel

MIN_BUCKET_NUMEL = 40_000_000
"""Minimum size of a bucket of several layers: collectives of small buckets are bound by latency. megatron-core's default."""
SPARSE_SHARE = 0.5
"""An embedding's gradient is exchanged as rows if the rows of all ranks together are at most this fraction of the vocabulary."""
SLICE_NUMEL = 1 << 25
"""Numbers per rank that an exchange of rows sends at a time."""
AFTER_BACKWARD = -1
"""Layer index of parameters whose gradients are complete only after the backward pass."""


def layer_indices(module: MtpModel) -> dict[Tensor, int]:
    """Map each parameter to the decoder layer of this stage whose backward pass completes its gradient.

    Parts that follow the layers have the number of layers as their index: their gradients are complete before the last layer's backward
    pass begins.
    """
    return {parameter: _layer_index(name, len(module.decoder.layers)) for name, parameter in module.named_parameters()}


def _layer_index(name: str, layers: int) -> int:
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        return int(match[1])
    return layers if name.startswith(("decoder.final_layernorm.", "mtp.", "output_layer.")) else AFTER_BACKWARD


def layout(index_of: Mapping[Tensor, int], *, distributed_optimizer: bool) -> FullParamLayout:
    """megatron-core's order of parameters in buffers, with buckets that end at layers.

    A weight that pipeline stages share (`shared_embedding`) has a separate bucket: the distributed optimizer gives each rank a part of
    every bucket, and megatron-core adds the parts of the first and the last stage, which must be the same rows.
    """
    layouts = {}
    for key, (parameters, indices) in group_params_for_buffers([p for p in index_of if p.requires_grad], True).items():
        ranks = _group(expert=key.is_expert_parallel).size()
        buckets = PerBufferParamLayout(param_indices=indices, num_optimizer_shards=ranks if distributed_optimizer else None)
        start = end = 0
        for parameter, following in itertools.zip_longest(reversed(parameters), parameters[-2::-1]):
            begin = pad_param_start(end) if distributed_optimizer else end
            end = begin + parameter.numel()
            buckets.param_index_map[parameter] = (begin, end, len(buckets.bucket_indices))
            if following is None or (ranks > 1 and _ends_bucket(parameter, following, index_of, end - start)):
                buckets.per_bucket_numel_unpadded.append(end - start)
                # The distributed optimizer divides each bucket over the ranks.
                end = pad_bucket_end(end, ranks, False) if distributed_optimizer else end
                buckets.bucket_indices.append((start, end))
                start = end
        layouts[key] = buckets
    return FullParamLayout(layouts)


def _ends_bucket(parameter: Tensor, following: Tensor, index_of: Mapping[Tensor, int], numel: int) -> bool:
    if any(getattr(each, "shared_embedding", False) or index_of[each] == AFTER_BACKWARD for each in (parameter, following)):
        return True
    return index_of[parameter] != index_of[following] and numel >= MIN_BUCKET_NUMEL


def _group(*, expert: bool) -> dist.ProcessGroup:
    group: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group() if expert else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return group


class Overlap:
    """Starts the reductions of `model`, whose bucket groups must be asynchronous."""

    def __init__(
        self, module: MtpModel, model: DistributedDataParallel, index_of: Mapping[Tensor, int], prepare: Callable[[int], None]
    ) -> None:
        """prepare(index): called before the reductions of buckets with gradients of layers from this index on."""
        self._prepare = prepare
        groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        # In order of readiness, which is the same on all ranks, because they have the same parameters.
        self._groups = sorted(((min(index_of[p] for p in group.params), group) for group in groups), key=lambda entry: -entry[0])
        embedding = getattr(module, "embedding", None)
        self._embedding: Any = None
        # The head gives a tied weight a gradient in all rows. The distributed optimizer reduces to shards, which do not end at rows.
        if embedding is not None and not (module.share_embeddings_and_output_weights or model.ddp_config.use_distributed_optimizer):
            self._embedding = embedding.word_embeddings.weight
        self._microbatches, self._started = 0, 0
        self._input_grads: dict[int, int] = {}
        parts: list[tuple[int, torch.nn.Module]] = list(enumerate(module.decoder.layers))
        if module.decoder.final_layernorm is not None:
            parts.append((len(parts), module.decoder.final_layernorm))
        for index, part in parts:
            part.register_forward_pre_hook(partial(self._watch, index), with_kwargs=True)

    def begin(self, microbatches: int) -> None:
        """Start an update with this number of backward passes. Raises RuntimeError if the previous update failed in the middle of its
        reductions, which other ranks may not have started."""
        if any(group.grad_reduce_handle is not None for _, group in self._groups):
            raise RuntimeError("the previous update failed while its gradients were being reduced; start the trainer again")
        self._microbatches, self._started, self._input_grads = microbatches, 0, {}

    def finish(self) -> None:
        """Start the remaining reductions, in the same order."""
        self._start(AFTER_BACKWARD)

    def _watch(self, index: int, _: torch.nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
        """Call `_on_input_grad` when the gradient of the layer's input is complete.

        Autograd runs operations in reverse order of their creation. It computes the input's gradient after those of all parameters used
        since, unless the input is a leaf: leaves take precedence, so they are skipped, and the layer's reductions start with those of the
        next one. This is the case for the first layer of later pipeline stages, and if a recomputed layer runs for the second time. Its
        input in the first pass is the tensor of the outer graph.
        """
        state = options.get("hidden_states", args[0] if args else None)
        if isinstance(state, Tensor) and state.grad_fn is not None:
            state.register_hook(partial(self._on_input_grad, index))

    def _on_input_grad(self, index: int, _: Tensor) -> None:
        count = self._input_grads[index] = self._input_grads.get(index, 0) + 1
        if count > self._microbatches:
            raise RuntimeError(f"decoder layer {index} ran more than once per microbatch; its gradients have been reduced already")
        if count == self._microbatches:
            self._start(index)

    def _start(self, index: int) -> None:
        """Reduce the buckets of all gradients of layers from `index` on."""
        ready = sum(lowest >= index for lowest, _ in self._groups)
        if ready > self._started:
            self._prepare(index)
        while self._started < ready:
            group = self._groups[self._started][1]
            if group.params == {self._embedding} and sum_sparse_rows(self._embedding.main_grad, group.data_parallel_group):
                group.grad_reduce_finished = True
            else:
                group.start_grad_sync()
            self._started += 1


def sum_sparse_rows(grad: Tensor, group: dist.ProcessGroup) -> bool:
    """Sum grad [vocab, H] over ranks by exchanging the rows that are not zero, unless there are too many. Returns whether it did."""
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
        own = len(rows[start : start + size])
        sent_rows[:own], sent_values[:own] = rows[start : start + size], values[start : start + size]
        all_rows, all_values = rows.new_empty(ranks * size), values.new_empty(ranks * size, grad.shape[1])
        dist.all_gather_into_tensor(all_rows, sent_rows, group=group)
        dist.all_gather_into_tensor(all_values, sent_values, group=group)
        # One rank after the other, so that all ranks add in the same order.
        for count, rank_rows, rank_values in zip(counts, all_rows.split(size), all_values.split(size), strict=True):
            received = min(max(count - start, 0), size)
            grad.index_add_(0, rank_rows[:received], rank_values[:received])
    return True
