"""The model families as data, and the models that are not supported. A new family is an entry here and a test of its tensor names.

`UNSUPPORTED_MODELS` has the parts that the trainer lacks for some models, according to their code in transformers and vLLM. For other
architectures, `missing_parts` derives them from the fields of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mtpctl.errors import UserError
from mtpctl.families.shape import MtpConvention

Flag = bool | str
"""A value for all models of a family, or the name of the config field that has the value."""


@dataclass(frozen=True, slots=True)
class MoeFields:
    """The experts of a family.

    dense: which layers are dense. first: the first ones; sparse_step: all except every n-th, and those in `mlp_only_layers`; interval: all
    outside a range of layers, and all except every n-th within it; listed: those with 0 in `moe_layer_freq`; pattern: see
    `Family.layer_pattern`. softmax_bias: see `MoeShape`.
    unnormalised_topk: whether routing weights may have a sum other than 1 (`norm_topk_prob: false`).
    """

    shared: Literal["none", "shared_expert", "shared_experts"]
    shared_gate: bool
    router_bias: bool
    dense: Literal["first", "sparse_step", "interval", "listed", "pattern"]
    unnormalised_topk: bool = False
    softmax_bias: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The common properties of a family's models, and the config fields in which they differ.

    output_biases: config fields that add a bias to an output projection of attention or MLP, which the trainer does not support.
    required_values: config fields, each with the only value that the trainer supports. Engines have another default, so the config must
    have the field. renamed: pairs of the family's name of a config field and its usual name. head_dim: default of the config
    field; None: the hidden size divided by the number of heads. head_dim_follows_hidden: no other value than this quotient is supported.
    windows: layers may have sliding windows (MiMo-V2-Flash's fields). sliding_window: default of the config field; None: no window.
    layer_pattern: each layer is a Mamba-2 mixer, attention, a dense MLP or experts, as `layers_block_type` lists (Nemotron-H's fields).
    embedding, norm: see `ModelShape`.
    mtp_layers: the number of MTP layers if the config has no field for it. imports: packages that vLLM imports for the family in addition
    to its dependencies.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    max_positions: int = 32768
    rotary_fraction: float = 1.0
    prefix: str = "model."
    qkv_bias: Flag = False
    output_biases: tuple[str, ...] = ()
    qk_norm: Flag = False
    gated_attention: bool = False
    tied: bool = False
    latent: bool = False
    delta: Literal["none", "fused", "separate"] = "none"
    moe: MoeFields | None = None
    mtp: MtpConvention | None = None
    windows: bool = False
    layer_pattern: bool = False
    embedding: str = "embed_tokens"
    norm: str = "norm"
    mtp_layers: int = 0
    head_dim: int | None = None
    head_dim_follows_hidden: bool = False
    sliding_window: int | None = None
    required_values: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()


_MIMO_MTP = MtpConvention(
    layer="model.mtp_layers.{k}.",
    embedding_norm="model.mtp_layers.{k}.token_layernorm.weight",
    hidden_norm="model.mtp_layers.{k}.hidden_layernorm.weight",
    projection="model.mtp_layers.{k}.input_proj.weight",
    final_norm="model.mtp_layers.{k}.final_layernorm.weight",
    reads_prenorm=True,
    blanks_first=True,
)
_DEEPSEEK_MTP = MtpConvention(
    layer="model.layers.{n}.",
    embedding_norm="model.layers.{n}.enorm.weight",
    hidden_norm="model.layers.{n}.hnorm.weight",
    projection="model.layers.{n}.eh_proj.weight",
    final_norm="model.layers.{n}.shared_head.norm.weight",
    reads_prenorm=False,
    blanks_first=True,
    embedding_copy="model.layers.{n}.embed_tokens.weight",
    head_copy="model.layers.{n}.shared_head.head.weight",
)
# GLM-4.5 has DeepSeek-V3's names. Between depths, DeepSeek-V3's drafter passes the normed state, GLM-4.5's the state before the norm.
_GLM_MTP = replace(_DEEPSEEK_MTP, passes_prenorm=True)
_QWEN_MTP = MtpConvention(
    layer="mtp.layers.{k}.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    final_norm="mtp.norm.weight",
    reads_prenorm=False,
    blanks_first=False,
)
# vLLM supports one layer; the 0 in its tensor names is fixed.
_ERNIE_MTP = MtpConvention(
    layer="model.mtp_block.0.",
    embedding_norm="model.mtp_emb_norm.0.weight",
    hidden_norm="model.mtp_hidden_norm.0.weight",
    projection="model.mtp_linear_proj.0.weight",
    final_norm=None,
    reads_prenorm=False,
    blanks_first=True,
    dense=True,
)
_MIMO_V2_MTP = MtpConvention(
    layer="model.mtp.layers.{k}.",
    embedding_norm="model.mtp.layers.{k}.enorm.weight",
    hidden_norm="model.mtp.layers.{k}.hnorm.weight",
    projection="model.mtp.layers.{k}.eh_proj.weight",
    final_norm="model.mtp.layers.{k}.final_layernorm.weight",
    reads_prenorm=False,
    blanks_first=False,
    dense=True,
    kind="sliding_attention",
    mlp_norm="pre_mlp_layernorm",
    unquantized=("self_attn.o_proj",),
)
# vLLM supports one MTP layer. Its attention is named `mtp.layers.0`, and its experts `mtp.layers.1`.
_NEMOTRON_MTP = MtpConvention(
    layer="mtp.layers.0.",
    embedding_norm="mtp.layers.0.enorm.weight",
    hidden_norm="mtp.layers.0.hnorm.weight",
    projection="mtp.layers.0.eh_proj.weight",
    final_norm="mtp.layers.1.final_layernorm.weight",
    reads_prenorm=False,
    blanks_first=False,
)

EAGLE3 = MtpConvention(
    layer="drafter.midlayer.",
    embedding_norm="drafter.midlayer.input_layernorm.weight",
    hidden_norm="drafter.midlayer.hidden_norm.weight",
    projection="drafter.fc.weight",
    final_norm="drafter.norm.weight",
    reads_prenorm=False,
    blanks_first=False,
    passes_prenorm=True,
)
"""The tensors of an EAGLE-3 drafter. The files in the subfolder store them without the prefix `drafter.`."""

DFLASH = MtpConvention(
    layer="drafter.layers.0.",
    embedding_norm="drafter.layers.0.input_layernorm.weight",
    hidden_norm="drafter.hidden_norm.weight",
    projection="drafter.fc.weight",
    final_norm="drafter.norm.weight",
    reads_prenorm=False,
    blanks_first=False,
)
"""The tensors of a DFlash drafter; `layer` and `embedding_norm` are those of its first layer. The files in the subfolder store them without
the prefix `drafter.`."""

_QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), qkv_bias=True, head_dim_follows_hidden=True)
_QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), output_biases=("attention_bias",), qk_norm=True, head_dim=128)
_QWEN_MOE = MoeFields(shared="none", shared_gate=False, router_bias=False, dense="sparse_step", unnormalised_topk=True)
_QWEN_NEXT_MOE = replace(_QWEN_MOE, shared="shared_expert", shared_gate=True, unnormalised_topk=False)
_DEEPSEEK_MOE = MoeFields(shared="shared_experts", shared_gate=False, router_bias=True, dense="first")
_QWEN3_NEXT = replace(
    _QWEN3,
    name="qwen3-next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    rotary_fraction=0.25,
    head_dim=256,
    gated_attention=True,
    delta="fused",
    moe=_QWEN_NEXT_MOE,
    mtp=_QWEN_MTP,
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    name="qwen3.5",
    architectures=("Qwen3_5ForCausalLM",),
    model_types=("qwen3_5_text",),
    delta="separate",
    moe=None,
    imports=("torchvision",),
)

FAMILIES: tuple[Family, ...] = (
    replace(_QWEN2, name="mimo", architectures=("MiMoForCausalLM",), model_types=("mimo",), mtp=_MIMO_MTP),
    _QWEN2,
    _QWEN3,
    replace(_QWEN3, name="qwen3-moe", architectures=("Qwen3MoeForCausalLM",), model_types=("qwen3_moe",), head_dim=None, moe=_QWEN_MOE),
    _QWEN3_NEXT,
    _QWEN3_5,
    replace(_QWEN3_5, name="qwen3.5-moe", architectures=("Qwen3_5MoeForCausalLM",), model_types=("qwen3_5_moe_text",), moe=_QWEN_NEXT_MOE),
    replace(
        _QWEN3_5,
        name="qwen3.5-vl",
        architectures=("Qwen3_5ForConditionalGeneration",),
        model_types=("qwen3_5",),
        prefix="model.language_model.",
    ),
    replace(
        _QWEN3_5,
        name="qwen3.5-moe-vl",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        model_types=("qwen3_5_moe",),
        prefix="model.language_model.",
        moe=_QWEN_NEXT_MOE,
    ),
    Family(
        "deepseek-v3",
        ("DeepseekV3ForCausalLM",),
        ("deepseek_v3",),
        max_positions=4096,
        latent=True,
        output_biases=("attention_bias",),
        required_values=(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
        moe=_DEEPSEEK_MOE,
        mtp=_DEEPSEEK_MTP,
    ),
    Family("llama", ("LlamaForCausalLM",), ("llama",), max_positions=2048, output_biases=("attention_bias", "mlp_bias")),
    Family("mistral", ("MistralForCausalLM",), ("mistral",), max_positions=131072, sliding_window=4096),
    Family(
        "glm4-moe",
        ("Glm4MoeForCausalLM",),
        ("glm4_moe",),
        max_positions=131072,
        rms_eps=1e-5,
        rotary_fraction=0.5,
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        moe=_DEEPSEEK_MOE,
        mtp=_GLM_MTP,
    ),
    Family(
        "ernie4.5-moe",
        ("Ernie4_5_MoeForCausalLM",),
        ("ernie4_5_moe",),
        rope_theta=500000.0,
        rms_eps=1e-5,
        max_positions=131072,
        tied=True,
        output_biases=("use_bias",),
        renamed=(("moe_num_experts", "n_routed_experts"), ("moe_k", "num_experts_per_tok"), ("moe_num_shared_experts", "n_shared_experts")),
        moe=MoeFields(shared="shared_experts", shared_gate=False, router_bias=True, dense="interval", softmax_bias=True),
        mtp=_ERNIE_MTP,
    ),
    Family(
        "mimo-v2-flash",
        ("MiMoV2FlashForCausalLM",),
        ("mimo_v2_flash",),
        rms_eps=1e-5,
        windows=True,
        renamed=(("layernorm_epsilon", "rms_norm_eps"),),
        moe=replace(_DEEPSEEK_MOE, shared="none", dense="listed"),
        mtp=_MIMO_V2_MTP,
        mtp_layers=3,
    ),
    Family(
        "nemotron-h",
        ("NemotronHForCausalLM",),
        ("nemotron_h",),
        rms_eps=1e-5,
        rotary_fraction=0.0,
        prefix="backbone.",
        embedding="embeddings",
        norm="norm_f",
        layer_pattern=True,
        output_biases=("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"),
        renamed=(("layer_norm_epsilon", "rms_norm_eps"),),
        moe=replace(_DEEPSEEK_MOE, dense="pattern"),
        mtp=_NEMOTRON_MTP,
    ),
    Family(
        "glm4-moe-lite",
        ("Glm4MoeLiteForCausalLM",),
        ("glm4_moe_lite",),
        max_positions=202752,
        rms_eps=1e-5,
        latent=True,
        output_biases=("attention_bias",),
        moe=_DEEPSEEK_MOE,
        mtp=_GLM_MTP,
    ),
)


class UnsupportedModels(NamedTuple):
    """Models for which the trainer lacks the same parts.

    model_types: values of `model_type` in the config or its `text_config`. names: lower-case prefixes of hub names, without the
    organization. missing: the parts, as the end of the sentence "the trainer has no …". fields: pairs of a supported
    `model_type` and a config field that only the unsupported models of this type set.
    """

    title: str
    model_types: tuple[str, ...]
    names: tuple[str, ...]
    missing: str
    alternative: str
    fields: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        return f"{self.title} is not supported: the trainer has no {self.missing}; use {self.alternative}"


UNSUPPORTED_MODELS = (
    UnsupportedModels(
        "GLM-5", ("glm_moe_dsa", "glm5_next", "glm5_next_text"), ("glm-5",), "sparse attention with an indexer", "GLM-4.7 or GLM-4.7-Flash"
    ),
    UnsupportedModels("DeepSeek-V3.2", ("deepseek_v32",), ("deepseek-v3.2",), "sparse attention with an indexer", "DeepSeek-V3"),
    UnsupportedModels(
        "DeepSeek-V4", ("deepseek_v4",), ("deepseek-v4",), "sparse attention over compressed keys and no hyper-connections", "DeepSeek-V3"
    ),
    UnsupportedModels(
        "Kimi-K2",
        ("kimi_k2", "kimi_k25"),
        ("kimi-k2",),
        "configuration for its model_type, and its published weights have no MTP layers",
        "DeepSeek-V3, which has the same kinds of layers",
    ),
    UnsupportedModels(
        "Kimi Linear",
        ("kimi_linear", "kimi_k3"),
        ("kimi-linear", "kimi-k3"),
        "Kimi Delta Attention",
        "Qwen3.5, which has gated DeltaNet layers",
    ),
    UnsupportedModels(
        "gpt-oss",
        ("gpt_oss",),
        ("gpt-oss",),
        "attention sinks, sliding windows or biased experts",
        "Qwen3-30B-A3B with a drafter from mtpctl add-drafter",
    ),
    UnsupportedModels(
        "Qwen3.8-Flash",
        ("qwen4_exp", "qwen4_exp_text"),
        ("qwen3.8-flash",),
        "sparse attention with an indexer and no n-gram embeddings",
        "Qwen3.6-35B-A3B",
    ),
    UnsupportedModels(
        "MiMo-V2 after MiMo-V2-Flash",
        ("mimo_v2", "mimo_v2_omni"),
        ("mimo-v2-pro", "mimo-v2-omni", "mimo-v2.5", "mimo-v2.6"),
        "mapping for fused QKV weights",
        "MiMo-V2-Flash",
    ),
    UnsupportedModels(
        "Nemotron 3 Super or Ultra",
        (),
        ("nvidia-nemotron-3-super", "nvidia-nemotron-3-ultra", "nemotron-3-super", "nemotron-3-ultra"),
        "experts with a latent width (moe_latent_size)",
        "Nemotron 3 Nano or Nemotron 3.5 Lightning",
        (("nemotron_h", "moe_latent_size"),),
    ),
    UnsupportedModels(
        "Nemotron 3 Omni",
        ("nemotron_h_omni",),
        ("nvidia-nemotron-3-nano-omni", "nemotron-3-nano-omni"),
        "encoders for images and audio",
        "Nemotron 3 Nano",
    ),
)

UNSUPPORTED_PARTS: dict[str, tuple[str, ...]] = {
    "sparse attention with an indexer": ("index_topk", "index_n_heads", "indexer_n_heads"),
    "Mamba layers outside Nemotron-H": ("ssm_state_size", "mamba_num_heads", "mamba_d_state", "hybrid_override_pattern"),
    "sliding windows": ("sliding_window", "sliding_window_size", "attention_chunk_size"),
    "hyper-connections": ("hc_mult", "hc_count"),
    "soft caps on logits": ("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap"),
    "encoder": ("is_encoder_decoder", "encoder_layers"),
}
"""Parts that the trainer lacks, each with the config fields that indicate it."""


def check_architecture(config: Mapping[str, object]) -> None:
    """Raise UserError for a model whose `model_type` or fields are in `UNSUPPORTED_MODELS`."""
    fields = _merge_text_config(config)
    model_types = (config.get("model_type"), fields.get("model_type"))
    for entry in UNSUPPORTED_MODELS:
        if any(model_type in entry.model_types for model_type in model_types) or any(
            model_type in model_types and fields.get(key) for model_type, key in entry.fields
        ):
            raise UserError(f"model config: {entry.reason}")


def check_hub_name(name: str) -> None:
    """Raise UserError if the hub id `name` belongs to a model in `UNSUPPORTED_MODELS`. Call it before the config is downloaded."""
    model_name = name.rpartition("/")[2].lower()
    for entry in UNSUPPORTED_MODELS:
        if model_name.startswith(entry.names):
            raise UserError(f"{name}: {entry.reason}")


def missing_parts(config: Mapping[str, object]) -> list[str]:
    """The parts of `UNSUPPORTED_PARTS` that the fields of a config indicate."""
    fields = _merge_text_config(config)
    return [part for part, keys in UNSUPPORTED_PARTS.items() if any(fields.get(key) not in (None, False, 0, "") for key in keys)]


def _merge_text_config(config: Mapping[str, object]) -> dict[str, object]:
    text_config = config.get("text_config")
    return {**config, **(text_config if isinstance(text_config, Mapping) else {})}
