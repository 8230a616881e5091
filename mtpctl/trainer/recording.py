"""The routes that a scoring pass took, as arrays by sequence, which a later pass can be given (`mtpctl.routes`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state

from mtpctl.model.gpt import MtpModel
from mtpctl.model.replay import DecoderLayer, chosen_routes
from mtpctl.routes import Routes, RouteShape
from mtpctl.trainer.batch import MicroBatch
from mtpctl.trainer.scoring import gathered


def recording(micros: list[MicroBatch]) -> list[MicroBatch]:
    """The same micro-batches, whose routes are kept in a pass over them."""
    return [replace(micro, packing=replace(micro.packing, chosen={})) for micro in micros]


@torch.no_grad()
def recorded_routes(model: MtpModel, micros: list[MicroBatch], shape: RouteShape, count: int, *, own: bool) -> list[Routes]:
    """The routes of all `count` sequences after a pass over micro-batches of `recording`, on every rank that has the sequences: all, or
    with `own` those of this dp rank. All ranks call together."""
    mine: dict[tuple[int, int], Routes] = {}
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer) and module.place is not None]
    for micro in micros:
        for layer in layers:
            assert layer.place is not None
            row = chosen_routes(micro.packing, layer).cpu().numpy().astype(shape.dtype)
            place = 0
            # An idle micro-batch is another's sequence; where a sample only fills up the row, it comes last.
            for index, length in zip([] if micro.idle else micro.order, micro.packing.sample_lengths, strict=False):
                # A copy: the rest of the row is not to stay with it. The last token's routes serve nobody.
                mine[index, layer.place] = row[place : place + length - 1].copy()
                place += length
    # Ranks that share a row have all found the same, and where all are asked one of them tells.
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    alone = own or parallel_state.get_data_parallel_world_size() == parallel_state.get_pipeline_model_parallel_world_size() == 1
    found = gathered(mine if first or alone else {}, own=own)
    return [np.stack([found[index, place] for place in range(len(shape.layers))], axis=1) for index in range(count)]
