"""Gives weight updates access to a live vLLM model (vLLM 0.32.0): names, loaded layout, packed and derived copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from mtpctl.errors import UpstreamMoved
from mtpctl.families.quantization import FP8_BLOCK, SCALE_SUFFIX
from mtpctl.rollout.vllm.patches import assign, cpu_patch, require_pinned
from mtpctl.sync.parameters import TensorMismatch
from mtpctl.sync.protocol import PlanMismatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.models.utils import WeightsMapper
    from vllm.platforms.cpu import CpuPlatform

_LOADED_WEIGHTS = "_mtpctl_loaded"
"""Attribute of a layer with experts: the object that packs them, and the loaded weights by name."""
LOG_DECAY = "_mtpctl_log_decay"
"""Attribute of a Mamba-2 layer's parameter `A`: the logarithm `A_log` that folders store, with `A` = −exp(`A_log`)."""
_DECAY, _DECAY_SIBLING = "A", "dt_bias"
_CONVOLUTION = "_cpu_unpacked_conv_weight"
_UNPACKED_BACKENDS = ("TRITON", "BATCHED_TRITON")
LATENT_HALVES = ("W_UV", "W_UK_T")
"""vLLM's copies of the two halves of `kv_b_proj`, in layers with latent attention."""
NOT_SYNCED = (*LATENT_HALVES, "mask_embedding")
"""Parameters that no weight update contains. vLLM derives them from others, or does not use them: a DFlash drafter has `mask_embedding`,
but embeds its mask token instead."""

UPDATABLE_KERNELS = (
    "BlockWiseTorchFP8ScaledMMLinearKernel",
    "CutlassFp8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "DequantizedLinear",
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "TritonFp8BlockScaledMMKernel",
)
"""Kernels of FP8 matrices that use the weights in their loaded layout. DeepGEMM's requantization does not change weights that
`mtpctl.kernels.block_fp8` has quantized. On some GPUs it stores scales in another dtype, which `find_packed_fp8` reports."""
UPDATABLE_EXPERTS = ("TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS", "DEEPGEMM", "BATCHED_DEEPGEMM", "EMULATION")
"""Backends of FP8 experts that use the weights in their loaded layout."""


class PackedWeight(TensorMismatch):
    """A weight is stored only in the layout of a kernel, so it cannot be updated."""


# ---------------------------------------------------------------------------------------------------------------- names


class _LayerRenaming(Protocol):
    """A drafter that renames layer by layer."""

    config: PretrainedConfig

    def _rewrite_spec_layer_name(self, spec_layer: int, name: str) -> str: ...


def get_name_mapper(model: nn.Module) -> Callable[[str], str | None] | None:
    """Return the function that maps tensor names of a Hugging Face folder to the live model's, before fusing; None if they are equal.

    Most models have a map, `hf_to_vllm_mapper`. It lacks the router's bias of ERNIE 4.5, which `load_weights` renames. The drafters of
    DeepSeek-V3 and GLM-4.5 have no map: their `load_weights` renames layer by layer, with a method that moves a layer's attention and MLP
    to `mtp_block`, and the embedding to the top of the model. In an update, tensors of EAGLE-3 and DFlash drafters have the names of
    their folder, with the prefix `drafter.`.

    Raises UpstreamMoved for another release.
    """
    require_pinned(f"{__name__}.get_name_mapper")
    from vllm.model_executor.models.ernie45_moe import Ernie4_5_MoeForCausalLM
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    if isinstance(model, Ernie4_5_MoeForCausalLM):
        return lambda name: name.replace(".moe_statics.", ".gate.")
    if isinstance(model, Eagle3LlamaForCausalLM):
        return lambda name: name.replace("drafter.midlayer.", "model.layers.0.").replace("drafter.", "model.")
    if isinstance(model, DFlashQwen3ForCausalLM):
        return lambda name: name.replace("drafter.", "model.")
    mapper: WeightsMapper | None = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        return mapper.get_rename_mapper().map_name
    if not hasattr(model, "_rewrite_spec_layer_name"):
        return None
    drafter = cast(_LayerRenaming, model)
    from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

    def rename(name: str) -> str | None:
        layer = get_spec_layer_idx_from_weight_name(drafter.config, name)
        return None if layer is None else drafter._rewrite_spec_layer_name(layer, name)

    return rename


# ------------------------------------------------------------------------------------------------------- packed weights


@cpu_patch
def install_gemm() -> None:
    """Keep the weights of linear layers unpacked, so that they can be updated.

    After loading, vLLM's CPU backend packs each linear layer's weight for a kernel of that CPU: zentorch's on Zen if installed, vLLM's own
    for weights up to 1 MiB if the CPU has AMX, oneDNN's otherwise. It then drops the parameter, so an update has nothing to write to and a
    checksum nothing to read. An output head keeps its parameter next to a packed copy, which an update would leave stale. With the patch
    every linear layer computes `torch.nn.functional.linear` with the parameter, as vLLM does if no kernel packs. Repacking after each
    update would gain little, because torch computes the same product with oneDNN and AMX.

    With AMX, latent attention replaces `kv_b_proj` by packed halves, and supports only bfloat16. vLLM's other kernel for it runs on every
    CPU in any dtype and keeps the weight, so the patch selects it unless a backend is configured.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    upstream = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if upstream is None:
        raise UpstreamMoved(
            f"{__name__}: {utils.__name__}.dispatch_cpu_unquantized_gemm is gone; find the new way to keep weights unpacked"
        )

    @wraps(upstream)
    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        if layer.get_parameter("weight").ndim == 2:
            layer.__dict__["cpu_linear"] = torch.nn.functional.linear
        elif getattr(layer, "bias", None) is None:
            # Experts (see `install_packed`), and convolutions of gated delta nets, of which vLLM keeps an unpacked copy.
            upstream(layer, remove_weight)
        # Mamba-2's convolution (which has a bias) uses a view of the loaded weight. Packing would replace the weight that updates write to.

    upstream_configure = CpuPlatform.__dict__["check_and_update_config"].__func__

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        attention, model = vllm_config.attention_config, vllm_config.model_config
        if attention.backend is None and model is not None and model.use_mla:
            attention.backend = AttentionBackendEnum.CPU_MLA
        upstream_configure(cls, vllm_config)

    assign(utils, dispatch_cpu_unquantized_gemm=dispatch)
    assign(CpuPlatform, check_and_update_config=classmethod(check_and_update_config))


@cpu_patch
def install_packed() -> None:
    """Keep a copy of experts (`w13_weight`, `w2_weight`) as loaded.

    The CPU backend packs both for its grouped kernel and drops the originals, so an update would have nothing to write to. It also packs
    the short convolution of a gated delta net, but keeps its loaded weight.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    upstream = CPUUnquantizedExperts.process_weights_after_loading

    def process_weights_after_loading(self: CPUUnquantizedExperts, layer: nn.Module) -> None:
        save_loaded_weights(self, layer)
        upstream(self, layer)

    assign(CPUUnquantizedExperts, process_weights_after_loading=process_weights_after_loading)


def save_loaded_weights(experts: CPUUnquantizedExperts, layer: nn.Module) -> None:
    """Keep a copy of the weights of `layer` as loaded, once. `experts`: the object that packs them."""
    if _LOADED_WEIGHTS not in layer.__dict__:
        # The router's bias is also a parameter of the layer, but is updated in the router.
        leaves = [leaf for leaf, _ in layer.named_parameters(recurse=False) if leaf.startswith(("w13_", "w2_"))]
        layer.__dict__[_LOADED_WEIGHTS] = (experts, {leaf: layer.get_parameter(leaf).data.clone() for leaf in leaves})


def check_quantization(config: QuantizationConfig | None, model: nn.Module, dtypes: Collection[str]) -> None:
    """Raise PlanMismatch if a model of this quantization cannot take tensors of these dtypes.

    Of quantized weights, only FP8 in blocks of 128 x 128, the format of Hugging Face folders, can be updated in place.
    """
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    is_fp8 = "float8_e4m3fn" in dtypes
    if config is None:
        if is_fp8:
            raise PlanMismatch("the weights are sent in FP8, but the engine's are not quantized: start it with rollout.quantization: fp8")
        return
    if not isinstance(config, Fp8Config) or config.weight_block_size != [FP8_BLOCK, FP8_BLOCK]:
        raise PlanMismatch(f"weights of an engine with quantization {config.get_name()} cannot be updated; use fp8 in blocks of 128 x 128")
    if not is_fp8 and any(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters()):
        raise PlanMismatch(
            "the engine's weights are FP8, but the weights are sent unquantized: set rollout.quantization: fp8 in their recipe"
        )
    if (reason := find_packed_fp8(model)) is not None:
        raise PlanMismatch(f"rollout.quantization: {reason}")


def find_packed_fp8(model: nn.Module) -> str | None:
    """The reason why FP8 weights of a model cannot be updated in place, as one line; None if they can."""
    packed_layers: Counter[tuple[str, str, str]] = Counter()
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (linear := getattr(method, "fp8_linear", None)) is not None:
            layer_kind, kernel, engine_option = "matrices", type(linear).__name__, "linear_backend"
            is_updatable = kernel in UPDATABLE_KERNELS
        elif (backend := getattr(method, "fp8_backend", None)) is not None:
            layer_kind, kernel, engine_option = "layers with experts", backend.name, "moe_backend"
            is_updatable = kernel in UPDATABLE_EXPERTS
        else:
            continue
        scales = {
            str(parameter.dtype).removeprefix("torch.")
            for name, parameter in layer.named_parameters(recurse=False)
            if name.endswith(SCALE_SUFFIX)
        }
        if not is_updatable:
            packed_layers[layer_kind, kernel, engine_option] += 1
        elif other_dtypes := sorted(scales - {"float32"}):
            packed_layers[layer_kind, f"{kernel} (scales in {other_dtypes[0]})", engine_option] += 1
    if not packed_layers:
        return None
    layers = ", ".join(f"{count} {layer_kind} for {kernel}" for (layer_kind, kernel, _), count in packed_layers.items())
    options = ", ".join(dict.fromkeys(f"{engine_option}: triton" for _, _, engine_option in packed_layers))
    return f"vLLM packs {layers}; a sync cannot update packed weights; set rollout.engine_args: {{{options}}}"


def plain_weight(layer: nn.Module, leaf: str) -> torch.Tensor:
    """A layer's parameter in its loaded layout. Raises PackedWeight if vLLM stores it only in a packed form."""
    if leaf == "weight" and hasattr(layer, _CONVOLUTION):
        kernel: torch.Tensor = getattr(layer, _CONVOLUTION)
        return kernel.view(kernel.shape[0], 1, -1)
    if leaf == _DECAY and hasattr(layer, _DECAY_SIBLING):
        decay = layer.get_parameter(leaf)
        if not hasattr(decay, LOG_DECAY):  # not loaded from a folder
            setattr(decay, LOG_DECAY, decay.data.neg().log())
        logarithm: torch.Tensor = getattr(decay, LOG_DECAY)
        return logarithm
    if _LOADED_WEIGHTS in layer.__dict__:
        loaded_weight: torch.Tensor = layer.__dict__[_LOADED_WEIGHTS][1][leaf]
        return loaded_weight
    method = getattr(layer, "quant_method", None)
    backend = getattr(method, "unquantized_backend", None)
    if backend is not None and backend.name not in _UNPACKED_BACKENDS:
        raise PackedWeight(
            f"belongs to experts that vLLM packs for its {backend.name} kernel; set rollout.engine_args: {{moe_backend: triton}}"
        )
    weight: torch.Tensor = getattr(layer, leaf).data
    if not weight.numel():
        raise PackedWeight("is stored only packed by vLLM; take attention_backend out of rollout.engine_args, if it is there")
    return weight


def find_layers_with_copies(model: nn.Module) -> list[nn.Module]:
    """Layers of a loaded model that `repack_weights` and `refresh_derived_weights` have to update."""
    attributes = (_CONVOLUTION, _DECAY, LATENT_HALVES[0], "_build_fused_kv_buffers")
    return [layer for layer in model.modules() if _LOADED_WEIGHTS in layer.__dict__ or any(hasattr(layer, name) for name in attributes)]


def repack_weights(layers: Iterable[nn.Module]) -> None:
    """Pack the loaded weights (see `plain_weight`) again after they were updated."""
    for layer in layers:
        if hasattr(layer, _CONVOLUTION):
            from vllm import _custom_ops as ops

            layer.get_parameter("weight").data.copy_(ops.causal_conv1d_weight_pack(getattr(layer, _CONVOLUTION)))
        if hasattr(layer, _DECAY) and hasattr(getattr(layer, _DECAY), LOG_DECAY):
            decay = layer.get_parameter(_DECAY)
            decay.data.copy_(getattr(decay, LOG_DECAY).exp().neg())
        if _LOADED_WEIGHTS in layer.__dict__:
            experts, loaded_weights = layer.__dict__[_LOADED_WEIGHTS]
            for leaf, weight in loaded_weights.items():
                layer.register_parameter(leaf, nn.Parameter(weight.clone(), requires_grad=False))
            experts.process_weights_after_loading(layer)


# ------------------------------------------------------------------------------------------------------ derived weights


class _LatentAttention(Protocol):
    """vLLM's attention layer of a model with latent attention."""

    def process_weights_after_loading(self, act_dtype: torch.dtype | str) -> None: ...


class _ContextBuffers(Protocol):
    """vLLM's DFlash drafter. Captured CUDA graphs do not read the buffers: the context's keys are computed outside of the graphs."""

    def _build_fused_kv_buffers(self) -> None: ...


def refresh_derived_weights(layers: Iterable[nn.Module], dtype: torch.dtype | str) -> None:
    """Recompute derived weights from the current ones. `dtype` is the model's.

    Latent attention stores a second copy of `kv_b_proj`, split and transposed, and recomputes it only on request. It reuses the memory of
    the copy, so captured CUDA graphs read the new values. A DFlash drafter stores a fused copy of the key and value projections and the key
    norms of all its layers. Raises UpstreamMoved for another release.
    """
    require_pinned(f"{__name__}.refresh_derived_weights")
    for layer in layers:
        if hasattr(layer, LATENT_HALVES[0]) and hasattr(layer, "kv_b_proj"):
            cast(_LatentAttention, layer).process_weights_after_loading(dtype)
        if hasattr(layer, "_build_fused_kv_buffers"):
            cast(_ContextBuffers, layer)._build_fused_kv_buffers()
