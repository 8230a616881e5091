"""All patches of vLLM together, as on a GPU. `test_guards.py` runs this file in a separate process, because Triton is chosen at import."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace

import torch

from mtpctl.rollout.vllm import plugin
from tests.fakes import interpreted_triton

SPECULATORS = {"multi_module_mtp": "MultiModuleMTPSpeculator", "target_dependent_ar": "TargetDependentARSpeculator"}


def main() -> None:
    interpreted_triton.install()
    plugin.install()
    for package, name in SPECULATORS.items():
        propose = getattr(importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{package}.speculator"), name).propose
        assert {"input_batch", "seeds", "dummy_run", "num_speculative_tokens"} <= set(inspect.signature(propose).parameters)
        # Block verification binds the arguments, and the switch to no drafts reads one of them as a keyword.
        config = SimpleNamespace(rejection_sample_method="block", uses_dynamic_speculative_decoding=lambda: True)
        drafter = SimpleNamespace(speculative_config=config, draft_tokens=torch.zeros(4, 3, dtype=torch.long), device=torch.device("cpu"))
        assert propose(drafter, SimpleNamespace(num_reqs=2), num_speculative_tokens=0).tolist() == [[-1] * 3] * 2
        assert drafter.draft_tokens.tolist() == [[-1] * 3] * 2 + [[0] * 3] * 2
    print("all patches apply")


if __name__ == "__main__":
    main()
