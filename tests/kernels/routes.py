"""Routes that are drawn: which experts each token visits."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn_routes(tokens: int, experts: int, k: int) -> Tensor:
    """[tokens, experts] bool, k set for each token; nobody visits the last expert, unless all are wanted."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, max(k, experts - 1), generator=generator).topk(k, dim=1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
