"""Kernels for FP8 weights on CPUs (vLLM 0.32.0) that use the weights in their loaded layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from mtpctl.errors import UpstreamMoved
from mtpctl.kernels.block_fp8 import dequantize
from mtpctl.rollout.vllm.patches import assign, cpu_patch
from mtpctl.rollout.vllm.patches.cpu_kernels import SequentialExperts

if TYPE_CHECKING:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey


@cpu_patch
def install_fp8_linear() -> None:
    """Multiply with FP8 matrices by dequantizing them, on every CPU.

    vLLM's kernel for CPUs needs AMX. It also replaces the loaded weights by a packed form, into which a weight update cannot be written.
    Activations stay in bf16, as in vLLM's kernel. Scales are powers of two, so the product of a value and its scale is exact in bf16.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.platforms.interface import PlatformEnum

    kernels = getattr(linear, "_POSSIBLE_FP8_BLOCK_KERNELS", {}).get(PlatformEnum.CPU, [])
    if CPUFp8BlockScaledMMKernel not in kernels:
        raise UpstreamMoved(f"{__name__}: {linear.__name__} no longer lists the CPU's FP8 kernels; find where they are chosen")
    kernels.insert(0, _linear_kernel())


def _linear_kernel() -> type[Fp8BlockScaledMMLinearKernel]:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

    class DequantizedLinear(Fp8BlockScaledMMLinearKernel):
        """Dequantizes the matrix and multiplies in the dtype of the activations."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            """Nothing to do."""

        def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: object) -> Tensor:
            params = self._get_layer_params(layer)
            block = self.weight_group_shape
            return functional.linear(x, dequantize(params.weight, params.block_scale, x.dtype, (block.row, block.col)), bias)

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            raise NotImplementedError("apply_weights does not call it")

    return DequantizedLinear


@cpu_patch
def install_fp8_experts() -> None:
    """Multiply with FP8 experts on every CPU, by dequantizing the experts to which tokens are routed.

    vLLM's kernel for CPUs needs AMX and packs weights for it. Without AMX the engine fails in its first step, because no kernel is chosen.
    """
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8

    if not hasattr(fp8, "select_fp8_moe_backend"):
        raise UpstreamMoved(f"{__name__}: {fp8.__name__}.select_fp8_moe_backend is gone; find where the expert kernel is chosen")
    experts = _experts_kernel()

    def select_backend(
        config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None, allow_vllm_cutlass: bool = False
    ) -> tuple[Fp8MoeBackend, type[FusedMoEExperts]]:
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat

        is_supported, reason = experts.is_supported_config(experts, config, weight_key, activation_key, FusedMoEActivationFormat.Standard)
        if not is_supported:
            raise ValueError(
                f"rollout.quantization: no FP8 kernel on a CPU computes these experts, because the {reason}; set rollout.quantization: none"
            )
        # For this backend, vLLM changes neither weights nor scales.
        return Fp8MoeBackend.EMULATION, experts

    assign(fp8, select_fp8_moe_backend=select_backend)


def _experts_kernel() -> type[CPUExpertsFp8]:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8
    from vllm.platforms import current_platform

    class DequantizedExperts(SequentialExperts, CPUExpertsFp8):  # type: ignore[misc]
        """Dequantizes an expert and multiplies in the dtype of the activations."""

        @staticmethod
        def _supports_current_device() -> bool:
            return bool(current_platform.is_cpu())

        @staticmethod
        def _supports_routing_method(routing_method: object, weight_key: object, activation_key: object) -> bool:
            return True

        def run_expert(self, states: Tensor, w1: Tensor, w2: Tensor, expert: int) -> Tensor:
            assert self.w1_scale is not None and self.w2_scale is not None
            gate_up = dequantize(w1[expert], self.w1_scale[expert], states.dtype)
            down = dequantize(w2[expert], self.w2_scale[expert], states.dtype)
            gate, up = functional.linear(states, gate_up).chunk(2, dim=-1)
            return functional.linear(functional.silu(gate) * up, down)

    return DequantizedExperts
