"""Gated DeltaNet (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5, on packed sequences.

Parameters, tensor parallelism and checkpoints are those of megatron-core's `GatedDeltaNet`. The forward pass differs: it separates packed
samples in the convolution and the recurrence, and it also runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as UpstreamGatedDeltaNet
from torch import Tensor

from mtpctl.compat import megatron_core
from mtpctl.kernels import exact_delta
from mtpctl.kernels.exact_delta import DeltaCache, DeltaWeights
from mtpctl.kernels.exact_grad import with_gradients_of
from mtpctl.model.layers import is_bitwise
from mtpctl.model.packing import Packing, convolve, exchange_heads, heads_to_tokens, local_channels, local_heads

try:
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:
    causal_conv1d = chunk_gated_delta_rule = None

GAIN = "gain"
"""Last part of the checkpoint key of the output norm."""
CHUNK = 64
"""Tokens per chunk of `gated_delta_rule`."""


class GatedDeltaNet(UpstreamGatedDeltaNet):
    """[t, 1, H] → [t, 1, H]. Megatron-Bridge maps its parameters by the name of the class, so do not rename it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        with megatron_core.without_flash_linear_attention():
            super().__init__(*args, **kwargs)
        self.out_norm.is_head_sharded = not self.config.sequence_parallel

    def sharded_state_dict(self, prefix: str = "", *args: object, **kwargs: object) -> ShardedStateDict:
        """Upstream's state, except for the key of the output norm.

        Upstream stores a norm centered at 0 as `out_norm.weight`, and this module one centered at 1. With the same key, each would load the
        other's checkpoints without an error, and compute with wrong norms.
        """
        state: ShardedStateDict = super().sharded_state_dict(prefix, *args, **kwargs)
        norm = state[f"{prefix}out_norm.weight"]
        norm.key = norm.key.removesuffix("weight") + GAIN
        return state

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *_: object, packed_seq_params: Packing, **__: object
    ) -> tuple[Tensor, Tensor | None]:
        projected, _bias = self.in_proj(hidden_states)
        key_heads, value_heads = self.num_k_heads_local_tp, self.num_v_heads_local_tp
        mixed, gate, beta, alpha = projected.squeeze(1).split([sum(self._widths), self.v_dim_local_tp, value_heads, value_heads], dim=-1)
        taps, decay, bias = self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias
        if self.cp_size > 1:
            counts, cp = (key_heads, key_heads, value_heads), self.pg_collection.cp
            mixed, beta, alpha = exchange_heads(mixed, self._widths, counts, (beta, alpha), packed_seq_params, cp)
            taps = local_channels(taps, self._widths, cp)
            decay, bias = local_heads((decay, bias), cp)
            key_heads, value_heads = key_heads // self.cp_size, value_heads // self.cp_size
        widths = [width // self.cp_size for width in self._widths]
        heads = _HeadInputs(mixed, widths, taps, alpha, beta, decay, bias, key_heads, value_heads)
        run = _run_exact if is_bitwise(self.config) else _run_default
        out = run(heads, packed_seq_params.full_packing)
        if self.cp_size > 1:
            out = heads_to_tokens(out, packed_seq_params, self.pg_collection.cp)
        return self.out_proj(self.out_norm.gated(out, gate.reshape(out.shape)).flatten(1)[:, None])

    @property
    def _widths(self) -> list[int]:
        """Channels of queries, keys and values on this tensor-parallel rank."""
        return [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]


@dataclass(frozen=True, slots=True)
class _HeadInputs:
    """Inputs of one rank's heads.

    mixed [T, channels of queries, keys and values], `widths` of these three; taps [channels, width of the convolution]; alpha and beta
    [T, value heads], decay and bias [value heads]: a head's state decays by exp(−exp(decay) · softplus(alpha + bias)) at each token and is
    updated with rate sigmoid(beta). num_key_heads, num_value_heads: number of heads.
    """

    mixed: Tensor
    widths: list[int]
    taps: Tensor
    alpha: Tensor
    beta: Tensor
    decay: Tensor
    bias: Tensor
    num_key_heads: int
    num_value_heads: int

    def split(self, mixed: Tensor) -> list[Tensor]:
        """mixed [..., channels] → queries, keys and values [..., heads, dim]."""
        counts = (self.num_key_heads, self.num_key_heads, self.num_value_heads)
        return [x.unflatten(-1, (count, -1)) for x, count in zip(mixed.split(self.widths, dim=-1), counts, strict=True)]


def _run_default(heads: _HeadInputs, packing: Packing) -> Tensor:
    """Output [T, value heads, value dim]."""
    run = _run_fla if heads.mixed.is_cuda and chunk_gated_delta_rule is not None else _run_torch
    return run(heads, packing)


def _run_exact(heads: _HeadInputs, packing: Packing) -> Tensor:
    """`_run_default` by `exact_delta`, with the gradients of `_run_default`."""

    def run_default(mixed: Tensor, taps: Tensor, alpha: Tensor, beta: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        return _run_default(replace(heads, mixed=mixed, taps=taps, alpha=alpha, beta=beta, decay=decay, bias=bias), packing)

    def run_exact(mixed: Tensor, taps: Tensor, alpha: Tensor, beta: Tensor, decay: Tensor, bias: Tensor) -> Tensor:
        weights = DeltaWeights(taps, decay, bias, heads.num_key_heads, heads.widths[0] // heads.num_key_heads)
        cache = DeltaCache.empty(weights, len(packing.starts) - 1, mixed)
        return exact_delta.run(mixed, alpha, beta, weights, packing.starts, cache)

    return with_gradients_of(run_default, run_exact, heads.mixed, heads.taps, heads.alpha, heads.beta, heads.decay, heads.bias)


def _run_fla(heads: _HeadInputs, packing: Packing) -> Tensor:
    """`_run_default` by flash-linear-attention's kernels, which include norms, gates and decays."""
    cu_seqlens, cu_seqlens_cpu = packing.boundaries
    samples = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
    mixed: Tensor = causal_conv1d(heads.mixed[None], heads.taps, activation="silu", **samples)[0]
    out: Tensor = chunk_gated_delta_rule(
        *heads.split(mixed),
        heads.alpha[None],
        heads.beta[None],
        A_log=heads.decay,
        dt_bias=heads.bias,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **samples,
    )[0]
    return out[0]


def _run_torch(heads: _HeadInputs, packing: Packing) -> Tensor:
    """`_run_default` in plain PyTorch."""
    q, k, v = heads.split(F.silu(convolve(heads.mixed, heads.taps, packing.position_ids)))
    q, k = (_l2_norm(x).repeat_interleave(heads.num_value_heads // heads.num_key_heads, dim=1) for x in (q, k))
    g = -heads.decay.float().exp() * F.softplus(heads.alpha.float() + heads.bias)
    beta = heads.beta.sigmoid()
    out = torch.empty_like(v)
    for group in packing.recurrence_groups:
        # Padding follows a sample's last token; the recurrence is causal, so padding does not affect the sample.
        group_out = gated_delta_rule(*(x[group.queries] for x in (q, k, v, g, beta)))
        out = out.index_put((group.queries[group.valid],), group_out[group.valid])
    return out


def _l2_norm(x: Tensor) -> Tensor:
    x_fp32 = x.float()
    return (x_fp32 * torch.rsqrt(x_fp32.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in plain PyTorch, chunk by chunk, in fp32.

    At each token, a head's state S [key dim, value dim] decays by exp(g_t), and the value that key k_t retrieves from S moves towards v_t
    by the fraction beta_t. The output is q_t S. Within a chunk of C tokens this is a triangular system, so only the states at chunk
    boundaries are computed sequentially. The initial state is 0.

    q, k [B, L, heads, key dim], normed; v [B, L, heads, value dim]; g (log decay), beta [B, L, heads] → [B, L, heads, value dim].
    """
    dtype, length = v.dtype, q.shape[1]
    chunk = min(CHUNK, length)
    padding = -length % chunk

    def split_chunks(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (-1, chunk)).movedim(3, 1)  # [B, heads, chunks, C, …]

    q, k, v, g, beta = (split_chunks(x) for x in (q * q.shape[-1] ** -0.5, k, v, g, beta))
    g = g.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    weighted_keys = k * beta[..., None]
    intra_chunk = (weighted_keys @ k.mT * decay).tril(-1)
    right_side = torch.cat([v * beta[..., None], weighted_keys * g.exp()[..., None]], dim=-1)
    # The identity plus intra_chunk is unit lower triangular.
    solution = torch.linalg.solve_triangular(intra_chunk, right_side, upper=False, unitriangular=True)
    new_values, carried_keys = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    intra_scores = q @ k.mT * decay
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[2]):
        value_updates = new_values[:, :, i] - carried_keys[:, :, i] @ state
        outputs.append((q[:, :, i] * g[:, :, i, :, None].exp()) @ state + intra_scores[:, :, i] @ value_updates)
        chunk_log_decay = g[:, :, i, -1:, None]
        state = state * chunk_log_decay.exp() + (k[:, :, i] * (chunk_log_decay - g[:, :, i, :, None]).exp()).mT @ value_updates
    out = torch.cat(outputs, dim=2)[:, :, :length]
    return out.movedim(1, 2).to(dtype)
