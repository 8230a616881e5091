"""The trunk's states that an MTP depth learns from: those that its labels were sampled from, `depth` tokens behind the draft's own.

With context parallelism a row may lie on this rank and its teacher at the beginning of the next block, on another one. So the first `depth`
states of every block but the first are exchanged, which is all that can be missing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.model.packing import Packing


def teacher_states(packing: Packing, state: Tensor, targets: Tensor, depth: int, group: dist.ProcessGroup | None) -> Tensor:
    """state [t, H] at `targets` [n], places in the whole row that lie `depth` tokens behind tokens of this rank. Without gradient.

    All ranks of `group`, which share the row's tokens, call together.
    """
    state = state.detach()
    if group is None:
        return state[targets]
    size = len(packing.tokens) // 2
    ahead = min(depth, size)
    blocks = len(packing.here) // size
    places = (torch.arange(1, blocks, device=state.device)[:, None] * size + torch.arange(ahead, device=state.device)).flatten()
    held = packing.here[places]
    borders = torch.where((held >= 0)[:, None], state[held.clamp(min=0)], 0)
    dist.all_reduce(borders, group=group)
    here = packing.here[targets]
    border = ((targets // size - 1) * ahead + targets % size).clamp(0, max(0, len(borders) - 1))
    return torch.where((here >= 0)[:, None], state[here.clamp(min=0)], borders[border])
