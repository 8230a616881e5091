"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) in plain PyTorch, chunk by chunk.

For every head a state S [key dim, value dim] runs over the tokens: it decays by exp(g_t), then the value that key k_t finds
in it is moved by beta_t towards v_t; the output is q_t S. Within a chunk of C tokens all of that is triangular algebra, so
that only the state at chunk borders is computed one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k [B, L, heads, key dim], v [B, L, heads, value dim], g, beta [B, L, heads] → [B, L, heads, value dim].

    q and k are normed, g is the logarithm of the decay. Computed in fp32, the state before the first token is 0.
    """
    dtype, length = v.dtype, q.shape[1]
    chunk = min(CHUNK, length)
    spare = -length % chunk

    def chunks(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, spare))
        return x.unflatten(1, (-1, chunk)).movedim(3, 1)  # [B, heads, chunks, C, …]

    q, k, v, g, beta = (chunks(x) for x in (q * q.shape[-1] ** -0.5, k, v, g, beta))
    g = g.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    weighted = k * beta[..., None]
    within = (weighted @ k.mT * decay).tril(-1)
    right = torch.cat([v * beta[..., None], weighted * g.exp()[..., None]], dim=-1)
    # (1 + within) is lower triangular with a unit diagonal.
    solved = torch.linalg.solve_triangular(within, right, upper=False, unitriangular=True)
    new, carried = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside = q @ k.mT * decay
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        moved = new[:, :, i] - carried[:, :, i] @ state
        outputs.append((q[:, :, i] * g[:, :, i, :, None].exp()) @ state + inside[:, :, i] @ moved)
        last = g[:, :, i, -1:, None]
        state = state * last.exp() + (k[:, :, i] * (last - g[:, :, i, :, None]).exp()).mT @ moved
    out = torch.cat(outputs, dim=2)[:, :, :length]
    return out.movedim(1, 2).to(dtype)
