"""As on a GPU: a process of another program with an engine, then two of ours: `python -m tests.fakes.patched_process FOLDER BACKEND`.

The first of ours is of another release. Prints the state of vLLM after each, and what the speculators of several MTP layers answer then.
Needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from importlib.abc import MetaPathFinder
from types import SimpleNamespace

import torch

from tests.fakes import interpreted_triton

SPECULATORS = {"multi_module_mtp": "MultiModuleMTPSpeculator", "target_dependent_ar": "TargetDependentARSpeculator"}


class NoCuda(MetaPathFinder):
    """Rejects packages that initialize CUDA when they are imported: an engine core that has used CUDA cannot fork its workers."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        assert name != "fla" and not name.endswith("flash_linear_attention.ops.utils"), f"{name} initializes CUDA"


def engines(folder: str, backend: str) -> list[tuple[bool, bool, bool, str]]:
    """For each engine: whether weights stay on a CPU, our calls are there, MiMo is known; and the error."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import utils
    from vllm.v1.engine.core import EngineCore

    from mtpctl.rollout.vllm import patches

    installed, states = patches.installed_release(), []
    for release, transfer in (("0.33.0", None), ("0.33.0", {"backend": backend}), (installed, {"backend": backend})):
        patches.installed_release = lambda found=release: found  # type: ignore[assignment,misc]
        error = ""
        try:
            EngineArgs(folder, skip_tokenizer_init=True, weight_transfer_config=transfer).create_model_config()
        except Exception as raised:
            error = str(raised)
        wrapped = hasattr(utils.dispatch_cpu_unquantized_gemm, "__wrapped__")
        states.append((wrapped, hasattr(EngineCore, "mtpctl_partial_outputs"), "mimo" in CONFIG_MAPPING, error))
    return states


def without_drafts(package: str, name: str) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """The parameters of a speculator's `propose`; its answer to two requests if no drafts are requested, and its buffer for four."""
    propose = getattr(importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{package}.speculator"), name).propose
    # Block verification binds the arguments, and the switch to no drafts reads one of them as a keyword.
    config = SimpleNamespace(rejection_sample_method="block", uses_dynamic_speculative_decoding=lambda: True)
    drafter = SimpleNamespace(speculative_config=config, draft_tokens=torch.zeros(4, 3, dtype=torch.long), device=torch.device("cpu"))
    answer = propose(drafter, SimpleNamespace(num_reqs=2), num_speculative_tokens=0)
    return list(inspect.signature(propose).parameters), answer.tolist(), drafter.draft_tokens.tolist()


if __name__ == "__main__":
    sys.meta_path.insert(0, NoCuda())
    interpreted_triton.install()
    states = engines(*sys.argv[1:])
    print(json.dumps([states, [without_drafts(*each) for each in SPECULATORS.items()]]))
