"""mtpctl's plugin for vLLM (entry point `vllm.general_plugins`), called in each process before it creates an engine.

It patches vLLM only for engines that mtpctl starts or that use mtpctl's weight transfer. Other vLLM processes in the same Python
environment are unchanged, and may run other releases of vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

TRANSFER_BACKEND = "mtpctl"
"""Name of the weight receiver in vLLM (`weight_transfer_config.backend`)."""

ENGINE_MARKER = "MTPCTL_VLLM"
"""Environment variable that marks processes of mtpctl's engines. vLLM's child processes inherit it."""

_IS_PATCHED = "_mtpctl_watches"
_COPIED_VARIABLES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def register() -> None:
    """Install the patches in processes of our engines; in others, when an engine requests our weight transfer. May be called again.

    All imports are in this function, because vLLM ignores errors while it imports a plugin, but not errors of this call.
    """
    if os.environ.get(ENGINE_MARKER):
        fork_workers(multiprocessing.current_process().name)
        install()
        return
    from vllm.engine.arg_utils import EngineArgs

    from mtpctl.rollout.vllm.patches import assign

    upstream = EngineArgs.create_model_config
    if hasattr(upstream, _IS_PATCHED):
        return

    def create_model_config(self: EngineArgs) -> ModelConfig:
        # vLLM calls this function with the arguments of each new engine, before it starts a process.
        if getattr(self.weight_transfer_config, "backend", None) == TRANSFER_BACKEND:
            os.environ[ENGINE_MARKER] = "1"
            # Workers of vLLM's Ray executor inherit only the variables that this variable lists.
            os.environ[_COPIED_VARIABLES] = ",".join(filter(None, [os.environ.get(_COPIED_VARIABLES, ""), ENGINE_MARKER]))
            install()
        return upstream(self)

    setattr(create_model_config, _IS_PATCHED, True)
    assign(EngineArgs, create_model_config=create_model_config)


def fork_workers(process_name: str) -> None:
    """Let an engine core fork its workers, so that they need not import vLLM again, which takes 10 to 20 seconds.

    Forking is vLLM's default, but cores inherit another setting from Ray actors, which must not fork. If a core has used CUDA, vLLM spawns
    its workers in spite of this setting. OpenMP threads do not survive a fork, so a core with several of them keeps the inherited setting.
    """
    if process_name.startswith("EngineCore") and os.environ.get("OMP_NUM_THREADS") == "1":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def install() -> None:
    """Install every patch and register the weight receiver. May be called again.

    Raises UpstreamMoved if the installed vLLM is not the pinned release.
    """
    from mtpctl.rollout.vllm.patches import require_pinned

    require_pinned(__name__)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mtpctl.compat.transformers import register_mimo
    from mtpctl.rollout.vllm.fp8_loading import register_loader
    from mtpctl.rollout.vllm.patches import (
        admission,
        cores,
        cpu_kernels,
        drafter,
        exact,
        exact_delta,
        fp8_kernels,
        invariant,
        logprobs,
        nemotron_h,
        pauses,
        routes,
        sampling,
        verification,
        weights,
    )

    register_mimo()
    for patch in (
        sampling.install_sampler,
        sampling.install_seeds,
        weights.install_gemm,
        weights.install_packed,
        cpu_kernels.install_experts,
        cpu_kernels.install_biased_router,
        cpu_kernels.install_rotary,
        cpu_kernels.install_narrow_values,
        cpu_kernels.install_context_norms,
        cpu_kernels.install_short_queries,
        fp8_kernels.install_fp8_linear,
        fp8_kernels.install_fp8_experts,
        nemotron_h.install_log_decays,
        nemotron_h.install_draft_dtype,
        nemotron_h.install_ungated_experts,
        nemotron_h.install_mamba_drafts,
        exact.install_exact,  # must follow install_gemm and install_rotary, whose functions it wraps
        invariant.install_invariant,
        exact.install_exact_experts,
        # Before install_drafter, whose wrapper reads keyword arguments that the wrapper of verification passes on by position.
        verification.install_verification,
        drafter.install_drafter,
        drafter.install_depths,
        drafter.install_mimo_v2_layers,
        pauses.install_partial_outputs,
        pauses.install_prefix_eras,
        verification.install_draft_counts,
        logprobs.install_logprobs,
        routes.install_routes,
        cores.install_shared_compilation,
        cores.install_forked_cores,
        admission.install_admission,
    ):
        patch()
    if exact.is_bitwise():
        exact_delta.install_exact_delta()
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, "mtpctl.rollout.vllm.receiver", "ManifestTransferEngine")
    register_loader()
