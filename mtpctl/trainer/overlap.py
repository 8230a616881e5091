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

BUCKET_NUMBERS = 40_000_000
"""Minimum size of a bucket of several layers: collectives of small buckets are bound by latency. megatron-core's default."""
SPARSE_SHARE = 0.5
"""An embedding's gradient is exchanged as rows if the rows of all ranks together are at most this fraction of the vocabulary."""
LAST = -1
"""Place of parameters whose gradients are complete only after the backward pass."""


def places(module: MtpModel) -> dict[Tensor, int]:
    """When each parameter's gradient is complete: the index of its decoder layer on this stage, or the number of layers for the parts that
    follow them, whose gradients are complete before the last layer's backward pass begins."""
    return {parameter: _place(name, len(module.decoder.layers)) for name, parameter in module.named_parameters()}


def _place(name: str, layers: int) -> int:
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        return int(match[1])
    return layers if name.startswith(("decoder.final_layernorm.", "mtp.", "output_layer.")) else LAST


def layout(place_of: Mapping[Tensor, int], *, distributed_optimizer: bool) -> FullParamLayout:
    """megatron-core's order of parameters in buffers, with buckets that end at layers."""
    layouts = {}
    for key, (parameters, indices) in group_params_for_buffers([p for p in place_of if p.requires_grad], True).items():
        ranks = _group(expert=key.is_expert_parallel).size()
        buckets = PerBufferParamLayout(param_indices=indices, num_optimizer_shards=ranks if distributed_optimizer else None)
        start = end = 0
        for parameter, following in itertools.zip_longest(reversed(parameters), parameters[-2::-1]):
            begin = pad_param_start(end) if distributed_optimizer else end
            end = begin + parameter.numel()
            buckets.param_index_map[parameter] = (begin, end, len(buckets.bucket_indices))
            if following is None or (ranks > 1 and _ends_bucket(place_of[parameter], place_of[following], end - start)):
                buckets.per_bucket_numel_unpadded.append(end - start)
                # The distributed optimizer divides each bucket over the ranks.
                end = pad_bucket_end(end, ranks, False) if distributed_optimizer else end
                buckets.bucket_indices.append((start, end))
                start = end
        layouts[key] = buckets
    return FullParamLayout(layouts)


def _ends_bucket(place: int, following: int, numbers: int) -> bool:
    return place != following and (numbers >= BUCKET_NUMBERS or following == LAST)


def _group(*, expert: bool) -> dist.ProcessGroup:
    group: dist.ProcessGroup = (
        parallel_state.get_expert_data_parallel_group() if expert else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return group


class Overlap:
    """Starts the reductions of `model`, whose bucket groups must be asynchronous."""

    def __init__(
        self, module: MtpModel, model: DistributedDataParallel, place_of: Mapping[Tensor, int], prepare: Callable[[int], None]
    ) -> None:
        """prepare(place): called before the reductions of buckets with gradients from this place on."""
        self._prepare = prepare
        groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        # In order of readiness, which is the same on all ranks, because they have the same parameters.
        self._groups = sorted(((min(place_of[p] for p in group.params), group) for group in groups), key=lambda entry: -entry[0])
        embedding = getattr(module, "embedding", None)
        self._embedding: Any = None
        # The head gives a tied weight a gradient in all rows. The distributed optimizer reduces to shards, which do not end at rows.
        if embedding is not None and not (module.share_embeddings_and_output_weights or model.ddp_config.use_distributed_optimizer):
            self._embedding = embedding.word_embeddings.weight
        self._microbatches, self._started = 0, 0
        self._crossings: dict[int, int] = {}
        parts: list[tuple[int, torch.nn.Module]] = list(enumerate(module.decoder.layers))
        if module.decoder.final_layernorm is not None:
            parts.append((len(parts), module.decoder.final_layernorm))
        for place, part in parts:
            part.register_forward_pre_hook(partial(self._watch, place), with_kwargs=True)

    def begin(self, microbatches: int) -> None:
        """Start an update with this number of backward passes."""
        for _, group in self._groups:
            if group.grad_reduce_handle is not None:  # of an update that failed
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
        self._microbatches, self._started, self._crossings = microbatches, 0, {}

    def finish(self) -> None:
        """Start the remaining reductions, in the same order."""
        assert all(count <= self._microbatches for count in self._crossings.values()), "a layer ran more than once per microbatch"
        self._start(LAST)

    def _watch(self, place: int, _: torch.nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
        """Call `_cross` when the gradient of the input is complete.

        Autograd runs operations in reverse order of their creation. It computes the input's gradient after those of all parameters used
        since, unless the input is a leaf: leaves take precedence. If the layer is recomputed, its input in the first pass is the tensor
        of the outer graph, and in the second pass a leaf.
        """
        state = options.get("hidden_states", args[0] if args else None)
        if isinstance(state, Tensor) and state.grad_fn is not None:
            state.register_hook(partial(self._cross, place))

    def _cross(self, place: int, _: Tensor) -> None:
        self._crossings[place] = self._crossings.get(place, 0) + 1
        if self._crossings[place] == self._microbatches:
            self._start(place)

    def _start(self, place: int) -> None:
        """Reduce the buckets of all gradients from `place` on."""
        ready = sum(lowest >= place for lowest, _ in self._groups)
        if ready > self._started:
            self._prepare(place)
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
    counts = rows.new_empty(ranks)
    dist.all_gather_into_tensor(counts, rows.new_tensor([len(rows)]), group=group)
    numbers = counts.tolist()
    most = max(numbers)
    if most * ranks > SPARSE_SHARE * len(grad):
        return False
    if not most:
        return True
    indices, values = rows.new_zeros(most), grad.new_zeros(most, grad.shape[1])
    indices[: len(rows)], values[: len(rows)] = rows, grad[rows]
    all_indices, all_values = indices.new_empty(ranks * most), values.new_empty(ranks * most, grad.shape[1])
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    grad.index_fill_(0, rows, 0.0)
    # One rank after the other, so that all ranks have the same sums.
    for number, its_indices, its_values in zip(numbers, all_indices.split(most), all_values.split(most), strict=True):
        grad.index_add_(0, its_indices[:number], its_values[:number])
    return True
