"""Experts in engines with `numerics: bitwise`, on a CPU and on CUDA (vLLM 0.32.0).

vLLM rounds router logits to the model's dtype, selects an expert kernel by platform, and scales the experts' outputs by their probs. In a
bitwise engine, router, experts and their sum are those of `mtpctl.kernels.exact_experts`, which the trainer calls too. Weights stay as they
are loaded. Recorded routes are those of the replaced router.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mtpctl.errors import UpstreamMoved
from mtpctl.kernels import exact, exact_experts, invariant
from mtpctl.rollout.vllm.patches.exact import is_exact
from mtpctl.rollout.vllm.patches.guard import assign, patch

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


@patch
def install_exact_experts() -> None:
    """Let experts of a bitwise engine compute with `exact_experts`.

    On CUDA the process of another engine is unchanged: Dynamo would trace the replaced methods.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or is_exact()):
        return
    replaced = ((GateLinear, "forward"), (MoERunner, "_apply_quant_method"), (UnquantizedFusedMoEMethod, "_setup_kernel"))
    for owner, name in replaced:
        if name not in vars(owner):
            raise UpstreamMoved(f"{__name__}: {owner.__name__}.{name} is gone; find how this vLLM computes experts, or they are not exact")
    gate, experts, setup = GateLinear.forward, MoERunner._apply_quant_method, UnquantizedFusedMoEMethod._setup_kernel

    @wraps(gate)
    def forward(self: GateLinear, x: Tensor) -> Any:
        return self._return(_logits(x, self.get_parameter("weight"))) if is_exact() else gate(self, x)

    @wraps(experts)
    def apply(self: MoERunner, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs) if is_exact() else experts(self, *args, **kwargs)

    @wraps(setup)
    def _setup_kernel(self: UnquantizedFusedMoEMethod, *args: Any, **kwargs: Any) -> None:
        if not is_exact():
            setup(self, *args, **kwargs)
            return
        self.unquantized_backend = UnquantizedMoeBackend.TRITON  # weight updates check for a backend that does not pack weights

    assign(GateLinear, forward=forward)
    assign(MoERunner, _apply_quant_method=apply)
    assign(UnquantizedFusedMoEMethod, _setup_kernel=_setup_kernel)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    return invariant.logits(x, weight) if x.is_cuda else exact.logits(x, weight)


def run(runner: MoERunner, hidden_states: Tensor, router_logits: Tensor, *_: Any, **__: Any) -> tuple[None, Tensor]:
    """No output of shared experts, and the routed experts' output [T, H]."""
    assert runner._shared_experts is None, "shared experts are not exact"
    router: Any = runner.router
    layer: Any = runner.routed_experts
    chosen = exact_experts.top_experts(router_logits, router.top_k)
    if router.capture_fn is not None:
        router.capture_fn(chosen)
    of_all = not router.renormalize
    return None, exact_experts.run_experts(hidden_states, router_logits, chosen, layer.w13_weight, layer.w2_weight, of_all=of_all)
