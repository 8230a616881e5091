"""Layouts of an update, each with the single-process case that it must match."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.rl import CorrectionConfig, RlConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig, MoeConfig, OffloadConfig
from tests.fakes import user_losses
from tests.fakes.policy_batch import rl_config

NO_MTP = {"num_nextn_predict_layers": 0}

MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "attention_bias": False,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "attention_bias": False,
    **NO_MTP,
    "drafter": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "rope_theta": 640000.0,
        "rms_norm_eps": 1e-5,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    },
}

DFLASH: dict[str, Any] = {
    **{name: value for name, value in EAGLE3["drafter"].items() if not name.startswith("eagle")},
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "head_dim": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1, 2]},
}

MODELS: dict[str, dict[str, Any]] = {
    "mimo": {"num_hidden_layers": 3, "num_nextn_predict_layers": 2},
    "odd": {"vocab_size": 61, "num_hidden_layers": 1},
    "tied": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "five": {"num_hidden_layers": 5},
    "one-depth": {"num_hidden_layers": 1},
    "three-depths": {"num_hidden_layers": 2, "num_nextn_predict_layers": 3},
    "qwen3-moe": {**MOE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **NO_MTP},
    "eagle3": EAGLE3,
    "dflash": EAGLE3 | {"drafter": DFLASH},
    "dflash-qwen3": EAGLE3 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "drafter": DFLASH},
    "eagle3-moe": {
        **MOE,
        **NO_MTP,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "drafter": EAGLE3["drafter"] | {"head_dim": 16, "rope_theta": 10000.0},
    },
    "deepseek": {
        **MOE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.7,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mimo-v2": {
        **{name: value for name, value in MOE.items() if name not in ("num_experts", "rope_parameters")},
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "v_head_dim": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 12,
        "hybrid_layer_pattern": [1, 0, 1],
        "sliding_window_size": 6,
        "add_swa_attention_sink_bias": True,
        "attention_value_scale": 0.707,
        "swa_rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [1, 0, 1],
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 2,
    },
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "ME*M",
        "layer_norm_epsilon": 1e-5,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 4,
        "ssm_state_size": 10,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "attention_bias": False,
        "rms_norm_eps": None,
        "initializer_range": 0.1,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "attention_bias": False,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "initializer_range": 0.1,
        "num_nextn_predict_layers": None,
        "mtp_num_hidden_layers": 1,
    },
}


@dataclass(frozen=True)
class Case:
    """like: the single-process case that it must match; restore: the case whose checkpoint it starts from;
    poisoned: before its second update stands one in which a weight of its last rank is NaN; few: three sequences too long to be
    packed, one of them without a token to draft; clipped: trunk and MTP have clips under their norms, separate rates and decay;
    policy: the second update is one of RL; replay: all passes follow routes that no router would choose, but for some tokens';
    crowded: these routes lead to the first half of the experts, which are those of one of two ranks; uneven: three sequences with 2, 28 and
    1 trained tokens, which dp ranks share as 28 and 3; drafts_only: the trunk is frozen, and both updates train the MTP layers alone."""

    name: str
    parallel: ParallelConfig
    model: str = "mimo"
    fields: dict[str, Any] = field(default_factory=dict)
    like: str = ""
    saved: bool = False
    restore: str = ""
    poisoned: bool = False
    few: bool = False
    clipped: bool = False
    policy: RlConfig | None = None
    replay: bool = False
    crowded: bool = False
    uneven: bool = False
    drafts_only: bool = False

    @property
    def bound(self) -> float:
        """Relative bound of gradients. The recurrence of linear attention amplifies rounding."""
        return 5e-5 if self.model in ("qwen3.5", "nemotron-h") else 1e-5


def _case(
    name: str,
    model: str = "mimo",
    mode: str = "joint",
    *,
    fields: dict[str, Any] | None = None,
    saved: bool = False,
    restore: str = "",
    poisoned: bool = False,
    few: bool = False,
    clipped: bool = False,
    policy: RlConfig | None = None,
    like: str = "",
    **parallel: Any,
) -> Case:
    mtp = MtpConfig(mode=mode, loss_scale=0.3, clip_grad=0.02 if clipped else 0)  # type: ignore[arg-type]
    # Two microbatches for each dp rank.
    settings = {"mtp": mtp, "tokens_per_microbatch": 50 // parallel.get("dp", 1), **(fields or {})}
    return Case(
        name, ParallelConfig(**parallel), model, settings, like or f"{model}-{mode}", saved, restore, poisoned, few, clipped, policy
    )


FEW_ROWS = 5 * 3 * 4 * 64
"""Workspace for five rows of half of the toy's logits, in bytes."""
SHARDED = {"distributed_optimizer": True}
BALANCED = {"moe": MoeConfig(aux_loss=0.1, z_loss=0.1, bias_update=0.01), "recompute": "full", "tokens_per_microbatch": 50}
"""With equal microbatches on one and two dp ranks, because router losses are per microbatch."""
POLICIES = {
    "token": rl_config(clip_dual=1.5, entropy_coef=0.01, kl_coef=0.1, correction=CorrectionConfig(mode="truncate", high=1.1)),
    "cispo": rl_config(loss="cispo", clip_low=1.0, clip_high=0.2, aggregate="constant"),
    "sapo": rl_config(loss="sapo", aggregate="sequence", tau_neg=2.0, kl_coef=0.1),
    "own": rl_config(loss=f"{user_losses.__file__}:squared", entropy_coef=0.01),
    "gspo": rl_config(loss="gspo", aggregate="sequence", correction=CorrectionConfig(mode="mask", level="sequence", low=0.5, high=2.0)),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2},
}
UNEVEN_LOSSES: tuple[Literal["ce", "soft_ce", "tv"], ...] = ("ce", "soft_ce", "tv")
LORA = LoraConfig(rank=4, alpha=8.0)
FULL = {"recompute": "full", "tokens_per_microbatch": 50}


def _lora(name: str, model: str = "mimo", *, saved: bool = False, restore: str = "", fields: Any = None, **parallel: Any) -> Case:
    targets = [*LORA.targets, "in_proj", "out_proj"] if model == "qwen3.5" else LORA.targets
    settings = {"lora": LORA.model_copy(update={"targets": targets}), **(fields or {})}
    return _case(name, model, fields=settings, like=f"{model}-lora", saved=saved, restore=restore, **parallel)


def _replay(name: str, model: str, **settings: Any) -> Case:
    mode, like = ("isolated" if model == "deepseek" else "off"), f"{model}-replay"
    return replace(_case(name, model, mode, like=like, **settings), replay=True)


def _uneven(model: str, loss: Literal["ce", "soft_ce", "tv"], layout: str) -> Case:
    """MTP losses and their counts if ranks have few tokens or none."""
    mtp, one = MtpConfig(mode="joint", loss=loss, loss_scale=0.3, clip_grad=0), f"uneven-{model}-{loss}"
    name = one if layout == "one" else f"{one}-{layout}"
    return replace(_case(name, model, fields={"mtp": mtp}, like=one, **LAYOUTS[layout]), uneven=True)


def _multistep(name: str, model: str, *, like: str = "", workspace: int = 1 << 30, **parallel: Any) -> Case:
    """The multi-step loss: with sampled drafts on several layers, with greedy drafts on one that is repeated."""
    repeated = model == "tied"
    mtp = MtpConfig(mode="isolated", loss="e2e_tv", repeat=3 if repeated else 1, loss_scale=0.3, clip_grad=0)
    fields = {"mtp": mtp, "greedy_drafts": repeated, "kernels": KernelsConfig(workspace_bytes=workspace)}
    return _case(name, model, fields=fields, like=like or name, **parallel)


def _drafts_only(name: str, model: str, **parallel: Any) -> Case:
    """An engine of several ranks without gradient buffers of the trunk matches one with a frozen trunk."""
    mtp = MtpConfig(mode="isolated", loss="soft_ce", repeat=2, loss_scale=0.3, clip_grad=0)
    fields = {"mtp": mtp, "only_drafter": bool(parallel)}
    return replace(_case(name, model, fields=fields, like=f"{model}-drafts-only", **parallel), drafts_only=True)


def _crowded(name: str, **settings: Any) -> Case:
    return replace(_case(name, "deepseek", "isolated", like="crowded", **settings), replay=True, crowded=True)


def _crowded_lora(name: str, **settings: Any) -> Case:
    """Adapters of experts only, so that the input of the first layer's adapters has no gradient."""
    lora = LoraConfig(rank=4, targets=["linear_fc1", "linear_fc2"])
    created = _case(name, "qwen3-moe", "off", fields={"lora": lora}, like="crowded-lora", **settings)
    return replace(created, replay=True, crowded=True)


CASES = [
    *(_case(f"{model}-{mode}", model, mode, saved=True) for model in ("mimo", "tied") for mode in ("joint", "isolated")),
    _case("tp2", tp=2, poisoned=True),
    _case("sp2", tp=2, sequence_parallel=True),
    _case("tp4-shared-kv", tp=4),
    _case("tp2-odd-vocab", "odd", tp=2),
    _case("pp2", pp=2, poisoned=True),
    _case("pp2-mtp-alone", pp=2, pp_layout=[3, 0]),
    _case("pp2-of-five-layers", "five", pp=2),
    _case("dp2", dp=2, poisoned=True),
    _case("cp2", cp=2, poisoned=True),
    *(
        _case(name, few=True, like="mimo-few", fields={"tokens_per_microbatch": 8}, **p)
        for name, p in (("mimo-few", {}), ("cp4-small-blocks", {"cp": 4}))
    ),
    _case("cp2-pp2", cp=2, pp=2),
    _case("dp2-sharded", dp=2, fields=SHARDED, saved=True),
    *(
        _case(f"{name}-tied-{mode}", "tied", mode, **p)
        for mode in ("joint", "isolated")
        for name, p in (("tp2", {"tp": 2}), ("pp2", {"pp": 2}))
    ),
    *(
        _case(name, "tied", clipped=True, like="tied-clipped", fields=fields, **p)
        for name, fields, p in (
            ("tied-clipped", {}, {}),
            ("tied-clipped-pp2", {}, {"pp": 2}),
            ("tied-clipped-sp2", {}, {"tp": 2, "sequence_parallel": True}),
            ("tied-clipped-dp2-sharded", SHARDED, {"dp": 2}),
        )
    ),
    _case("tied-off", "tied", "off"),
    _case("tied-off-pp2-dp2-sharded", "tied", "off", fields=SHARDED, like="tied-off", pp=2, dp=2),
    *(
        _case(f"{name}-against-trunk", model, fields={"mtp": mtp}, like=f"{model}-against-trunk", **p)
        for model, mtp, layouts in (
            ("mimo", MtpConfig(mode="joint", loss="tv", loss_mix=0.8, loss_scale=0.3, clip_grad=0), ("sp2", "cp2")),
            ("tied", MtpConfig(mode="isolated", loss="soft_ce", repeat=3, loss_scale=0.3, clip_grad=0), ("sp2", "pp2", "cp2")),
            ("deepseek", MtpConfig(mode="isolated", loss="kl", repeat=2, loss_scale=0.3, clip_grad=0), ("sp2", "cp2")),
            ("eagle3", MtpConfig(mode="isolated", loss="tv", repeat=3, loss_scale=0.3, clip_grad=0), ("sp2", "cp2", "dp2")),
            ("dflash", MtpConfig(mode="isolated", loss="tv", repeat=3, loss_scale=0.3, clip_grad=0), ("sp2", "cp2", "dp2")),
        )
        for name, p in [(model, {}), *((f"{layout}-{model}", LAYOUTS[layout]) for layout in layouts)]
    ),
    _case("sp2-isolated", mode="isolated", tp=2, sequence_parallel=True),
    _case("sp2-pp2", tp=2, sequence_parallel=True, pp=2, saved=True),
    _case("sp2-cp2", tp=2, sequence_parallel=True, cp=2),
    _case("pp2-dp2", pp=2, dp=2),
    *(_case(f"{model}-joint", model, saved=model == "deepseek") for model in ("odd", "five", "qwen3-moe", "deepseek", "qwen3.5")),
    *(_case(f"mimo-v2-{layout}", "mimo-v2", like="mimo-v2-one", saved=layout == "one", **parallel) for layout, parallel in LAYOUTS.items()),
    _case("mimo-v2-tp2-ep2", "mimo-v2", like="mimo-v2-one", tp=2, sequence_parallel=True, dp=2, ep=2),
    _case("mimo-v2-to-sp2", "mimo-v2", like="mimo-v2-one", restore="mimo-v2-one", tp=2, sequence_parallel=True),
    *(_case(f"nemotron-{layout}", "nemotron-h", like="nemotron-one", saved=layout == "one", **p) for layout, p in LAYOUTS.items()),
    _case("nemotron-to-sp2-cp2", "nemotron-h", like="nemotron-one", restore="nemotron-one", tp=2, sequence_parallel=True, cp=2),
    _case("qwen3-moe-ep2", "qwen3-moe", dp=2, ep=2),
    _case("qwen3-moe-tp2", "qwen3-moe", tp=2, sequence_parallel=True),
    _case("deepseek-sp2", "deepseek", tp=2, sequence_parallel=True),
    _case("deepseek-ep2", "deepseek", dp=2, ep=2),
    _case("deepseek-tp2-ep2", "deepseek", tp=2, sequence_parallel=True, dp=2, ep=2),
    *(
        _case(name, "deepseek", fields={"tokens_per_microbatch": 16}, few=True, like="deepseek-few", **p)
        for name, p in (("deepseek-few", {}), ("deepseek-few-ep2", {"dp": 2, "ep": 2}), ("deepseek-few-dp4", {"dp": 4}))
    ),
    _case("deepseek-pp2", "deepseek", pp=2),
    _case("deepseek-cp2", "deepseek", cp=2),
    _case("deepseek-to-ep2", "deepseek", dp=2, ep=2, restore="deepseek-joint"),
    *(
        _case(name, "deepseek", fields=BALANCED, like="deepseek-balanced", **p)
        for name, p in (
            ("deepseek-balanced", {}),
            ("deepseek-balanced-dp2", {"dp": 2}),
            ("deepseek-balanced-tp2-ep2", {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2}),
            ("deepseek-balanced-cp2", {"cp": 2}),
            ("deepseek-balanced-pp2", {"pp": 2}),
            # The first stage has the dense layer alone.
            ("deepseek-balanced-pp2-dense-first", {"pp": 2, "pp_layout": [1, 2]}),
        )
    ),
    # Sequences that stand alone, and a rank that has none.
    *(
        _case(name, "deepseek", fields=BALANCED | {"tokens_per_microbatch": 16}, few=True, like="deepseek-balanced-few", **p)
        for name, p in (("deepseek-balanced-few", {}), ("deepseek-balanced-few-ep2", {"dp": 2, "ep": 2}))
    ),
    _case("qwen3.5-tp2", "qwen3.5", tp=2),
    _case("qwen3.5-sp2", "qwen3.5", tp=2, sequence_parallel=True),
    _case("qwen3.5-pp2", "qwen3.5", pp=2),
    _case("qwen3.5-cp2", "qwen3.5", cp=2),
    *(
        _case(f"{loss}-{layout}", mode="isolated", policy=policy, like=f"{loss}-one", **parallel)
        for loss, policy in POLICIES.items()
        for layout, parallel in LAYOUTS.items()
        # Of losses that take the same road as the first one, the layouts that split a response or its vocabulary.
        if loss not in ("cispo", "sapo", "own") or layout in ("one", "sp2", "cp2")
    ),
    _case(
        "token-sp2-cp2-slices",
        mode="isolated",
        policy=POLICIES["token"],
        like="token-one",
        fields={"kernels": KernelsConfig(workspace_bytes=FEW_ROWS)},
        tp=2,
        sequence_parallel=True,
        cp=2,
    ),
    _case("one-to-tp2", tp=2, restore="mimo-joint"),
    _case("one-to-dp2-sharded", dp=2, fields=SHARDED, restore="mimo-joint"),
    _case("dp2-sharded-to-tp2-sharded", tp=2, fields=SHARDED, restore="dp2-sharded"),
    _case("sp2-pp2-to-one", restore="sp2-pp2"),
    _case("sp2-pp2-to-pp2", pp=2, restore="sp2-pp2"),
    _case("tied-to-pp2", "tied", pp=2, restore="tied-joint"),
    *(_lora(f"{model}-lora", model, saved=model != "qwen3-moe") for model in ("mimo", "qwen3-moe", "qwen3.5")),
    _lora("lora-tp2", tp=2),
    _lora("lora-sp2-pp2", tp=2, sequence_parallel=True, pp=2),
    _lora("lora-dp2-sharded-offloaded", dp=2, fields=SHARDED | {"offload": OffloadConfig(params=True, optimizer=True)}),
    _lora("lora-moe-tp2", "qwen3-moe", tp=2, sequence_parallel=True),
    _lora("lora-moe-ep2", "qwen3-moe", dp=2, ep=2),
    _lora("lora-to-tp2", tp=2, restore="mimo-lora"),
    _lora("lora-delta-to-sp2", "qwen3.5", tp=2, sequence_parallel=True, restore="qwen3.5-lora"),
    *(
        _uneven(model, loss, layout)
        for model in ("one-depth", "three-depths")
        for loss in UNEVEN_LOSSES
        for layout in ("one", "dp2", "cp2", "pp2")
        if layout != "pp2" or model == "three-depths"
    ),
    *(_replay(f"{model}-replay", model) for model in ("qwen3-moe", "deepseek")),
    _replay("replay-sp2-pp2-recomputed", "deepseek", tp=2, pp=2, fields=FULL),
    _replay("replay-cp2-ep2-recomputed", "deepseek", cp=2, ep=2, fields=FULL),
    _replay("replay-cp2-dp2-ep2", "qwen3-moe", cp=2, dp=2, ep=2),
    _replay("replay-pp2-recomputed", "qwen3-moe", pp=2, fields=FULL),
    *(
        _case(f"bitwise-{model}-{layout}", model, "isolated", fields={"numerics": "bitwise"}, like=f"bitwise-{model}-one", **parallel)
        for model in ("mimo", "odd", "eagle3")
        for layout, parallel in (("one", {}), ("tp2", {"tp": 2}), ("sp2", {"tp": 2, "sequence_parallel": True}), ("shared-kv", {"tp": 4}))
    ),
    _case("tp2-eagle3", "eagle3", "isolated", tp=2),
    _case("tp2-dflash", "dflash", "isolated", tp=2, saved=True),
    _case("dflash-isolated", "dflash", "isolated"),
    _case("tp2-dflash-qwen3", "dflash-qwen3", "isolated", tp=2),
    _case("dflash-qwen3-isolated", "dflash-qwen3", "isolated"),
    _case("dflash-sp2-recomputed", "dflash", "isolated", fields=FULL, tp=2, sequence_parallel=True),
    *(
        _case(name, "eagle3-moe", "isolated", **p)
        for name, p in (
            ("eagle3-moe-isolated", {}),
            ("eagle3-moe-ep2", {"dp": 2, "ep": 2}),
            ("eagle3-moe-tp2-ep2", {"tp": 2, "dp": 2, "ep": 2}),
        )
    ),
    _case("eagle3-isolated", "eagle3", "isolated"),
    *(
        _drafts_only(f"{model}-drafts-only{f'-{layout}' if parallel else ''}", model, **parallel)
        for model in ("tied", "eagle3", "dflash")
        for layout, parallel in LAYOUTS.items()
        if model == "tied" or layout != "pp2"
    ),
    *(
        _multistep(f"{layout}-{model}-multistep", model, like=f"one-{model}-multistep", **parallel)
        for model in ("three-depths", "tied")
        for layout, parallel in LAYOUTS.items()
    ),
    # Chains across slices of rows.
    _multistep(
        "slices-multistep", "three-depths", like="one-three-depths-multistep", workspace=FEW_ROWS, tp=2, sequence_parallel=True, cp=2
    ),
    _crowded("crowded"),
    _crowded("crowded-ep2", dp=2, ep=2),
    _crowded("crowded-ep2-recomputed", dp=2, ep=2, fields=FULL),
    _crowded_lora("crowded-lora"),
    _crowded_lora("crowded-lora-ep2", dp=2, ep=2),
]

DEFAULT = frozenset(
    {
        *("tp2", "sp2-pp2", "pp2-mtp-alone", "cp2", "dp2", "cp4-small-blocks", "tied-off-pp2-dp2-sharded", "tp2-odd-vocab"),
        *("tp2-tied-joint", "tied-clipped-sp2", "bitwise-odd-tp2", "bitwise-mimo-sp2"),
        *("deepseek-tp2-ep2", "deepseek-few-ep2", "deepseek-balanced-cp2", "qwen3.5-sp2", "qwen3.5-cp2"),
        "nemotron-to-sp2-cp2",
        *("token-sp2", "own-cp2", "gspo-cp2"),
        *("tp2-dflash", "sp2-dflash-against-trunk", "cp2-dflash-against-trunk"),
        *("tp2-eagle3", "cp2-eagle3-against-trunk", "tied-drafts-only-pp2", "eagle3-drafts-only-sp2"),
        *("cp2-tied-against-trunk", "replay-sp2-pp2-recomputed", "replay-cp2-ep2-recomputed", "crowded-ep2", "crowded-lora-ep2"),
        *("sp2-tied-multistep", "cp2-three-depths-multistep"),
        *("dp2-sharded-to-tp2-sharded", "lora-moe-ep2", "lora-to-tp2"),
    }
)
"""Cases of the default suite: each kind of parallelism and each path through an update once. The others are slow."""
assert {case.name for case in CASES} >= DEFAULT, "each name is one of a case"


def with_origins(names: frozenset[str]) -> list[Case]:
    """The cases of these names and those that they are compared with or start from, in execution order."""
    known = {case.name: case for case in CASES}
    wanted: set[str] = set()

    def want(name: str) -> None:
        if name and name not in wanted:
            wanted.add(name)
            want(known[name].like)
            want(known[name].restore)

    for name in names:
        want(name)
    return [case for case in CASES if case.name in wanted]
