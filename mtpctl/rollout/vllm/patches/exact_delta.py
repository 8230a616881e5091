"""Linear attention and gated full attention of Qwen3.5 in engines with `numerics: bitwise` (vLLM 0.32.0).

vLLM uses a chunked kernel for prefills and a recurrent one for decoding steps. Their states and outputs differ in the last bits, and on a
CPU both need bf16. In a bitwise engine, a gated DeltaNet layer computes its recurrence token by token with `mtpctl.kernels.exact_delta`,
which the trainer calls too. Gated norms, norms whose weights are centered at 0, and the gates of full attention also use the trainer's
functions. The layout of vLLM's state cache is unchanged, so that vLLM can copy states for its prefix cache.
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
from mtpctl.rollout.vllm.patches import assign, patch
from mtpctl.rollout.vllm.patches.exact import is_bitwise, replace_forward

if TYPE_CHECKING:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNormGated
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder


@patch
def install_exact_delta() -> None:
    """Make the layers of Qwen3.5 in a bitwise engine compute with `exact_delta`.

    Call it only in the process of a bitwise engine. In others, Dynamo would trace the patched methods, and the import of linear attention
    would initialize CUDA, which keeps an engine core from forking its workers.
    """
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNormGated
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    required_methods = (
        (GDNAttentionMetadataBuilder, "build"),
        (QwenGatedDeltaNetAttention, "_output_projection"),
        (Qwen3NextAttention, "_project_qkv_gate"),
    )
    for owner, name in required_methods:
        if name not in vars(owner):
            raise UpstreamMoved(f"{__name__}: {owner.__name__}.{name} is gone; adapt the patch, or log-probs differ from the trainer's")
    assign(GDNAttentionMetadataBuilder, build=_reset_new_sequences(GDNAttentionMetadataBuilder.build))
    replace_forward(GemmaRMSNorm, rms_norm)
    replace_forward(RMSNormGated, gated_rms_norm)
    replace_forward(QwenGatedDeltaNetAttention, delta_net)
    replace_forward(Qwen3NextAttention, gated_attention, method="forward")


def rms_norm(self: GemmaRMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of x. With a residual, returns the norm of x + residual, and x + residual."""
    if residual is not None:
        x = x + residual
    compute_norm = invariant.rms_norm if x.is_cuda else exact.rms_norm
    out = compute_norm(x, self.weight.data, self.variance_epsilon, 1.0)
    return out if residual is None else (out, x)


def gated_rms_norm(self: RMSNormGated, x: Tensor, gate: Tensor) -> Tensor:
    assert self.norm_before_gate and self.group_size is None and self.activation == "silu", "this gated norm is not exact"
    return exact_delta.gated_rms_norm(x, gate, self.weight.data, self.eps)


def gated_attention(self: Qwen3NextAttention, positions: Tensor, hidden_states: Tensor) -> Tensor:
    self.use_fused_qk_norm_rope_gate = False
    qkv, _ = self.qkv_proj(hidden_states)
    query, key, value, gate = self._project_qkv_gate(qkv, positions)
    attention_output = self.attn(query, key, value)
    if gate is not None:  # On a CPU, PyTorch's sigmoid of a number depends on its position.
        attention_output = attention_output * (gate.sigmoid() if gate.is_cuda else exact.sigmoid(gate))
    out: Tensor = self.o_proj(attention_output)[0]
    return out


def delta_net(self: QwenGatedDeltaNetAttention, hidden_states: Tensor) -> Tensor:
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    assert not self.gqa_interleaved_layout and self.tp_size == 1, "this layout of linear attention is not exact"
    value_width = self.num_v_heads * self.head_v_dim
    mixed_qkv, gate = self.in_proj_qkvz(hidden_states)[0].split([self.conv_dim, value_width], dim=-1)
    beta, alpha = self.in_proj_ba(hidden_states)[0].chunk(2, dim=-1)
    out = hidden_states.new_zeros(len(hidden_states), self.num_v_heads, self.head_v_dim)
    # CUDA graphs of steps with prefill are interrupted here, because the number of sequences differs from step to step.
    eager_break_during_capture(run_recurrence)(self, mixed_qkv, alpha.contiguous(), beta.contiguous(), out)
    output: Tensor = self._output_projection(out, gate.reshape(out.shape))
    return output


def run_recurrence(layer: QwenGatedDeltaNetAttention, mixed_qkv: Tensor, alpha: Tensor, beta: Tensor, out: Tensor) -> None:
    """Write the recurrence's outputs [T, value heads, value dim] of the current step to `out`, and its states to the cache."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    attention: Any = get_forward_context().attn_metadata
    metadata: GDNAttentionMetadata | None = attention.get(layer.prefix) if isinstance(attention, dict) else None
    if metadata is None:  # in vLLM's memory profiling
        return
    conv_states, states = layer.kv_cache
    conv_states = conv_states if is_conv_state_dim_first() else conv_states.transpose(1, 2)
    states = states.view(*states.shape[:2], *states.shape[:1:-1])
    conv_weight = layer.conv1d.get_parameter("weight").squeeze(1)
    a_log = layer.A_log.to(mixed_qkv.dtype)  # vLLM keeps it in fp32, the trainer in the model's precision
    weights = DeltaWeights(conv_weight, a_log, layer.dt_bias, layer.num_k_heads, layer.head_k_dim)
    for rows, starts, slots, accepted in _split_by_drafts(metadata):
        cache = DeltaCache(conv_states, states, slots, accepted)
        out[rows] = exact_delta.run(mixed_qkv[rows], alpha[rows], beta[rows], weights, starts, cache)


def _split_by_drafts(metadata: GDNAttentionMetadata) -> Iterator[tuple[Tensor | slice, Tensor, Tensor, Tensor]]:
    """Yield (tokens, starts, slots, accepted), see `DeltaCache`, for sequences without drafts, and then for sequences with drafts."""
    m, num_plain, num_drafting = metadata, metadata.num_prefills + metadata.num_decodes, metadata.num_spec_decodes
    if num_plain:
        assert m.non_spec_state_indices_tensor is not None and m.non_spec_query_start_loc is not None
        slots = m.non_spec_state_indices_tensor[:num_plain, None]
        accepted = torch.ones_like(slots[:, 0]) if m.has_initial_state is None else m.has_initial_state[:num_plain].int()
        rows = m.non_spec_token_indx if num_drafting else slice(m.num_prefill_tokens + m.num_decode_tokens)
        assert rows is not None
        yield rows, m.non_spec_query_start_loc[: num_plain + 1], slots, accepted
    if num_drafting:
        assert m.spec_state_indices_tensor is not None and m.spec_query_start_loc is not None and m.num_accepted_tokens is not None
        rows = m.spec_token_indx if num_plain else slice(m.num_spec_decode_tokens)
        assert rows is not None
        yield (
            rows,
            m.spec_query_start_loc[: num_drafting + 1],
            m.spec_state_indices_tensor[:num_drafting],
            m.num_accepted_tokens[:num_drafting],
        )


def _reset_new_sequences(upstream_build: Callable[..., GDNAttentionMetadata]) -> Callable[..., GDNAttentionMetadata]:
    """Wrap the builder of metadata: set the number of accepted tokens to 0 for new sequences, which then start without a state, else to at
    least 1.

    If a prompt has one token, vLLM adds drafts to its first step, and continues from the state that its slot happens to contain.
    """

    @wraps(upstream_build)
    def build_metadata(
        self: GDNAttentionMetadataBuilder,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> GDNAttentionMetadata:
        if is_bitwise() and num_accepted_tokens is not None:
            num_computed = common_attn_metadata.compute_num_computed_tokens()[: len(num_accepted_tokens)]
            num_accepted_tokens = num_accepted_tokens.clamp(min=1).where(num_computed > 0, 0)
        return upstream_build(self, common_prefix_len, common_attn_metadata, num_accepted_tokens, *args, **kwargs)

    return build_metadata
