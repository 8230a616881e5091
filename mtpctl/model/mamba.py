"""Mamba-2 (arXiv 2405.21060), the recurrent mixer of Nemotron-H, on packed sequences.

megatron-core's mixer requires mamba-ssm, does not support packed samples and runs on CUDA only. This is a separate module with the same
parameters. They are split over tensor-parallel ranks by groups: each rank has the heads, B and C of its groups.
Context-parallel ranks exchange tokens for groups, see `mtpctl.model.packing`.

Shape legend: P context-parallel ranks, t tokens of this rank, T = P t tokens of the packed sequence, G groups, N state width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from mtpctl.families.shape import MambaShape
from mtpctl.kernels.scaling import scale_heads
from mtpctl.model.layers import LayerNormColumnParallelLinear, RowParallelLinear
from mtpctl.model.packing import Packing, convolve, exchange_heads, heads_to_tokens, local_channels, local_heads

try:
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.layernorm_gated import rmsnorm_fn
    from fla.ops.simple_gla import chunk_simple_gla
except ImportError:
    causal_conv1d = chunk_simple_gla = rmsnorm_fn = None

CHUNK = 64
"""Tokens per chunk of `selective_scan`."""


class GroupedNorm(MegatronModule):
    """Root-mean-square norm of each group of channels, after the gate: norm(x · silu(gate))."""

    def __init__(self, config: TransformerConfig, width: int, groups: int) -> None:
        super().__init__(config)
        self.groups = groups
        self.weight = _split_parameter(config, width)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [t, channels] → the same shape, in gate's dtype."""
        return grouped_norm(x, gate, self.weight, self.groups, self.config.layernorm_epsilon)


def grouped_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """`GroupedNorm` as a function."""
    if x.is_cuda and x.numel() and rmsnorm_fn is not None:  # one kernel per pass; below, each operation stores its result in fp32
        return rmsnorm_fn(x, weight, None, z=gate, eps=eps, group_size=x.shape[-1] // groups, norm_before_gate=False)
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    gated = (x.to(compute_dtype) * F.silu(gate.to(compute_dtype))).unflatten(-1, (groups, -1))
    normed = F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight.to(compute_dtype)).to(gate.dtype)


class Mamba2(MegatronModule):
    """[t, 1, H] → [t, 1, H]: the norm, input projection, convolution, scan, gated norm and output projection of a layer."""

    def __init__(
        self, config: TransformerConfig, *, shape: MambaShape, layer_number: int, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config)
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self.tp_group, tp = pg_collection.tp, pg_collection.tp.size()
        self.heads, self.groups, self.state = shape.heads // tp, shape.groups // tp, shape.state
        self.inner = self.heads * shape.head_dim
        shared = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False, "is_expert": False}
        self.in_proj = LayerNormColumnParallelLinear(
            config.hidden_size,
            shape.inner + shape.channels + shape.heads,
            gather_output=False,
            tp_group=self.tp_group,
            **shared,  # type: ignore[arg-type]
        )
        self.conv1d = _Convolution(config, shape.channels // tp, shape.conv)
        self.A_log, self.D, self.dt_bias = (_split_parameter(config, self.heads) for _ in range(3))
        self.norm = GroupedNorm(config, self.inner, self.groups)
        self.out_proj = RowParallelLinear(shape.inner, config.hidden_size, input_is_parallel=True, tp_group=self.tp_group, **shared)

    @property
    def _widths(self) -> list[int]:
        """Channels of x, B and C on this tensor-parallel rank."""
        return [self.inner, self.groups * self.state, self.groups * self.state]

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *_: object, packed_seq_params: Packing, **__: object
    ) -> tuple[Tensor, Tensor | None]:
        projected, _bias = self.in_proj(hidden_states)
        gate, mixed, steps = projected.squeeze(1).split([self.inner, sum(self._widths), self.heads], dim=-1)
        convolution: list[Tensor] = [self.conv1d.weight.squeeze(1), self.conv1d.bias]
        per_head: list[Tensor] = [self.A_log, self.D, self.dt_bias]
        cp, ranks = self.pg_collection.cp, self.pg_collection.cp.size()
        if ranks > 1:
            mixed, steps = exchange_heads(mixed, self._widths, (self.heads, self.groups, self.groups), (steps,), packed_seq_params, cp)
            convolution = [local_channels(weight, self._widths, cp) for weight in convolution]
            per_head = local_heads(per_head, cp)
        widths = [width // ranks for width in self._widths]
        (taps, bias), (decay, skip, step_bias) = convolution, per_head
        scan = Scan(mixed, widths, taps, bias, steps, decay, skip, step_bias, self.groups // ranks)
        run = scan.run_fla if mixed.is_cuda and chunk_simple_gla is not None else scan.run_torch
        out = run(packed_seq_params.full_packing)
        if ranks > 1:
            out = heads_to_tokens(out, packed_seq_params, cp)
        return self.out_proj(self.norm(out.flatten(1), gate)[:, None])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """The state dict of this tensor-parallel rank. Parts of fused tensors are stored separately, so that tp can change."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = {}
        for module, path, split in (
            (self, "", ("A_log", "D", "dt_bias")),
            (self.conv1d, "conv1d.", ("weight", "bias")),
            (self.norm, "norm.", ("weight",)),
        ):
            tensors: dict[str, Tensor] = {}
            module._save_to_state_dict(tensors, "", keep_vars=True)
            axes = dict.fromkeys(split, 0)
            state |= make_sharded_tensors_for_checkpoint(
                tensors, prefix + path, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
            )
        for name in ("in_proj", "out_proj"):
            state |= sharded_state_dict_default(getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group)
        sections = {"in_proj.weight": [self.inner, *self._widths, self.heads], "conv1d.weight": self._widths, "conv1d.bias": self._widths}
        for name, widths in sections.items():
            part_names = ["z", "x", "B", "C", "dt"] if len(widths) > 3 else ["x", "B", "C"]
            state[prefix + name] = _split_tensor_factory(state[prefix + name], widths, part_names, 0)
        return state


class _Convolution(torch.nn.Module):
    """The parameters of the short convolution; `Scan` applies them."""

    def __init__(self, config: TransformerConfig, channels: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = _split_parameter(config, channels, 1, width), _split_parameter(config, channels)


def _split_parameter(config: TransformerConfig, *size: int) -> torch.nn.Parameter:
    """A parameter whose rows are split over tensor-parallel ranks."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1  # type: ignore[attr-defined]
    return parameter


@dataclass(frozen=True, slots=True)
class Scan:
    """Inputs of the convolution and the scan of one rank's heads.

    mixed [T, channels], `widths` of its parts; taps [channels, width of the convolution], bias [channels]; steps [T, heads]. At each token
    a head's state decays by exp(−exp(decay) · step), where step = softplus(steps + step_bias); `skip` times the input is added to the
    output.
    """

    mixed: Tensor
    widths: list[int]
    taps: Tensor
    bias: Tensor
    steps: Tensor
    decay: Tensor
    skip: Tensor
    step_bias: Tensor
    groups: int

    def run_torch(self, packing: Packing) -> Tensor:
        """Output [T, heads, head dim], in plain PyTorch."""
        x, b, c = self._split(F.silu(convolve(self.mixed, self.taps, packing.position_ids) + self.bias))
        steps, log_decay = self._discretize()
        out = torch.empty_like(x)
        for group in packing.recurrence_groups:
            # Padding follows a sample's last token; the scan is causal, so padding does not affect the sample.
            group_out = selective_scan(*(part[group.queries] for part in (x, steps, log_decay, b, c)))
            out = out.index_put((group.queries[group.valid],), group_out[group.valid])
        return scale_heads(x, self.skip, out)

    def run_fla(self, packing: Packing) -> Tensor:
        """`run_torch` with flash-linear-attention's kernels: the scan is linear attention with a decay per head and token."""
        cu_seqlens, cu_seqlens_cpu = packing.boundaries
        samples = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        mixed: Tensor = causal_conv1d(self.mixed[None], self.taps, bias=self.bias, activation="silu", **samples)[0][0]
        x, b, c = self._split(mixed)
        steps, log_decay = self._discretize()
        queries, keys = (part.repeat_interleave(x.shape[1] // self.groups, dim=1)[None] for part in (c, b))
        out: Tensor = chunk_simple_gla(queries, keys, scale_heads(x, steps)[None], g=log_decay[None], scale=1.0, **samples)[0]
        return scale_heads(x, self.skip, out[0])

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """mixed [T, channels] → input [T, heads, head dim], input and output projections of the state [T, G, N]."""
        x, b, c = mixed.split(self.widths, dim=-1)
        return x.unflatten(-1, (len(self.decay), -1)), b.unflatten(-1, (self.groups, -1)), c.unflatten(-1, (self.groups, -1))

    def _discretize(self) -> tuple[Tensor, Tensor]:
        """Steps and log decays [T, heads], in fp32 or wider."""
        compute_dtype = torch.promote_types(self.steps.dtype, torch.float32)
        steps = F.softplus(self.steps.to(compute_dtype) + self.step_bias.to(compute_dtype))
        return steps, -self.decay.to(compute_dtype).exp() * steps


def selective_scan(x: Tensor, steps: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The scan of Mamba-2 in plain PyTorch, chunk by chunk, in fp32 or wider.

    At each token, a head's state S [N, head dim] decays by exp(log_decay_t), and step_t · b_t ⊗ x_t is added. The output is c_t S. Within a
    chunk the outputs are products of masked matrices (arXiv 2405.21060, section 6); only the states at chunk boundaries are computed
    sequentially. The initial state is 0.

    x [B, L, heads, head dim]; steps, log_decay [B, L, heads]; b, c [B, L, G, N] → [B, L, heads, head dim].
    """
    dtype, length, heads, groups = x.dtype, x.shape[1], x.shape[2], b.shape[2]
    chunk = min(CHUNK, length)
    padding = -length % chunk

    def split_chunks(part: Tensor) -> Tensor:
        part = F.pad(part.to(log_decay.dtype), (0, 0) * (part.dim() - 2) + (0, padding))
        return part.unflatten(1, (-1, chunk)).movedim(3, 1)  # [B, heads or groups, chunks, C, …]

    values, decay_sums = split_chunks(x * steps[..., None]), split_chunks(log_decay).cumsum(-1)
    b, c = (split_chunks(part).repeat_interleave(heads // groups, dim=1) for part in (b, c))
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    scores = c @ b.mT * (decay_sums[..., :, None] - decay_sums[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    intra_chunk_out = scores @ values
    state = values.new_zeros(*values.shape[:2], b.shape[-1], values.shape[-1])
    outputs = []
    for i in range(values.shape[2]):
        outputs.append(intra_chunk_out[:, :, i] + (c[:, :, i] * decay_sums[:, :, i, :, None].exp()) @ state)
        chunk_decay = decay_sums[:, :, i, -1:, None]
        state = state * chunk_decay.exp() + (b[:, :, i] * (chunk_decay - decay_sums[:, :, i, :, None]).exp()).mT @ values[:, :, i]
    out = torch.cat(outputs, dim=2)[:, :, :length]
    return out.movedim(1, 2).to(dtype)
