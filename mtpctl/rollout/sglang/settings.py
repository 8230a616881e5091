"""From the recipe to SGLang's own options, without importing SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mtpctl.recipe.model import DTYPES
from mtpctl.recipe.rollout import SglangConfig

LOADER = "mtpctl.rollout.sglang.receiver.take"
"""What SGLang calls with a step of a weight update (`custom_weight_loader`)."""
Arguments = dict[str, Any]
"""Keyword arguments of SGLang's `Engine`."""


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """All that one engine needs to start: `args` for SGLang, `environment` and interpreter (None: this one) of its process."""

    args: Arguments
    python: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Folder or hub id."""
        return str(self.args["model_path"])


def sglang_engine_settings(
    rollout: SglangConfig, *, model: str, precision: Literal["fp32", "bf16"], seed: int = 0, tokenizer: str | None = None
) -> SglangSettings:
    """Options of one engine. What `rollout.engine_args` names wins over everything chosen here.

    `tokenizer` is the folder or hub id of another tokenizer than the model's; stop strings need one, those of an environment too.

    A draft tree of `speculation.num_tokens` nodes grows over `draft_steps` steps with `draft_top_k` branches each; with one branch it
    is a chain, of as many steps as tokens. The recipe's checks refuse what SGLang cannot do.
    """
    k = rollout.speculation.num_tokens
    args: Arguments = {
        "model_path": model,
        "dtype": DTYPES[precision if rollout.dtype == "auto" else rollout.dtype],
        "random_seed": seed,
        "tp_size": rollout.tp,
        "max_running_requests": rollout.max_in_flight,
        "mem_fraction_static": rollout.gpu_memory,
        "skip_tokenizer_init": not rollout.stop and tokenizer is None,
        "custom_weight_loader": [LOADER],
        "weight_version": "0",
        "log_level": "warning",
    }
    if tokenizer is not None:
        args["tokenizer_path"] = tokenizer
    if rollout.context is not None:
        args["context_length"] = rollout.context
    if k:
        args |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": model,
            "speculative_num_steps": rollout.draft_steps or k,
            "speculative_eagle_topk": rollout.draft_top_k,
            # SGLang counts the token that is verified along with them.
            "speculative_num_draft_tokens": k + 1,
            # A replayed prefill graph passes on the hidden state after the final norm alone; MiMo's MTP layer reads the one before.
            "disable_prefill_cuda_graph": True,
        }
    return SglangSettings(args | rollout.engine_args, rollout.python)
