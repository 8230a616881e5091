"""What vLLM calls in each of its processes before it builds an engine (entry point `vllm.general_plugins`)."""

from __future__ import annotations

TRANSFER_BACKEND = "mtpctl"
"""Name under which the weight receiver is known to vLLM (`weight_transfer_config.backend`)."""


def register() -> None:
    """Install every stand-in and announce the weight receiver. May be called again.

    vLLM swallows errors of a plugin's import, but not of this call: so every import is in here.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mtpctl.compat import (
        vllm_cut,
        vllm_draft_counts,
        vllm_drafter,
        vllm_gemm,
        vllm_logprobs,
        vllm_mimo,
        vllm_packed,
        vllm_rotary,
        vllm_sampler,
        vllm_seeds,
    )

    vllm_mimo.install()
    vllm_sampler.install()
    vllm_seeds.install()
    vllm_gemm.install()
    vllm_packed.install()
    vllm_rotary.install()
    vllm_drafter.install()
    vllm_cut.install()
    vllm_draft_counts.install()
    vllm_logprobs.install()
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, "mtpctl.sync.vllm_receiver", "ManifestTransferEngine")
