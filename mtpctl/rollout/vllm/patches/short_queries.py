"""Fix the convolution state of linear attention for sequences with fewer drafts than the engine's maximum, on a CPU (vLLM 0.32.0).

With speculation, vLLM keeps for each sequence a buffer of the last inputs of the causal convolution: `width - 2` inputs before the current
query, then the query's. The next step reads its history at the number of tokens that were accepted. A query of `state_len - width + 2`
tokens fills the buffer exactly. A shorter one (at the context limit, or after the number of drafts was reduced) must be
stored at the same column, but vLLM aligns it to the end of the buffer. Then the next step reads inputs that are too old, and if the
previous step accepted more tokens than the query has, the copy fails and the engine dies. The CUDA kernel stores short queries correctly.

Steps with full queries only run vLLM's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mtpctl.rollout.vllm.patches.assign import assign
from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

_PATCHED = "_mtpctl_short_queries"


def convolve(
    inputs_TD: Tensor, lengths: list[int], accepted: list[int], buffers_NDS: list[Tensor], taps_D1W: Tensor, bias_D: Tensor | None
) -> Tensor:
    """Causal convolution of each sequence's query, without activation, and the update of its buffer in place.

    Args:
        inputs_TD: the queries of all sequences, one after another: T tokens, D channels.
        lengths: tokens of each query, at least 1.
        accepted: tokens of each sequence's previous step that were accepted, at least 1.
        buffers_NDS: one buffer [D, S] per sequence.
        taps_D1W: weights of the depthwise convolution over W inputs.
        bias_D: bias, if the layer has one.

    Returns:
        [T, D]
    """
    width = taps_D1W.shape[-1]
    outputs = []
    for query_TD, tokens_before, buffer_DS in zip(inputs_TD.split(lengths), accepted, buffers_NDS, strict=True):
        history_DW = buffer_DS[:, tokens_before - 1 : tokens_before + width - 2]
        window = torch.cat([history_DW, query_TD.T.to(buffer_DS.dtype)], dim=1)
        outputs.append(functional.conv1d(window[None], taps_D1W, bias_D, groups=len(window))[0].T)
        buffer_DS[:, : window.shape[1] - 1] = window[:, 1:]
    return torch.cat(outputs).to(inputs_TD.dtype)


def install() -> bool:
    """Install the patch on a CPU; returns whether it is installed. May be called again.

    Raises UpstreamMoved for another release.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    if hasattr(gdn_attention, _PATCHED):
        return True
    require_pinned(__name__)
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
        bounds, slots, accepted = metadata.spec_query_start_loc, metadata.spec_state_indices_tensor, metadata.num_accepted_tokens
        assert bounds is not None and slots is not None and accepted is not None
        sequences = metadata.num_spec_decodes
        bounds, slots, accepted = bounds[: sequences + 1], slots[:sequences], accepted[:sequences]
        lengths = bounds.diff().tolist()
        if all(tokens == state_len - width + 2 for tokens in lengths):
            return upstream(layer, metadata, mixed_TD, b, a, conv_buffers, recurrent_states, width, state_len)
        # Padding sequences of no tokens have no state to read.
        present = [index for index, tokens in enumerate(lengths) if tokens]
        first_slots, accepted_before = slots[:, 0].tolist(), accepted.tolist()
        convolved = convolve(
            mixed_TD,
            [lengths[index] for index in present],
            [accepted_before[index] for index in present],
            [conv_buffers[first_slots[index]] for index in present],
            gdn_attention._unpacked_conv_weight(layer)[:, None],
            layer.conv1d.bias,
        )
        heads = layer.rearrange_mixed_qkv(functional.silu(convolved) if layer.activation == "silu" else convolved)
        query, key, value = (each.squeeze(0) for each in heads)
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
            num_accepted_tokens=accepted.int().contiguous(),
            cu_seqlens=bounds.int().contiguous(),
            use_qk_l2norm_in_kernel=True,
        )

    assign(gdn_attention, _spec_forward=spec_forward, **{_PATCHED: True})
    return True
