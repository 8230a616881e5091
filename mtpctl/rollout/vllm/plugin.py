"""mtpctl's plugin for vLLM (entry point `vllm.general_plugins`), called in each process before an engine is built in it.

It patches vLLM for engines that mtpctl starts, or that ask for its weight transfer. Any other vLLM process of the environment, of
whatever release, is left as it is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

TRANSFER_BACKEND = "mtpctl"
"""Name under which the weight receiver is known to vLLM (`weight_transfer_config.backend`)."""

OURS = "MTPCTL_VLLM"
"""Environment variable that marks processes of such engines: vLLM's processes inherit it from the one that starts them."""

_WATCHES = "_mtpctl_watches"
_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def register() -> None:
    """Install the patches in processes of our engines; elsewhere wait until an engine asks for our weight transfer. May be called again.

    vLLM swallows errors of a plugin's import, but not of this call: so every import is in here.
    """
    if os.environ.get(OURS):
        install()
        return
    from vllm.engine.arg_utils import EngineArgs

    from mtpctl.rollout.vllm.patches.assign import assign

    upstream = EngineArgs.create_model_config
    if hasattr(upstream, _WATCHES):
        return

    def create_model_config(self: EngineArgs) -> ModelConfig:
        # vLLM calls this first of all with an engine's arguments, before it starts any of the engine's processes.
        if getattr(self.weight_transfer_config, "backend", None) == TRANSFER_BACKEND:
            os.environ[OURS] = "1"
            # Workers of vLLM's Ray executor inherit nothing: they are given the variables that this one names.
            named = os.environ.get(_COPIED, "")
            os.environ[_COPIED] = ",".join(filter(None, [named, OURS]))
            install()
        return upstream(self)

    setattr(create_model_config, _WATCHES, True)
    assign(EngineArgs, create_model_config=create_model_config)


def install() -> None:
    """Install every patch and register the weight receiver. May be called again.

    Raises UpstreamMoved for another release of vLLM than the pinned one.
    """
    from mtpctl.rollout.vllm.patches.version import require_pinned

    require_pinned(__name__)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mtpctl.compat import mimo_config
    from mtpctl.rollout.vllm.patches import (
        aborts,
        depths,
        draft_counts,
        drafter,
        experts,
        gemm,
        logprobs,
        packed,
        rotary,
        routes,
        sampler,
        seeds,
        short_queries,
    )

    mimo_config.install()
    sampler.install()
    seeds.install()
    gemm.install()
    packed.install()
    experts.install()
    rotary.install()
    short_queries.install()
    drafter.install()
    depths.install()
    aborts.install()
    draft_counts.install()
    logprobs.install()
    routes.install()
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, "mtpctl.rollout.vllm.receiver", "ManifestTransferEngine")
