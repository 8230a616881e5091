"""Forward and backward passes over packed microbatches, through megatron-core's pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from mtpctl.families.shape import ModelShape
from mtpctl.model.gpt import Hidden, MtpModel
from mtpctl.model.parallel import largest, reduced
from mtpctl.plan.partition import partition
from mtpctl.trainer.batch import MicroBatch, Sequence, check, dummy_batch, pack
from mtpctl.trainer.config import EngineConfig
from mtpctl.trainer.objective import Sums

MicroBatchLoss = Callable[[MicroBatch, Hidden], tuple[Tensor, Sums]]
"""The loss of a microbatch (scalar, differentiable in a training pass) and its metric sums, on the last pipeline stage."""

Passes = list[list[int]]
"""The microbatches of a dp rank, as indices into its sequences."""


def passes_of(sequences: list[Sequence], config: EngineConfig) -> Passes:
    """Divide this dp rank's own sequences into microbatches. Collective; with expert parallelism every rank gets the same number."""
    parts = partition([len(s.token_ids) for s in sequences], config.tokens_per_microbatch, 1)[0] if sequences else []
    if config.parallel.ep > 1:
        parts += [[] for _ in range(largest(len(parts)) - len(parts))]
    return parts


def micro_batches(
    sequences: list[Sequence],
    depths: int,
    config: EngineConfig,
    shape: ModelShape,
    device: torch.device,
    *,
    sequence_parallel: bool,
    passes: Passes | None = None,
) -> list[MicroBatch]:
    """Pack the microbatches of this dp rank, with the rows of the first `depths` MTP depths.

    passes: the microbatches, if the sequences are this rank's own. None if all ranks have the same sequences, which are then distributed.
    Raises UserError for a sequence that the model cannot process.
    """
    check(sequences, shape)
    parts = passes
    if parts is None:
        dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        parts = partition([len(s.token_ids) for s in sequences], config.tokens_per_microbatch, dp)[dp_rank]
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    layout = {"cp_rank": cp_rank, "cp": cp, "tp": config.parallel.tp if sequence_parallel else 1}
    if config.parallel.ep == 1:
        # Dp ranks may have different numbers of microbatches, because their collectives follow the last pass. With expert parallelism every
        # pass has collectives, so the numbers must be equal.
        parts = [part for part in parts if part] or [[]]
    idle = sequences or [Sequence(np.zeros(2), 1, np.zeros(1))]
    return [pack(sequences, part, depths, device, **layout) if part else dummy_batch(idle, depths, device, **layout) for part in parts]


def run_passes(
    model: MtpModel | DistributedDataParallel, micros: list[MicroBatch], loss: MicroBatchLoss, *, tokens: int, forward_only: bool
) -> Sums:
    """Run forward passes over microbatches of at most `tokens` tokens, and backward passes unless `forward_only`.

    Returns the metric sums of `loss` over all microbatches and dp ranks.
    """

    def micro_loss(micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Tensor, Sums]:
        no_tokens = torch.zeros((), dtype=torch.int)
        if micro.dummy and forward_only:
            return hidden.trunk.sum(), no_tokens, {}
        with record_function("mtpctl/log-probs and losses"):
            total, sums = loss(micro, hidden)
        return total, no_tokens, sums

    def forward(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Hidden | Tensor, Callable[[Hidden], object]]:
        micro = next(iterator)
        with record_function("mtpctl/forward"):
            return model(micro.input_ids, micro.packing, depths=len(micro.drafts)), partial(micro_loss, micro)

    parts = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(micros),
        model=model,
        num_microbatches=len(micros),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    sums: Sums = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums[name] + value if name in sums else value
    return reduced(sums)
