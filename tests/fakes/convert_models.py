"""Toy models of every family for conversion, by transformers, with random MTP layers if the family has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpctl.convert.conversion import ConversionOptions, ConversionResult, convert
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.families.tensors import aliases, tensor_shapes
from tests.fakes.tiny import mimo

FAMILIES = [
    "mimo",
    "qwen2-tied",
    "qwen3",
    "llama3",
    "qwen3-moe",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "deepseek-v3",
    "glm4-moe",
    "glm4-moe-lite",
    "ernie4.5-moe",
    "mimo-v2-flash",
    "nemotron-h",
    "qwen3.5-vl",
    "qwen3.5-moe-vl",
]
MTP_FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen3.5-vl", "qwen3.5-moe-vl", "deepseek-v3", "glm4-moe", "glm4-moe-lite")
MTP_FAMILIES += ("ernie4.5-moe", "mimo-v2-flash", "nemotron-h")


def model(case: str, path: Path, **sizes: Any) -> Any:
    """Create a folder at `path`. Returns the model of transformers, None if transformers lacks it. sizes: config fields to change."""
    if case == "mimo":
        mimo(path, **sizes)
        return None
    kind, fields = CASES[case]
    created = hf_model(kind, fields | sizes, path)
    if case in MTP_FAMILIES:
        count = "mtp_num_hidden_layers" if case.startswith("qwen3.5") else "num_nextn_predict_layers"
        change_config(path, **{count: 1})
        shape = HfFolder.open(path).shape
        held, same = tensors(path), aliases(shape)
        generator = torch.Generator().manual_seed(2)
        drawn = {
            name: 0.2 * torch.randn(size, generator=generator)
            for name, size in tensor_shapes(shape).items()
            if name not in held and name not in same
        }
        copies = {name: held[same[name]].clone() for name in tensor_shapes(shape) if name in same and name not in held}
        write(path, held | drawn | copies)
    return created


def tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def write(path: Path, held: dict[str, Tensor]) -> None:
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, **fields: Any) -> None:
    """Change fields of the config; None removes a field."""
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def converted(source: Path, target: Path, **wanted: Any) -> ConversionResult:
    """Convert without reports and progress."""
    return convert(source, target, ConversionOptions(**wanted), report=lambda _: None, progress=lambda _done, _total: None)


def assert_same_tensors(there: Path, here: Path) -> None:
    """Equal names, and bit-equal tensors."""
    result, expected = tensors(there), tensors(here)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].dtype == value.dtype and result[name].shape == value.shape, name
        assert torch.equal(result[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16,
}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


QWEN3_MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


DEEPSEEK_V3 = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "num_nextn_predict_layers": 0,
}


GLM4_MOE = {name: DEEPSEEK_V3[name] for name in DEEPSEEK_V3 if "lora" not in name and "head_dim" not in name and "rope" not in name} | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
}


GLM4_MOE_LITE = DEEPSEEK_V3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "num_nextn_predict_layers": 0}


ERNIE4_5_MOE = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "moe_layer_start_index": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


MIMO_V2_FLASH = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "v_head_dim": 10,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 12,
    "swa_v_head_dim": 10,
    "sliding_window": 5,
    "sliding_window_size": 5,
    "attention_chunk_size": 5,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "moe_layer_freq": [0, 1, 0, 1],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "rope_theta": 50000.0,
    "swa_rope_theta": 1000.0,
    "partial_rotary_factor": 0.334,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.334},
    },
    "layernorm_epsilon": 1e-5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe", "linear_attention"],
    "head_dim": 16,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 3,
    "ssm_state_size": 12,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "mlp_hidden_act": "relu2",
}


QWEN3_NEXT = QWEN3_MOE | {
    "num_hidden_layers": 4,
    "initializer_range": 0.1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "shared_expert_intermediate_size": 40,
}


QWEN3_5 = {name: value for name, value in QWEN3_NEXT.items() if "expert" not in name and "moe" not in name and "topk" not in name}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe-unnormed": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": False}),
    "qwen3-moe-dense": ("Qwen3Moe", QWEN3_MOE | {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3-moe-step": ("Qwen3Moe", QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3-next": ("Qwen3Next", QWEN3_NEXT),
    "qwen3-next-dense": ("Qwen3Next", QWEN3_NEXT | {"mlp_only_layers": [0]}),
    "qwen3.5": ("Qwen3_5", QWEN3_5),
    "qwen3.5-moe": ("Qwen3_5Moe", QWEN3_NEXT),
    "qwen3.5-vl": ("Qwen3_5ForConditionalGeneration", QWEN3_5),
    "qwen3.5-vl-tied": ("Qwen3_5ForConditionalGeneration", QWEN3_5 | {"tie_word_embeddings": True}),
    "qwen3.5-moe-vl": ("Qwen3_5MoeForConditionalGeneration", QWEN3_NEXT),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK_V3),
    "deepseek-v3-yarn": ("DeepseekV3", DEEPSEEK_V3 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek-v3-whole-query": ("DeepseekV3", DEEPSEEK_V3 | {"q_lora_rank": None}),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-qk-norm": (
        "Glm4Moe",
        GLM4_MOE | {"use_qk_norm": True, "attention_bias": False, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE4_5_MOE),
    "ernie4.5-moe-interval": (
        "Ernie4_5_Moe",
        ERNIE4_5_MOE | {"moe_layer_interval": 2, "moe_layer_end_index": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": True},
    ),
    "mimo-v2-flash": ("MiMoV2Flash", MIMO_V2_FLASH),
    "mimo-v2-flash-groups": (
        "MiMoV2Flash",
        MIMO_V2_FLASH | {"n_group": 3, "topk_group": 1, "v_head_dim": 12, "swa_v_head_dim": 12, "attention_value_scale": None},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h-dense": (
        "NemotronH",
        NEMOTRON_H | {"layers_block_type": ["mlp", "full_attention", "linear_attention"], "n_groups": 1, "rms_norm_eps": 0.1},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", GLM4_MOE_LITE),
    "glm4-moe-lite-one-group": (
        "Glm4MoeLite",
        GLM4_MOE_LITE | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    ),
}


def hf_model(kind: str, fields: dict[str, Any], folder: Path) -> Any:
    """Save a toy model of transformers with random parameters to `folder`. kind: may be the full name of a wrapper."""
    import transformers

    kind, wrapper, _ = kind.partition("For")
    fields = SIZES | fields
    if wrapper:
        config = getattr(transformers, f"{kind}Config")(
            text_config=fields, vision_config=VISION, tie_word_embeddings=fields["tie_word_embeddings"]
        )
    else:
        config = getattr(transformers, f"{kind}TextConfig" if kind.startswith("Qwen3_5") else f"{kind}Config")(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration" if wrapper else f"{kind}ForCausalLM")(config).eval()
    use_config_epsilon(model, config)
    use_all_steps(model)
    model.set_experts_implementation("eager")  # the one that runs in fp64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, value in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith("e_score_correction_bias"):
                value.normal_(0.0, 0.1)
            if name.endswith(("mlp.gate.weight", "mixer.gate.weight")):
                value.normal_(0.0, 0.2)  # zeros in some families
    model.save_pretrained(folder)
    return model


def use_config_epsilon(module: Any, config: Any) -> None:
    """Give the norms of latent attention the config's epsilon, as vLLM, SGLang and Megatron do. Transformers has 1e-6 whatever the config
    says, which is DeepSeek-V3's and not GLM-4.7-Flash's."""
    for name, norm in module.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            norm.variance_epsilon = config.rms_norm_eps


def use_all_steps(module: Any) -> None:
    """Let Mamba-2 layers take steps below the config's `time_step_min`, as vLLM and the published code do; transformers 5 raises them."""
    for layer in module.modules():
        if hasattr(layer, "time_step_limit"):
            layer.time_step_limit = (0.0, float("inf"))


OTHER_EXPERT = 1e-3
"""Beyond what rounding alone moves a logit: the reference in fp64 has taken another expert for some token, and says nothing of this one."""


def assert_like(result: Iterable[Tensor], reference: Callable[[], list[Tensor]], modules: list[Any]) -> None:
    """Each sample within 1e-5 of the reference; where that one itself, in fp32, is further than 5e-6 from its own result in fp64 on some
    sample, within three times that distance of the latter (the recurrence of linear attention amplifies rounding; how much of it a single
    sample shows is luck, and another on each CPU); within 5e-5 where a sample shows nothing."""
    with torch.no_grad():
        plain = reference()
        for module in modules:
            module.double()
        exact = reference()
    own = [float((single - double).abs().max()) for single, double in zip(plain, exact, strict=True)]
    rounding = max((distance for distance in own if distance < OTHER_EXPERT), default=0.0)
    for here, single, double, distance in zip(result, plain, exact, own, strict=True):
        if distance >= OTHER_EXPERT:
            torch.testing.assert_close(here, single, atol=5e-5, rtol=0)
        elif rounding > 5e-6:
            torch.testing.assert_close(here.to(double.dtype), double, atol=3 * rounding, rtol=0)
        else:
            torch.testing.assert_close(here, single, atol=1e-5, rtol=0)
