"""Fixes for kernels of vLLM's CPU backend (vLLM 0.32.0).

Rotary embeddings, norms, linear attention, values narrower than keys, experts, and routers with a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import assign, cpu_patch

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

# ---------------------------------------------------------------------------------------------------- rotary embeddings


@cpu_patch
def install_rotary() -> None:
    """Fix rotary embeddings of queries `[tokens, heads, width]`, as latent attention passes them.

    The CPU kernel expects `[tokens, heads * width]`. With a separate dimension for heads it counts one head, mistakes the stride between
    heads for the stride between tokens, and rotates rows by the positions of other rows: DeepSeek's log-probs are off by 0.5 nats on
    average. With the patch such calls use vLLM's own formula in PyTorch, and write the result in place, like the kernel. The CUDA kernel
    reads the dimensions correctly.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if not _misreads_heads():
        raise UpstreamMoved(f"{__name__}: vLLM's CPU kernel for rotary embeddings no longer shows the fault patched here; remove the patch")
    upstream = RotaryEmbedding.forward_cpu

    def forward_cpu(self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if query.dim() == 2 and (key is None or key.dim() == 2):
            return upstream(self, positions, query, key)
        rotated_query, rotated_key = self.forward_native(positions, query, key)
        query.copy_(rotated_query)
        if key is not None and rotated_key is not None:
            key.copy_(rotated_key)
        return query, key

    assign(RotaryEmbedding, forward_cpu=forward_cpu)


def _misreads_heads() -> bool:
    """Whether the kernel returns another result for the same queries if heads have a separate dimension."""
    from vllm import _custom_ops as ops

    tokens, heads, width = 2, 2, 64
    angles = torch.arange(tokens)[:, None] * torch.ones(width // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    flat_queries, split_queries = torch.ones(tokens, heads * width), torch.ones(tokens, heads, width)
    for query in (flat_queries, split_queries):
        ops.rotary_embedding(torch.arange(tokens), query, torch.ones(tokens, width), width, cos_sin, False)
    return not torch.allclose(flat_queries, split_queries.flatten(1))


# ---------------------------------------------------------------------------------------------- norms of several layers


@cpu_patch
def install_context_norms() -> None:
    """Normalize the keys of a DFlash drafter's context with the weight of each layer.

    vLLM normalizes the keys of all layers in one call, with one row of weights per layer. The CPU kernel applies the first row to all
    layers, so a drafter with several layers drafts from wrong keys (differences of 0.1 to 0.2 in the logits of a toy). With the patch each
    layer is a separate call. The CUDA kernel selects the rows correctly.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    if not hasattr(DFlashQwen3Model, "_normalize_context_k"):
        raise UpstreamMoved(f"{__name__}: DFlashQwen3Model._normalize_context_k is gone; find the new way to norm the context's keys")
    if not _repeats_first_row():
        raise UpstreamMoved(f"{__name__}: vLLM's CPU kernel for norms no longer shows the fault patched here; remove the patch")

    def normalize(self: _ContextNorms, all_k: Tensor) -> Tensor:
        normed_keys = torch.empty_like(all_k)
        for out, keys, weight in zip(normed_keys, all_k, self._k_norm_weights, strict=True):
            ops.rms_norm(out, keys, weight, self._rms_norm_eps)
        return normed_keys

    assign(DFlashQwen3Model, _normalize_context_k=normalize)


class _ContextNorms(Protocol):
    """The norms of vLLM's DFlash drafter: weights [layers, head width]."""

    _k_norm_weights: Tensor
    _rms_norm_eps: float


def _repeats_first_row() -> bool:
    """Whether the kernel normalizes the second layer's rows with the first layer's weights."""
    from vllm import _custom_ops as ops

    rows, weights = torch.ones(2, 3, 1, 32), torch.tensor([1.0, 2.0])[:, None].expand(2, 32).contiguous()
    out = torch.empty_like(rows)
    ops.rms_norm(out, rows, weights, 1e-6)
    return torch.equal(out[0], out[1])


# ----------------------------------------------------------------------------------- linear attention with short queries


@cpu_patch
def install_short_queries() -> None:
    """Fix the convolution state of linear attention for sequences with fewer drafts than the engine's maximum.

    With speculation, vLLM keeps for each sequence a buffer of the last inputs of the causal convolution: `width - 2` inputs before the
    current query, then the inputs of the query. The next step reads its history at the offset of the last accepted token. A query of
    `state_len - width + 2` tokens fills the buffer exactly. A shorter one (at the context limit, or after the number of drafts was reduced)
    must be stored at the same column, but vLLM aligns it to the end of the buffer. The next step then reads inputs that are too old, and if
    the previous step accepted more tokens than the query has, the copy fails and the engine dies. The CUDA kernel stores short queries
    correctly.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    upstream = gdn_attention._spec_forward

    def spec_forward(
        layer: Any,
        metadata: GDNAttentionMetadata,
        mixed_TD: Tensor,
        b: Tensor,
        a: Tensor,
        conv_buffers: Tensor,
        recurrent_states: Tensor,
        width: int,
        state_len: int,
    ) -> Tensor:
        bounds, slots, accepted_counts = metadata.spec_query_start_loc, metadata.spec_state_indices_tensor, metadata.num_accepted_tokens
        assert bounds is not None and slots is not None and accepted_counts is not None
        sequences = metadata.num_spec_decodes
        bounds, slots, accepted_counts = bounds[: sequences + 1], slots[:sequences], accepted_counts[:sequences]
        lengths = bounds.diff().tolist()
        if all(tokens == state_len - width + 2 for tokens in lengths):
            return upstream(layer, metadata, mixed_TD, b, a, conv_buffers, recurrent_states, width, state_len)
        # Padding sequences have no tokens, and no state to read.
        active_sequences = [index for index, tokens in enumerate(lengths) if tokens]
        first_slots, previous_accepted = slots[:, 0].tolist(), accepted_counts.tolist()
        convolved = convolve(
            mixed_TD,
            [lengths[index] for index in active_sequences],
            [previous_accepted[index] for index in active_sequences],
            [conv_buffers[first_slots[index]] for index in active_sequences],
            gdn_attention._unpacked_conv_weight(layer)[:, None],
            layer.conv1d.bias,
        )
        heads = layer.rearrange_mixed_qkv(functional.silu(convolved) if layer.activation == "silu" else convolved)
        query, key, value = (tensor.squeeze(0) for tensor in heads)
        return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=query,
            k=key,
            v=value,
            a=a,
            b=b,
            initial_state_source=recurrent_states,
            spec_state_indices=slots.int().contiguous(),
            num_accepted_tokens=accepted_counts.int().contiguous(),
            cu_seqlens=bounds.int().contiguous(),
            use_qk_l2norm_in_kernel=True,
        )

    assign(gdn_attention, _spec_forward=spec_forward)


def convolve(
    inputs_TD: Tensor, lengths: list[int], accepted_counts: list[int], buffers_NDS: list[Tensor], taps_D1W: Tensor, bias_D: Tensor | None
) -> Tensor:
    """Causal convolution of each sequence's query, without activation, and the update of its buffer in place.

    Args:
        inputs_TD: the queries of all sequences, one after another: T tokens, D channels.
        lengths: tokens of each query, at least 1.
        accepted_counts: number of accepted tokens in each sequence's previous step, at least 1.
        buffers_NDS: one buffer [D, S] per sequence.
        taps_D1W: weights of the depthwise convolution over W inputs.
        bias_D: bias, if the layer has one.

    Returns:
        [T, D]
    """
    width = taps_D1W.shape[-1]
    outputs = []
    for query_TD, previous_accepted, buffer_DS in zip(inputs_TD.split(lengths), accepted_counts, buffers_NDS, strict=True):
        history_DW = buffer_DS[:, previous_accepted - 1 : previous_accepted + width - 2]
        window = torch.cat([history_DW, query_TD.T.to(buffer_DS.dtype)], dim=1)
        outputs.append(functional.conv1d(window[None], taps_D1W, bias_D, groups=len(window))[0].T)
        buffer_DS[:, : window.shape[1] - 1] = window[:, 1:]
    return torch.cat(outputs).to(inputs_TD.dtype)


# ---------------------------------------------------------------------------------------------- values narrower than keys


@cpu_patch
def install_narrow_values() -> None:
    """Pad values that are narrower than keys (MiMo-V2-Flash), because the CPU's attention kernel supports only equal widths.

    For such layers vLLM selects a Triton kernel, which a CPU does not have, so the engine fails in its first step. Padding with zeros adds
    columns of zeros to the output, which are dropped.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import mimo_v2

    if getattr(mimo_v2, "Attention", None) is not Attention:
        raise UpstreamMoved(f"{__name__}: {mimo_v2.__name__}.Attention is gone; find how the model selects its attention kernel on a CPU")

    class PaddedAttention(Attention):
        def __init__(self, num_heads: int, head_size: int, *args: Any, head_size_v: int, attn_backend: Any, **kwargs: Any) -> None:
            super().__init__(num_heads, head_size, *args, **kwargs)
            self.value_width = head_size_v

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            padding = self.head_size - self.value_width
            padded_values = functional.pad(value.unflatten(-1, (-1, self.value_width)), (0, padding)).flatten(-2)
            heads = super().forward(query, key, padded_values, *args, **kwargs).unflatten(-1, (-1, self.head_size))
            return heads[..., : self.value_width].flatten(-2)

    assign(mimo_v2, Attention=PaddedAttention)


# ------------------------------------------------------------------------------------------------------ experts with LoRA


@cpu_patch
def install_experts() -> None:
    """Select the CPU's own kernel for experts in an engine with LoRA.

    With LoRA enabled, vLLM computes all experts with Triton kernels, even if the adapter does not target experts; a CPU has no Triton.
    The CPU's kernel ignores adapters. That is correct, because `build_engine_settings` limits adapters to the recipe's targets, and on a
    CPU these must not include experts.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe_method

    upstream = getattr(moe_method, "select_unquantized_moe_backend", None)
    if upstream is None:
        raise UpstreamMoved(
            f"{__name__}: {moe_method.__name__}.select_unquantized_moe_backend is gone; find where the expert kernel is chosen"
        )

    @wraps(upstream)
    def select_backend(moe_config: FusedMoEConfig) -> tuple[UnquantizedMoeBackend, type[FusedMoEExperts] | None]:
        return upstream(replace(moe_config, is_lora_enabled=False))  # type: ignore[no-any-return]

    assign(moe_method, select_unquantized_moe_backend=select_backend)


# ------------------------------------------------------------------------------------------------- experts one by one


class SequentialExperts:
    """Base class of kernels that compute one expert after another in PyTorch, and add their outputs in fp32."""

    def run_expert(self, states: Tensor, w1: Tensor, w2: Tensor, expert: int) -> Tensor:
        """The output [t, H] of an expert for `states` [t, H], given the matrices of all experts."""
        raise NotImplementedError

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        **unused: object,
    ) -> None:
        """Implements the method that vLLM calls. `topk_weights` and `topk_ids` are [T, k]; the result is written to `output`."""
        if apply_router_weight_on_input:
            raise NotImplementedError("apply_router_weight_on_input is not supported: weights are applied to the outputs")
        local_experts = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
        output.copy_(
            sum_experts(hidden_states, topk_weights, local_experts, lambda states, expert: self.run_expert(states, w1, w2, expert))
        )


def sum_experts(states: Tensor, weights: Tensor, experts: Tensor, run_expert: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Sum the outputs of each token's experts.

    states [T, H]; weights, experts [T, k]: routing weight and index of each selected expert, -1 for experts of other ranks → [T, H] fp32.
    """
    total = torch.zeros(states.shape, dtype=torch.float32)
    for expert in experts.unique().tolist():
        if expert >= 0:
            tokens, choice = (experts == expert).nonzero(as_tuple=True)
            total.index_add_(0, tokens, run_expert(states[tokens], expert).float() * weights[tokens, choice, None].float())
    return total


# -------------------------------------------------------------------------------------------------- routers with a bias


@cpu_patch
def install_biased_router() -> None:
    """Add the bias of a softmax router to the scores that select experts (ERNIE 4.5).

    Without expert groups, vLLM's CPU router selects experts by the logits and ignores `e_score_correction_bias`, so its routes differ from
    those of vLLM on a GPU, transformers and the trainer. The probs of the selected experts do not depend on the bias.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    upstream = CPURouter._compute_routing
    if not _ignores_bias(CPURouter):
        raise UpstreamMoved(f"{__name__}: vLLM's CPU router no longer ignores the bias of softmax scores; remove the patch")

    def compute_routing(
        self: CPURouter, hidden_states: Tensor, router_logits: Tensor, indices_type: torch.dtype | None, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        bias, custom = self.e_score_correction_bias, self.custom_routing_function
        if bias is None or self.use_grouped_topk or self.scoring_func != "softmax" or custom is not None:
            return upstream(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        scores = router_logits.softmax(-1, dtype=torch.float32)
        experts = (scores + bias).topk(self.top_k, dim=-1, sorted=False).indices
        probs = scores.gather(1, experts)
        if self.renormalize:
            probs = probs / probs.sum(-1, keepdim=True)
        return probs * self.routed_scaling_factor, experts.int()

    assign(CPURouter, _compute_routing=compute_routing)


def _ignores_bias(router: type[CPURouter]) -> bool:
    """Whether the router selects the expert with the largest logit although another has a large bias."""
    logits, bias = torch.tensor([[1.0, 0.0]]), torch.tensor([0.0, 10.0])
    _, experts = router(1, 2, e_score_correction_bias=bias)._compute_routing(logits, logits, None)
    return int(experts) == 0
