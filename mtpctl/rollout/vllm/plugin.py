"""What vLLM calls in each process of the environment, before an engine is built in it (entry point `vllm.general_plugins`).

Stand-ins are for engines that mtpctl starts, or that ask for its weight transfer; any other vLLM of the environment, of whatever
release, stays as it is.
"""

from __future__ import annotations

import os
from typing import Any

TRANSFER_BACKEND = "mtpctl"
"""Name under which the weight receiver is known to vLLM (`weight_transfer_config.backend`)."""

OURS = "MTPCTL_VLLM"
"""Environment variable that marks processes of such engines: vLLM's processes inherit it from the one that starts them."""

_WATCHES = "_mtpctl_watches"
_COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def register() -> None:
    """Install the stand-ins in processes of ours; elsewhere wait until an engine asks for our weight transfer. May be called again.

    vLLM swallows errors of a plugin's import, but not of this call: so every import is in here.
    """
    if os.environ.get(OURS):
        install()
        return
    from vllm.engine.arg_utils import EngineArgs

    arguments: Any = EngineArgs
    upstream = arguments.create_model_config
    if hasattr(upstream, _WATCHES):
        return

    def create_model_config(self: Any) -> Any:
        # The first that vLLM makes of an engine's arguments, before any of the engine's processes is there.
        if getattr(self.weight_transfer_config, "backend", None) == TRANSFER_BACKEND:
            os.environ[OURS] = "1"
            # Workers of vLLM's Ray executor inherit nothing: they are given the variables that this one names.
            named = os.environ.get(_COPIED, "")
            os.environ[_COPIED] = ",".join(filter(None, [named, OURS]))
            install()
        return upstream(self)

    setattr(create_model_config, _WATCHES, True)
    arguments.create_model_config = create_model_config


def install() -> None:
    """Install every stand-in and announce the weight receiver. May be called again.

    Raises UpstreamMoved for another release of vLLM than the pinned one.
    """
    from mtpctl.rollout.vllm.patches.version import require_pinned

    require_pinned(__name__)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mtpctl.compat import mimo_config
    from mtpctl.rollout.vllm.patches import cut, draft_counts, drafter, gemm, logprobs, packed, rotary, sampler, seeds

    mimo_config.install()
    sampler.install()
    seeds.install()
    gemm.install()
    packed.install()
    rotary.install()
    drafter.install()
    cut.install()
    draft_counts.install()
    logprobs.install()
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, "mtpctl.rollout.vllm.receiver", "ManifestTransferEngine")
