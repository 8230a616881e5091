"""Row-independent operations in vLLM on CUDA, for `numerics: bitwise` (vLLM 0.32.0).

vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT) makes a row independent of the batch, but its operations differ from the trainer's: it
rounds cosines, sines and logits to half precision, computes activations and norms in another order, and attends with FlashAttention 3. A
bitwise engine therefore computes linear layers, LM head, norms, SwiGLU, rotary embedding, attention and the log-probs of sampled tokens
with `mtpctl.kernels.invariant`, which the trainer calls too. Drafters use the same layers.

The model is not compiled, because Inductor fuses operations and rounds their results at other points. Steps that only decode run as full
CUDA graphs, and steps with prefill as piecewise CUDA graphs, between which attention runs eagerly (`mtpctl.rollout.vllm.settings`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mtpctl.errors import UpstreamMoved, UserError
from mtpctl.kernels import invariant
from mtpctl.kernels.invariant import PagedKV
from mtpctl.rollout.vllm.patches import assign, patch
from mtpctl.rollout.vllm.patches.exact import is_bitwise, replace_forward, replace_row_parallel, rotary_table

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

_ROTARY_TABLE = "_mtpctl_invariant_table"
_UNSUPPORTED = {"alibi_slopes", "attn_type", "logits_soft_cap", "sinks", "sliding_window"}
"""Options of attention that `invariant.paged_attention` does not compute."""
Apply = Callable[..., Tensor]


@patch
def install_invariant() -> None:
    """Make the layers of a bitwise engine on CUDA compute with `invariant`.

    Engines with the default numerics are not patched, because Dynamo would trace the patched methods. On CUDA each engine has its own
    process.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and is_bitwise():
        replace_operations()


def replace_operations() -> None:
    """Replace the operations, on any platform. Raises UpstreamMoved if vLLM no longer has one of the replaced methods."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.worker.gpu.sample import logprob
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    required_methods = (
        (UnquantizedLinearMethod, "apply"),
        (UnquantizedEmbeddingMethod, "apply"),
        (RotaryEmbedding, "_compute_inv_freq"),
        (FlashAttentionBackend, "get_impl_cls"),
        (logprob, "compute_token_logprobs"),
        (DraftModelSpeculator, "draft_logits_spec"),
    )
    for owner, name in required_methods:
        if not hasattr(owner, name):
            raise UpstreamMoved(
                f"{__name__}: {owner.__name__}.{name} is gone; find how this vLLM computes it, or log-probs are not bitwise"
            )
    upstream_attention_class, compute_token_logprobs = FlashAttentionBackend.get_impl_cls, logprob.compute_token_logprobs
    upstream_draft_logits_spec = DraftModelSpeculator.draft_logits_spec

    def get_impl_cls() -> type[FlashAttentionImpl]:
        return invariant_attention_class() if is_bitwise() else upstream_attention_class()

    def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
        if not is_bitwise():
            return compute_token_logprobs(logits, token_ids)
        return invariant.token_logprobs(logits, token_ids.long())

    def draft_logits_spec(self: DraftModelSpeculator, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        """Dtype and initial value of the buffer for the logits of sampled drafts. Its dtype must be that of the LM head's output."""
        return (torch.float32, 0.0) if is_bitwise() else upstream_draft_logits_spec(self, vllm_config)

    assign(UnquantizedLinearMethod, apply=_with_product(UnquantizedLinearMethod.apply, linear))
    assign(UnquantizedEmbeddingMethod, apply=_with_product(UnquantizedEmbeddingMethod.apply, logits))
    assign(FlashAttentionBackend, get_impl_cls=staticmethod(get_impl_cls))
    assign(logprob, compute_token_logprobs=token_logprobs)
    assign(DraftModelSpeculator, draft_logits_spec=draft_logits_spec)
    replace_row_parallel(summed_linear)
    replace_forward(RMSNorm, rms_norm)
    replace_forward(SiluAndMul, silu_and_mul)
    replace_forward(RotaryEmbedding, rotary)
    assign(RotaryEmbedding, __init__=_with_rotary_table(RotaryEmbedding.__init__))


def _with_product(upstream: Apply, product: Apply) -> Apply:
    """Wrap the method of a linear layer or LM head without quantization."""

    @wraps(upstream)
    def apply(self: object, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, layer.weight, bias) if is_bitwise() else upstream(self, layer, x, bias)

    return apply


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] · weightᵀ + bias. Like the trainer, it rounds the product before it adds the bias."""
    out = invariant.linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return out if bias is None else out.add_(bias)


def summed_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in / tp] · weightᵀ, rounded on each rank, and summed.

    Bitwise engines have at most two ranks on GPUs. Every all-reduce rounds the sum of two numbers once, so it equals the trainer's.
    """
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(linear(x, weight, None))


def logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 logits of x [rows, in]."""
    out = invariant.logits(x, weight)
    return out if bias is None else out.add_(bias)


def rms_norm(self: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of x. With a residual, returns the norm of x + residual, and x + residual, which is rounded first, as in the trainer."""
    if residual is not None:
        x = x + residual
    out = invariant.rms_norm(x, self.weight.data, self.variance_epsilon)
    return out if residual is None else (out, x)


def silu_and_mul(self: SiluAndMul, x: Tensor) -> Tensor:
    return invariant.swiglu(x)


def _with_rotary_table(upstream_init: Callable[..., None]) -> Callable[..., None]:
    """Make rotary embeddings store a table for all positions of requests, because `invariant.rotate` supports only those in the table."""
    from vllm.config import get_current_vllm_config

    @wraps(upstream_init)
    def __init__(self: RotaryEmbedding, *args: Any, **kwargs: Any) -> None:
        upstream_init(self, *args, **kwargs)
        if is_bitwise():
            self.__dict__[_ROTARY_TABLE] = rotary_table(self, _max_positions(get_current_vllm_config()))

    return __init__


def _max_positions(config: VllmConfig) -> int:
    """Maximum number of positions of a request, drafts included; 0 if the config has no model."""
    drafts = 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    return 0 if config.model_config is None else int(config.model_config.max_model_len) + drafts


def rotary(self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Rotate in fp32 with the trainer's cosines and sines; vLLM rounds its cosines and sines to half precision."""
    table, positions = tuple(tensor.to(query.device) for tensor in self.__dict__[_ROTARY_TABLE]), positions.flatten()
    self.__dict__[_ROTARY_TABLE] = table

    def rotate(x: Tensor) -> Tensor:
        return invariant.rotate(x.unflatten(-1, (-1, self.head_size)), positions, *table).flatten(1)

    return rotate(query), None if key is None else rotate(key)


@cache
def invariant_attention_class() -> type[FlashAttentionImpl]:
    """vLLM's FlashAttention backend, but with `invariant.paged_attention`. KV cache and metadata are unchanged."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    signature = inspect.signature(FlashAttentionImpl.__init__)
    if unknown_options := _UNSUPPORTED - signature.parameters.keys():
        raise UpstreamMoved(f"{__name__}: FlashAttentionImpl has no option {', '.join(sorted(unknown_options))}; find what replaces it")
    default_values = (None, 0, signature.parameters["attn_type"].default)

    class InvariantAttention(FlashAttentionImpl):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            options = signature.bind(self, *args, **kwargs).arguments
            for name in sorted(_UNSUPPORTED & options.keys()):
                if isinstance(options[name], Tensor) or options[name] not in default_values:
                    raise UserError(
                        f"model: numerics: bitwise does not support attention with {name}; use another model, or set numerics: default"
                    )
            super().__init__(*args, **kwargs)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: FlashAttentionMetadata | None,
            output: Tensor,
            *_: Any,
            **__: Any,
        ) -> Tensor:
            if attn_metadata is None:  # in vLLM's memory profiling
                return output.fill_(0)
            assert attn_metadata.causal is True, "bidirectional attention is not bitwise"
            count = attn_metadata.num_actual_tokens
            # [pages, key-value heads, slots of a page, key and value]
            keys, values = kv_cache.split(self.head_size, dim=-1)
            pages = PagedKV(keys, values, attn_metadata.block_table, attn_metadata.seq_lens)
            query_starts, max_query_len = attn_metadata.query_start_loc, attn_metadata.max_query_len
            invariant.paged_attention(query[:count], pages, query_starts, max_query_len, self.scale, output[:count])
            return output

    return InvariantAttention
