"""Gated delta net, the linear attention of Qwen3-Next and Qwen3.5, on packed sequences.

Parameters, their split over tp and their checkpoints are upstream's; the forward pass is ours, so that samples stay apart
in the convolution and in the recurrence, on a CPU as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as UpstreamGatedDeltaNet
from torch import Tensor

from mtpctl.compat import megatron_core
from mtpctl.model.delta_rule import gated_delta_rule
from mtpctl.model.head_exchange import to_heads, to_tokens
from mtpctl.model.packing import Packing

try:
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:
    causal_conv1d = chunk_gated_delta_rule = None


GAIN = "gain"
"""Last part of the checkpoint key of the output norm."""


class GatedDeltaNet(UpstreamGatedDeltaNet):
    """[T, 1, H] → [T, 1, H]. Megatron-Bridge knows its parameters by the class's name."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        with megatron_core.without_flash_linear_attention():
            super().__init__(*args, **kwargs)
        self.out_norm.of_own_heads = not self.config.sequence_parallel

    def sharded_state_dict(self, prefix: str = "", *args: object, **kwargs: object) -> ShardedStateDict:
        """Upstream's, with the output norm under another key, because older checkpoints store it around 0 as `out_norm.weight`."""
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
        keys, values = self.num_k_heads_local_tp, self.num_v_heads_local_tp
        mixed, gate, beta, alpha = projected.squeeze(1).split([sum(self._widths), self.v_dim_local_tp, values, values], dim=-1)
        taps, decay, bias = self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias
        if self.cp_size > 1:
            mixed, beta, alpha = self._exchanged(mixed, beta, alpha, packed_seq_params)
            taps = torch.cat(self._own_heads(*taps.split(self._widths)))
            decay, bias = self._own_heads(decay, bias)
            keys, values = keys // self.cp_size, values // self.cp_size
        widths = [width // self.cp_size for width in self._widths]
        heads = _Heads(mixed, widths, taps, alpha, beta, decay, bias, keys, values)
        run = _by_kernels if mixed.is_cuda and chunk_gated_delta_rule is not None else _plainly
        out = run(heads, packed_seq_params.whole)
        if self.cp_size > 1:
            out = to_tokens(out, packed_seq_params, self.pg_collection.cp)
        return self.out_proj(self.out_norm.gated(out, gate.reshape(out.shape)).flatten(1)[:, None])

    @property
    def _widths(self) -> list[int]:
        """Channels of queries, keys and values on this tensor-parallel rank."""
        return [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]

    def _exchanged(self, mixed: Tensor, beta: Tensor, alpha: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """From this rank's tokens of all heads [t, …] to all tokens of the row, of the heads that this rank computes [T, …]."""
        heads = (self.num_k_heads_local_tp, self.num_k_heads_local_tp, self.num_v_heads_local_tp)
        parts = [x.unflatten(-1, (count, -1)) for x, count in zip(mixed.split(self._widths, dim=-1), heads, strict=True)]
        *parts, beta, alpha = to_heads([*parts, beta, alpha], packing, self.pg_collection.cp)
        return torch.cat([part.flatten(1) for part in parts], dim=-1), beta, alpha

    def _own_heads(self, *weights: Tensor) -> list[Tensor]:
        """The parts of weights that belong to the heads which this rank computes."""
        return [weight.chunk(self.cp_size)[self.pg_collection.cp.rank()] for weight in weights]


@dataclass(frozen=True, slots=True)
class _Heads:
    """What the heads of one rank compute from.

    mixed [T, channels of queries, keys and values], `widths` of these three; taps [channels, width of the convolution]; alpha and beta
    [T, value heads], decay and bias [value heads]: a head's state decays by exp(−exp(decay) · softplus(alpha + bias)) at each token, and
    takes in sigmoid(beta) of what is new. keys, values: how many heads.
    """

    mixed: Tensor
    widths: list[int]
    taps: Tensor
    alpha: Tensor
    beta: Tensor
    decay: Tensor
    bias: Tensor
    keys: int
    values: int

    def split(self, mixed: Tensor) -> list[Tensor]:
        """mixed [..., channels] → queries, keys and values [..., heads, dim]."""
        counts = (self.keys, self.keys, self.values)
        return [x.unflatten(-1, (count, -1)) for x, count in zip(mixed.split(self.widths, dim=-1), counts, strict=True)]


def _by_kernels(heads: _Heads, row: Packing) -> Tensor:
    """[T, value heads, value dim] by flash-linear-attention, whose kernels also make the norms, the decays and their sums over chunks."""
    cu_seqlens, on_host = row.borders
    samples = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": on_host}
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


def _plainly(heads: _Heads, row: Packing) -> Tensor:
    """The same in plain PyTorch."""
    q, k, v = heads.split(F.silu(_convolved(heads.mixed, heads.taps, row.position_ids)))
    q, k = (_normed(x).repeat_interleave(heads.values // heads.keys, dim=1) for x in (q, k))
    g = -heads.decay.float().exp() * F.softplus(heads.alpha.float() + heads.bias)
    beta = heads.beta.sigmoid()
    out = torch.empty_like(v)
    for group in row.groups:
        # What fills up a short sample follows its last token, and nothing flows backwards.
        found = gated_delta_rule(*(x[group.queries] for x in (q, k, v, g, beta)))
        out = out.index_put((group.queries[group.valid],), found[group.valid])
    return out


def _convolved(x: Tensor, weight: Tensor, position_ids: Tensor) -> Tensor:
    """Each channel with its own causal kernel; x [T, channels], weight [channels, width], a sample's first tokens see zeros before them."""
    taps = weight.unbind(-1)
    out = x * taps[-1]
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = out + earlier.masked_fill((position_ids < back)[:, None], 0.0) * tap
    return out


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
