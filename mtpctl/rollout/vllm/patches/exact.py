"""Exact sums in vLLM's CPU backend, for `numerics: bitwise` (vLLM 0.32.0).

vLLM selects kernels by the shape of a step, so a token's log-prob depends on the other tokens of the step: a matrix product of one to three
rows sums in another order than one of four, and attention over a chunk in another order than over one query. In a bitwise engine,
a dense model with grouped-query attention computes with `mtpctl.kernels.exact`, as the trainer does: linear layers and LM head, norms,
SwiGLU, rotary embedding, attention, and the log-softmax of sampled tokens. Drafters use the same layers.

Experts: vLLM rounds router logits to the model's dtype, selects an expert kernel by platform, and scales the experts' outputs by their
probs. In a bitwise engine, router and experts compute with `mtpctl.kernels.exact_experts`, as in the trainer. Weights keep their loaded
layout. Routes are recorded from this router.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mtpctl.errors import UpstreamMoved
from mtpctl.kernels import exact, exact_experts, invariant
from mtpctl.model.rope import scale_by_wavelength
from mtpctl.rollout.vllm.patches import NUMERICS, assign, cpu_patch, patch

if TYPE_CHECKING:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backend import AttentionLayer
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler


_ROTARY_TABLE = "_mtpctl_exact_table"


def is_bitwise() -> bool:
    """Whether the engine that is being built in this process has `numerics: bitwise`."""
    return os.environ.get(NUMERICS) == "bitwise"


@cpu_patch
def install_exact() -> None:
    """Make the layers of a bitwise engine compute with exact sums. Layers of other engines are unchanged."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.sample.sampler import Sampler

    required_methods = ((utils, "dispatch_cpu_unquantized_gemm"), (CPUAttentionBackend, "get_impl_cls"), (Sampler, "sample"))
    for owner, name in required_methods:
        if not hasattr(owner, name):
            raise UpstreamMoved(f"{__name__}: {owner.__name__}.{name} is gone; find how this vLLM computes it, or log-probs are not exact")
    upstream_dispatch, upstream_attention_class = utils.dispatch_cpu_unquantized_gemm, CPUAttentionBackend.get_impl_cls

    @wraps(upstream_dispatch)
    def dispatch_gemm(layer: nn.Module, remove_weight: bool) -> None:
        upstream_dispatch(layer, remove_weight)
        if is_bitwise() and layer.get_parameter("weight").ndim == 2:
            layer.__dict__["cpu_linear"] = linear

    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return exact_attention_class() if is_bitwise() else upstream_attention_class()

    assign(utils, dispatch_cpu_unquantized_gemm=dispatch_gemm)
    assign(CPUAttentionBackend, get_impl_cls=staticmethod(get_impl_cls))
    replace_forward(RMSNorm, rms_norm)
    replace_forward(SiluAndMul, silu_and_mul)
    replace_row_parallel(summed_linear)
    assign(RotaryEmbedding, forward_cpu=_with_exact_table(RotaryEmbedding.forward_cpu))
    _patch_log_softmax(Sampler)


def replace_forward(layer: type[nn.Module], forward: Callable[..., object], method: str = "_forward_method") -> None:
    """Make layers of a bitwise engine compute `forward(layer, ...)`. `method`: the attribute that vLLM calls."""
    upstream = layer.__init__

    @wraps(upstream)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        if is_bitwise():
            self.__dict__[method] = forward.__get__(self)

    assign(layer, __init__=__init__)


def replace_row_parallel(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Make row-parallel layers of a bitwise engine with several ranks compute `product(x, weight)`, the sum over the ranks.

    vLLM adds a bias on the first rank before it sums; the trainer adds it to the rounded sum.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    if "forward" not in vars(RowParallelLinear):
        raise UpstreamMoved(f"{__name__}: RowParallelLinear.forward is gone; find how this vLLM sums over ranks, or sums are not exact")
    upstream = RowParallelLinear.forward

    @wraps(upstream)
    def forward(self: RowParallelLinear, input_: Tensor) -> Any:
        if not is_bitwise() or self.tp_size == 1:
            return upstream(self, input_)
        assert self.input_is_parallel and self.reduce_results, f"{self.prefix}: partial sums are not exact"
        out = product(input_, self.get_parameter("weight"))
        if self.bias is not None and not self.skip_bias_add:
            out = out + self.bias
        return (out, self.bias if self.skip_bias_add else None) if self.return_bias else out

    assign(RowParallelLinear, forward=forward)


# --------------------------------------------------------------------------------------------------------------- layers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] · weightᵀ + bias."""
    out = exact.linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return out if bias is None else out.add_(bias)


def summed_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in / tp] · weightᵀ, summed over the ranks before it is rounded."""
    from vllm.distributed import get_tp_group

    return exact.linear(x.flatten(0, -2), weight, get_tp_group().cpu_group).unflatten(0, x.shape[:-1])


def rms_norm(self: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of x. With a residual, returns the norm of x + residual, and x + residual."""
    if residual is not None:
        x = x + residual
    out = exact.rms_norm(x, self.weight.data, self.variance_epsilon)
    return out if residual is None else (out, x)


def silu_and_mul(self: SiluAndMul, x: Tensor) -> Tensor:
    return exact.swiglu(x)


def rotary_table(layer: RotaryEmbedding, positions: int = 0) -> tuple[Tensor, Tensor]:
    """Compute the trainer's cosines and sines fp32 [positions, rotated dimensions / 2] on a CPU.

    positions: minimum number of positions, even if the model's maximum is lower.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding

    with torch.device("cpu"):
        frequencies = RotaryEmbedding._compute_inv_freq(layer, layer.base)
        if isinstance(layer, Llama3RotaryEmbedding):
            factors = layer.scaling_factor, layer.low_freq_factor, layer.high_freq_factor
            frequencies = scale_by_wavelength(frequencies, *factors, layer.orig_max_position)
        indices = torch.arange(max(layer.max_position_embeddings, positions), dtype=torch.float32)
        return exact.cos_sin(indices[:, None] * frequencies)


Rotation = Callable[["RotaryEmbedding", Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def _with_exact_table(upstream: Rotation) -> Rotation:
    """Rotate with an exact table of cosines and sines. All engines of a process share these layers, so each call reads `NUMERICS`."""

    @wraps(upstream)
    def forward_cpu(self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if not is_bitwise():
            return upstream(self, positions, query, key)
        if _ROTARY_TABLE not in self.__dict__:
            self.__dict__[_ROTARY_TABLE] = rotary_table(self)

        def rotate(x: Tensor) -> Tensor:
            return exact.rotate(x.unflatten(-1, (-1, self.head_size)), positions, *self.__dict__[_ROTARY_TABLE]).flatten(1)

        return rotate(query), None if key is None else rotate(key)

    return forward_cpu


# ------------------------------------------------------------------------------------------------------------ attention


@cache
def exact_attention_class() -> type[CPUAttentionBackendImpl]:
    """vLLM's CPU attention, but with `exact.attention`, and with keys and values stored unpacked in the KV cache."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    class ExactAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
        def forward(
            self,
            layer: AttentionLayer,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: CPUAttentionMetadata | None,
            output: Tensor,
            *_: object,
            **__: object,
        ) -> Tensor:
            if attn_metadata is not None:
                paged_attention(query, *_key_value_views(kv_cache), attn_metadata, self.scale, output)
            return output

        def do_kv_cache_update(self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
            rows = (slot_mapping >= 0).nonzero().squeeze(1)  # padding rows have no slot
            slots, block_size = slot_mapping[rows], kv_cache.shape[2]
            for cache_view, new_rows in zip(_key_value_views(kv_cache), (key, value), strict=True):
                cache_view[slots // block_size, :, slots % block_size] = new_rows[rows]

    return ExactAttention


def _key_value_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values [blocks, key-value heads, slots, width] in the KV cache."""
    keys, values = kv_cache.chunk(2, dim=-1)
    return keys, values


def paged_attention(
    query: Tensor, key_blocks: Tensor, value_blocks: Tensor, metadata: CPUAttentionMetadata, scale: float, output: Tensor
) -> None:
    """Causal attention of each request's last tokens to its tokens in the KV cache. Writes `output`, like query [tokens, heads, width].

    Requests with equal numbers of queries are computed in batches, within the limit of temporary memory.
    """
    assert metadata.causal is True, "bidirectional attention has no exact sums"
    query_starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    _, num_kv_heads, block_size, width = key_blocks.shape
    for count, requests in _batch_by_query_count(query_starts, lengths, 8 * num_kv_heads * width):
        batch_lengths = torch.tensor([lengths[request] for request in requests])[:, None]
        max_length = int(batch_lengths.max())
        blocks = metadata.block_table[requests, : -(-max_length // block_size)].long()
        keys, values = (cache_view[blocks].transpose(1, 2).flatten(2, 3)[:, :, :max_length] for cache_view in (key_blocks, value_blocks))
        rows = torch.tensor([query_starts[request] for request in requests])[:, None] + torch.arange(count)
        slot_indices = torch.arange(max_length)
        # Slots after the last token of a request have arbitrary contents.
        keys, values = (x.masked_fill((slot_indices >= batch_lengths)[:, None, :, None], 0.0) for x in (keys, values))
        visible = slot_indices <= (batch_lengths - count + torch.arange(count))[:, :, None]
        out = exact.attention(query[rows].transpose(1, 2), keys, values, visible, scale)
        output[rows] = out.transpose(1, 2).reshape(*rows.shape, *output.shape[1:])


def _batch_by_query_count(query_starts: list[int], lengths: list[int], key_bytes: int) -> Iterator[tuple[int, list[int]]]:
    """Batches of requests with equal numbers of queries, as (queries per request, requests).

    The keys of a batch, padded to the longest request, take at most `exact.BLOCK_BYTES`, unless the batch is a single request. key_bytes:
    size of the keys at one position.
    """
    requests_by_count: dict[int, list[int]] = {}
    for request in range(len(lengths)):
        requests_by_count.setdefault(query_starts[request + 1] - query_starts[request], []).append(request)
    requests_by_count.pop(0, None)
    for count, requests in requests_by_count.items():
        batch_size = max(1, exact.BLOCK_BYTES // (key_bytes * max(lengths[request] for request in requests)))
        for first in range(0, len(requests), batch_size):
            yield count, requests[first : first + batch_size]


# ------------------------------------------------------------------------------------------------------------- sampling


def _patch_log_softmax(sampler: type[Sampler]) -> None:
    """Make samplers of a bitwise engine compute log-probs with `exact.log_softmax`.

    For a token after accepted drafts, vLLM's rejection sampler requests logits from the sampler, but gets log-probs, and applies
    log-softmax again, which rounds. The patched samplers return logits when they are requested.
    """
    upstream_init, upstream_forward, upstream_sample = sampler.__init__, sampler.forward, sampler.sample

    @wraps(upstream_init)
    def __init__(self: Sampler, *args: Any, **kwargs: Any) -> None:
        upstream_init(self, *args, **kwargs)
        if is_bitwise():
            self.__dict__["compute_logprobs"] = exact.log_softmax
            self.__dict__["forward"] = _forward.__get__(self)
            self.__dict__["sample"] = _sample.__get__(self)
            self.topk_topp_sampler.logprobs_mode = "processed_logits"

    def _forward(self: Sampler, *args: Any, **kwargs: Any) -> object:
        self.__dict__["mtpctl_wants_logits"] = kwargs.get("logprobs_mode_override") == "processed_logits"
        return upstream_forward(self, *args, **kwargs)

    def _sample(self: Sampler, logits: Tensor, sampling_metadata: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
        tokens, processed = upstream_sample(self, logits, sampling_metadata, logprobs_mode_override="processed_logits")
        if processed is not None and not self.__dict__["mtpctl_wants_logits"]:
            processed = exact.log_softmax(processed)
        return tokens, processed

    assign(sampler, __init__=__init__)


@patch
def install_exact_experts() -> None:
    """Make the experts of a bitwise engine compute with `exact_experts`.

    On CUDA, engines with the default numerics are not patched, because Dynamo would trace the patched methods.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or is_bitwise()):
        return
    required_methods = ((GateLinear, "forward"), (MoERunner, "_apply_quant_method"), (UnquantizedFusedMoEMethod, "_setup_kernel"))
    for owner, name in required_methods:
        if name not in vars(owner):
            raise UpstreamMoved(f"{__name__}: {owner.__name__}.{name} is gone; find how this vLLM computes experts, or they are not exact")
    upstream_gate, upstream_experts, upstream_setup = (
        GateLinear.forward,
        MoERunner._apply_quant_method,
        UnquantizedFusedMoEMethod._setup_kernel,
    )

    @wraps(upstream_gate)
    def forward(self: GateLinear, x: Tensor) -> Any:
        return self._return(_logits(x, self.get_parameter("weight"))) if is_bitwise() else upstream_gate(self, x)

    @wraps(upstream_experts)
    def apply(self: MoERunner, *args: Any, **kwargs: Any) -> Any:
        return run_moe(self, *args, **kwargs) if is_bitwise() else upstream_experts(self, *args, **kwargs)

    @wraps(upstream_setup)
    def _setup_kernel(self: UnquantizedFusedMoEMethod, *args: Any, **kwargs: Any) -> None:
        if not is_bitwise():
            upstream_setup(self, *args, **kwargs)
            return
        self.unquantized_backend = UnquantizedMoeBackend.TRITON  # weight updates check for a backend that does not pack weights

    assign(GateLinear, forward=forward)
    assign(MoERunner, _apply_quant_method=apply)
    assign(UnquantizedFusedMoEMethod, _setup_kernel=_setup_kernel)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    return invariant.logits(x, weight) if x.is_cuda else exact.logits(x, weight)


def run_moe(runner: MoERunner, hidden_states: Tensor, router_logits: Tensor, *_: Any, **__: Any) -> tuple[None, Tensor]:
    """Run router and experts. Returns None for the shared experts, and the routed experts' output [T, H]."""
    assert runner._shared_experts is None, "shared experts are not exact"
    router: Any = runner.router
    layer: Any = runner.routed_experts
    experts = exact_experts.top_experts(router_logits, router.top_k)
    if router.capture_fn is not None:
        router.capture_fn(experts)
    over_all = not router.renormalize
    return None, exact_experts.run_experts(hidden_states, router_logits, experts, layer.w13_weight, layer.w2_weight, over_all=over_all)
