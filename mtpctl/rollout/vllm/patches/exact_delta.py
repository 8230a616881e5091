"""Linear attention and gated full attention of Qwen3.5 in engines with `numerics: bitwise` (vLLM 0.32.0).

vLLM computes a prompt's chunks with a chunked kernel, and decoding steps with a recurrent one, whose states and outputs differ in the last
bits; on a CPU both need bf16. In a bitwise engine, on a CPU and on CUDA, a gated DeltaNet layer computes its recurrence token
by token with `mtpctl.kernels.exact_delta`, which the trainer calls too. Its norms, the norms centered at 0 and the gates of full attention
are the trainer's, too. The layout of vLLM's state cache is unchanged, so that vLLM can copy states for its prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtpctl.errors import UpstreamMoved
from mtpctl.kernels import exact, exact_delta, invariant
from mtpctl.kernels.exact_delta import DeltaCache, DeltaWeights
from mtpctl.rollout.vllm.patches.exact import is_exact, replace_forward
from mtpctl.rollout.vllm.patches.guard import assign, patch

if TYPE_CHECKING:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNormGated
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder


@patch
def install_exact_delta() -> None:
    """Let the layers of Qwen3.5 that are built for a bitwise engine compute with `exact_delta`.

    To be called in the process of a bitwise engine only: Dynamo would trace the replaced methods, and the import of linear attention
    initializes CUDA, after which an engine core does not fork its workers.
    """
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNormGated
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    replaced = (
        (GDNAttentionMetadataBuilder, "build"),
        (QwenGatedDeltaNetAttention, "_output_projection"),
        (Qwen3NextAttention, "_project_qkv_gate"),
    )
    for owner, name in replaced:
        if name not in vars(owner):
            raise UpstreamMoved(f"{__name__}: {owner.__name__}.{name} is gone; find how this vLLM computes it, or log-probs are not exact")
    assign(GDNAttentionMetadataBuilder, build=_with_new_sequences(GDNAttentionMetadataBuilder.build))
    replace_forward(GemmaRMSNorm, rms_norm)
    replace_forward(RMSNormGated, gated_rms_norm)
    replace_forward(QwenGatedDeltaNetAttention, delta_net)
    replace_forward(Qwen3NextAttention, gated_attention, method="forward")


def rms_norm(self: GemmaRMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of x, or of x + residual together with that sum."""
    if residual is not None:
        x = x + residual
    norm = invariant.rms_norm if x.is_cuda else exact.rms_norm
    out = norm(x, self.weight.data, self.variance_epsilon, 1.0)
    return out if residual is None else (out, x)


def gated_rms_norm(self: RMSNormGated, x: Tensor, gate: Tensor) -> Tensor:
    assert self.norm_before_gate and self.group_size is None and self.activation == "silu", "this gated norm is not exact"
    return exact_delta.gated_rms_norm(x, gate, self.weight.data, self.eps)


def gated_attention(self: Qwen3NextAttention, positions: Tensor, hidden_states: Tensor) -> Tensor:
    self.use_fused_qk_norm_rope_gate = False
    qkv, _ = self.qkv_proj(hidden_states)
    query, key, value, gate = self._project_qkv_gate(qkv, positions)
    attended = self.attn(query, key, value)
    if gate is not None:  # on CUDA, an element of PyTorch's sigmoid does not depend on others
        attended = attended * (gate.sigmoid() if gate.is_cuda else exact.sigmoid(gate))
    out: Tensor = self.o_proj(attended)[0]
    return out


def delta_net(self: QwenGatedDeltaNetAttention, hidden_states: Tensor) -> Tensor:
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    assert not self.gqa_interleaved_layout and self.tp_size == 1, "this layout of linear attention is not exact"
    inner = self.num_v_heads * self.head_v_dim
    mixed, gate = self.in_proj_qkvz(hidden_states)[0].split([self.conv_dim, inner], dim=-1)
    beta, alpha = self.in_proj_ba(hidden_states)[0].chunk(2, dim=-1)
    out = hidden_states.new_zeros(len(hidden_states), self.num_v_heads, self.head_v_dim)
    # CUDA graphs of steps with prefill are interrupted here, because the number of sequences differs from step to step.
    eager_break_during_capture(recur)(self, mixed, alpha.contiguous(), beta.contiguous(), out)
    output: Tensor = self._output_projection(out, gate.reshape(out.shape))
    return output


def recur(layer: QwenGatedDeltaNetAttention, mixed: Tensor, alpha: Tensor, beta: Tensor, out: Tensor) -> None:
    """Write the recurrence's outputs [T, value heads, value dim] of the current step to `out`, and its states to the cache."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    attention: Any = get_forward_context().attn_metadata
    metadata: GDNAttentionMetadata | None = attention.get(layer.prefix) if isinstance(attention, dict) else None
    if metadata is None:  # in vLLM's memory profiling
        return
    windows, states = layer.kv_cache
    windows = windows if is_conv_state_dim_first() else windows.transpose(1, 2)
    states = states.view(*states.shape[:2], *states.shape[:1:-1])
    taps, decay = layer.conv1d.get_parameter("weight").squeeze(1), layer.A_log.to(mixed.dtype)  # vLLM's is fp32, but not the trainer's
    weights = DeltaWeights(taps, decay, layer.dt_bias, layer.num_k_heads, layer.head_k_dim)
    for rows, starts, slots, accepted in _parts(metadata):
        cache = DeltaCache(windows, states, slots, accepted)
        out[rows] = exact_delta.run(mixed[rows], alpha[rows], beta[rows], weights, starts, cache)


def _parts(metadata: GDNAttentionMetadata) -> Iterator[tuple[Tensor | slice, Tensor, Tensor, Tensor]]:
    """Tokens, starts, slots and numbers of accepted tokens: of the sequences without drafts, and of those with drafts."""
    m, plain, drafted = metadata, metadata.num_prefills + metadata.num_decodes, metadata.num_spec_decodes
    if plain:
        assert m.non_spec_state_indices_tensor is not None and m.non_spec_query_start_loc is not None
        slots = m.non_spec_state_indices_tensor[:plain, None]
        accepted = torch.ones_like(slots[:, 0]) if m.has_initial_state is None else m.has_initial_state[:plain].int()
        rows = m.non_spec_token_indx if drafted else slice(m.num_prefill_tokens + m.num_decode_tokens)
        assert rows is not None
        yield rows, m.non_spec_query_start_loc[: plain + 1], slots, accepted
    if drafted:
        assert m.spec_state_indices_tensor is not None and m.spec_query_start_loc is not None and m.num_accepted_tokens is not None
        rows = m.spec_token_indx if plain else slice(m.num_spec_decode_tokens)
        assert rows is not None
        yield rows, m.spec_query_start_loc[: drafted + 1], m.spec_state_indices_tensor[:drafted], m.num_accepted_tokens[:drafted]


def _with_new_sequences(build: Callable[..., GDNAttentionMetadata]) -> Callable[..., GDNAttentionMetadata]:
    """Set the number of accepted tokens of sequences without earlier tokens to 0.

    vLLM adds drafts to the first step of a prompt of one token, and then continues with the state that its slot contains.
    """

    @wraps(build)
    def build_metadata(
        self: GDNAttentionMetadataBuilder,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> GDNAttentionMetadata:
        if is_exact() and num_accepted_tokens is not None:
            earlier = common_attn_metadata.compute_num_computed_tokens()[: len(num_accepted_tokens)]
            num_accepted_tokens = num_accepted_tokens.clamp(min=1).where(earlier > 0, 0)
        return build(self, common_prefix_len, common_attn_metadata, num_accepted_tokens, *args, **kwargs)

    return build_metadata
