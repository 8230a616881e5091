"""Replay of routes: decoder layers whose router follows those of the packing, and the routes that they took."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerLayer
from torch import Tensor

from mtpctl.kernels.routing import ReplayedRoutes
from mtpctl.model.packing import Packing
from mtpctl.model.router import Choice, Router


class DecoderLayer(TransformerLayer):
    """A layer of the decoder. `place` is where it stands among those with experts; None for a layer without.

    The packing passes through recomputation with the layer's other arguments, so the routes of a backward pass are those of its forward
    pass. MTP layers are upstream's `TransformerLayer`, whose routers see no routes.
    """

    place: int | None = None

    def forward(self, *args: object, packed_seq_params: Packing, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        run = super().forward
        if self.place is None or (packed_seq_params.routes is None and packed_seq_params.chosen is None):
            return run(*args, packed_seq_params=packed_seq_params, **kwargs)
        router: Router = self.mlp.router
        recorded = packed_seq_params.chosen is not None
        router.choice = choice = Choice(self._replay(packed_seq_params, self.place), recorded=recorded)
        try:
            result: tuple[Tensor, Tensor | None] = run(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            router.choice = None
        if packed_seq_params.chosen is not None:
            packed_seq_params.chosen[self.place] = choice.chosen.to(torch.int16)
        return result

    def _replay(self, packing: Packing, place: int) -> ReplayedRoutes | None:
        """The routes of this layer's tokens."""
        if packing.routes is None or packing.routed is None:
            return None
        experts, replayed = packing.routes[:, place], packing.routed
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            experts, replayed = (x.chunk(tp.size())[tp.rank()] for x in (experts, replayed))
        return ReplayedRoutes(experts, replayed)


def number_layers(model: torch.nn.Module, layers: tuple[int, ...]) -> None:
    """Tell each decoder layer its place among `layers`, the decoder's layers with experts, counted from 0."""
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            number = module.layer_number - 1
            module.place = layers.index(number) if number in layers else None


def chosen_routes(packing: Packing, layer: DecoderLayer) -> Tensor:
    """The experts of the row's tokens in `layer`, [T, k], from what the ranks that share the row have put into `chosen`.

    They call together, after the pass.
    """
    assert packing.chosen is not None and layer.place is not None
    found = packing.chosen[layer.place].int()  # gloo gathers no int16
    if layer.config.sequence_parallel:
        found = gather_from_sequence_parallel_region(found, group=layer.pg_collection.tp)
    if layer.config.context_parallel_size > 1:
        found = gather_from_sequence_parallel_region(found, group=layer.pg_collection.cp)[packing.row_order]
    return found
