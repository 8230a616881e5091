"""Converts the recipe to SGLang's options, without importing SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mtpctl.plan.placement import ENGINE_MEMORY_SHARE
from mtpctl.recipe.model import DTYPES
from mtpctl.recipe.rollout import SglangConfig

WEIGHT_LOADER = "mtpctl.rollout.sglang.plugin.apply_step"
"""SGLang's `custom_weight_loader`, which receives the steps of weight updates."""
Arguments = dict[str, Any]
"""Keyword arguments of SGLang's `Engine`."""


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """Settings of one engine: `args` for SGLang, interpreter (None: this one) and environment of its process."""

    args: Arguments
    python: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Folder or hub id."""
        return str(self.args["model_path"])


def build_sglang_settings(
    rollout: SglangConfig, *, model: str, precision: Literal["fp32", "bf16"], seed: int = 0, tokenizer: str | None = None
) -> SglangSettings:
    """Settings of one engine. `rollout.engine_args` overrides all options that are set here.

    `tokenizer`: folder or hub id, required for stop strings, including those of environments. SGLang builds a draft tree of `draft_steps`
    levels with `draft_top_k` branches per step, and verifies its `speculation.num_tokens` most likely nodes. With one branch, the tree is a
    chain.
    """
    num_drafts = rollout.speculation.num_tokens
    args: Arguments = {
        "model_path": model,
        "dtype": DTYPES[precision if rollout.dtype == "auto" else rollout.dtype],
        "random_seed": seed,
        "tp_size": rollout.tp,
        "max_running_requests": rollout.max_in_flight,
        "mem_fraction_static": ENGINE_MEMORY_SHARE if rollout.gpu_memory is None else rollout.gpu_memory,
        "skip_tokenizer_init": not rollout.stop and tokenizer is None,
        "custom_weight_loader": [WEIGHT_LOADER],
        "weight_version": "0",
        "log_level": "warning",
    }
    if tokenizer is not None:
        args["tokenizer_path"] = tokenizer
    if rollout.context is not None:
        args["context_length"] = rollout.context
    if num_drafts:
        args |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": model,
            "speculative_num_steps": rollout.draft_steps or num_drafts,
            "speculative_eagle_topk": rollout.draft_top_k,
            # SGLang's number includes the token that is sampled by the target.
            "speculative_num_draft_tokens": num_drafts + 1,
            # With prefill graphs, only the hidden state after the final norm is returned. MiMo's MTP layer needs the state before the norm.
            "disable_prefill_cuda_graph": True,
        }
    return SglangSettings(args | rollout.engine_args, rollout.python)
