"""The sizes and conventions of one model, read from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

LayerKind = Literal["full_attention", "linear_attention", "sliding_attention", "mamba", "none"]
"""The mixer of a layer. `none`: the layer has only an MLP, dense or with experts (Nemotron-H)."""

MlpKind = Literal["dense", "sparse", "none"]
"""The MLP of a layer. `none`: the layer has only a mixer (Nemotron-H)."""

KV_HEADS = "key-value heads"
"""Key of `ModelShape.tp_counts` for key-value heads that several ranks may share."""


class RopeScaling(TypedDict, total=False):
    """Config fields that scale rotary embeddings, with the names of transformers. Most are optional.

    `rope_type` and, except for linear scaling, `original_max_position_embeddings` are always set.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    mscale: float
    mscale_all_dim: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class MtpConvention:
    """The tensor names and the inputs of a family's MTP layers.

    Names are templates. `{k}` is the depth from 0, and `{n}` the depth plus the number of decoder layers. A template without a placeholder
    names a tensor that all depths share. `layer` is the prefix of the transformer layer.

    `reads_prenorm`: the first depth reads the trunk's state before the final norm. `passes_prenorm`: later depths read the previous
    depth's state before its final norm. `blanks_first`: engines replace the embedding at position 0 by zeros in the first depth.
    `final_norm`: None if the LM head reads the layer's output directly. `dense`: the layer has a dense MLP even in a model with experts.
    `kind`: kind of the layer's attention. `mlp_norm`: name of the norm before the MLP. `embedding_copy`, `head_copy`: names of copies of
    embedding and LM head that folders store with the layer; None if they store none. `unquantized`: matrices of the layer that vLLM never
    reads in FP8, in addition to the projection.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None
    reads_prenorm: bool
    blanks_first: bool
    passes_prenorm: bool = False
    dense: bool = False
    kind: LayerKind = "full_attention"
    mlp_norm: str = "post_attention_layernorm"
    embedding_copy: str | None = None
    head_copy: str | None = None
    unquantized: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether all depths share one projection."""
        return "{" not in self.projection

    def name(self, template: str, depth: int, layers: int) -> str:
        """The name from a template for MTP layer `depth` of a model with `layers` decoder layers."""
        return template.format(k=depth, n=layers + depth)


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """An EAGLE-3 drafter (arXiv 2503.01840), which is stored in the subfolder `drafter/` of the model's folder.

    It is a Llama layer with the model's attention heads. Its attention reads the concatenation of a token embedding and a state. At the
    first depth, the state is a projection of the trunk's states at `boundaries`; boundary n is the state after n decoder layers. `ffn`:
    width of the MLP.
    """

    boundaries: tuple[int, ...]
    ffn: int


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """A DFlash drafter (arXiv 2602.06036), which is stored in the subfolder `drafter/` of the model's folder.

    Its `layers` Qwen3 layers with the model's attention heads draft a block of tokens in one pass. The inputs are the embeddings of the
    last sampled token and, once for each draft, of `mask_token`. Every layer also attends to keys and values that it computes from the
    trunk's states at `boundaries` (see `Eagle3Shape`). `ffn`: width of the MLPs.
    """

    boundaries: tuple[int, ...]
    layers: int
    ffn: int
    mask_token: int


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Mixture of experts: counts, widths, and the dense decoder layers.

    softmax_bias: the router adds a bias to softmax scores. The bias is stored as `moe_statics.e_score_correction_bias` [1, E] (ERNIE 4.5).
    """

    experts: int
    experts_per_token: int
    ffn: int
    shared_ffn: int
    shared_name: str
    shared_gate: bool
    router_bias: bool
    dense_layers: frozenset[int]
    softmax_bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks of the compressed query and key-value, widths per head."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Attention of layers with a sliding window.

    size: number of tokens that a token attends to, including itself. sinks: whether each query head has a learned score that is added to
    the softmax's denominator (arXiv 2309.17453; as in gpt-oss).
    """

    size: int
    kv_heads: int
    rope_theta: float
    sinks: bool


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Gated DeltaNet, the linear attention of Qwen3-Next and Qwen3.5. `fp32_state`: engines store its state in fp32."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    fused_projections: bool
    fp32_state: bool = False


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Mamba-2 (arXiv 2405.21060). The heads of each of the `groups` share B and C, the projections into and out of the state.

    state: width of the state per channel. conv: width of the convolution. fp32_state: engines store the state in fp32.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    fp32_state: bool

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes and conventions of one model. Widths are in elements, `max_positions` in tokens.

    rotary_fraction: rotated fraction of a head; 0: no rotary embedding. value_dim: width of a value head. value_scale: factor by which
    values are multiplied. embedding, norm: names of the embedding and the final norm, after `prefix`. mamba: set for Nemotron-H, whose
    layers have either a mixer or an MLP, and whose MLPs and experts are a squared ReLU between two matrices.
    """

    family: str
    architecture: str
    prefix: str
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rotary_fraction: float
    rms_eps: float
    qkv_bias: bool
    qk_norm: bool
    gated_attention: bool
    tied: bool
    max_positions: int
    mtp_layers: int
    mtp: MtpConvention | None
    moe: MoeShape | None
    latent: LatentShape | None
    delta: DeltaShape | None
    layer_kinds: tuple[LayerKind, ...]
    value_dim: int
    value_scale: float = 1.0
    window: WindowShape | None = None
    eagle3: Eagle3Shape | None = None
    dflash: DFlashShape | None = None
    mamba: MambaShape | None = None
    embedding: str = "embed_tokens"
    norm: str = "norm"

    @property
    def embedding_name(self) -> str:
        return f"{self.prefix}{self.embedding}.weight"

    @property
    def norm_name(self) -> str:
        return f"{self.prefix}{self.norm}.weight"

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices in an MLP or an expert: up- and down-projection, and the gate in families with gated MLPs."""
        return 3 if self.mamba is None else 2

    def mlp_of(self, layer: int) -> MlpKind:
        if self.mamba is not None and self.layer_kinds[layer] != "none":
            return "none"
        return "dense" if self.moe is None or layer in self.moe.dense_layers else "sparse"

    @property
    def tp_counts(self) -> dict[str, int]:
        """Numbers of heads and groups that tensor-parallel ranks split, by name."""
        counts = {"attention heads": self.heads}
        if self.window is None:
            counts[KV_HEADS] = self.kv_heads
        else:
            # Window attention does not support ranks that share a key-value head.
            counts |= {"key-value heads of full attention": self.kv_heads, "key-value heads of window attention": self.window.kv_heads}
        if self.delta:
            counts |= {"linear key heads": self.delta.key_heads, "linear value heads": self.delta.value_heads}
        if self.mamba:
            counts |= {"Mamba heads": self.mamba.heads, "Mamba groups": self.mamba.groups}
        return counts

    @property
    def drafter_layers(self) -> int:
        """Number of the drafter's layers with a key-value cache."""
        return self.mtp_layers if self.dflash is None else self.dflash.layers

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries at which a drafter in the subfolder `drafter/` reads the trunk's states; empty for other drafters."""
        drafter = self.eagle3 or self.dflash
        return () if drafter is None else drafter.boundaries

    def kv_heads_of(self, kind: LayerKind) -> int:
        """Number of key-value heads of a layer with softmax attention."""
        return self.window.kv_heads if self.window is not None and kind == "sliding_attention" else self.kv_heads

    @property
    def mtp_kind(self) -> LayerKind:
        return self.mtp.kind if self.mtp is not None else "full_attention"

    @property
    def mtp_reads_prenorm(self) -> bool:
        """Whether the first MTP layer reads the trunk's state before the final norm, as in MiMo, or after it."""
        return self.mtp is not None and self.mtp.reads_prenorm


def tp_divides(tp: int, name: str, count: int) -> bool:
    """Whether `tp` ranks (or cp or ep ranks) can split `count` equally. If `name` is `KV_HEADS`, neighboring ranks may share a head."""
    return count % tp == 0 or (name == KV_HEADS and tp % count == 0)
