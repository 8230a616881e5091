"""Importing megatron-core leaves torch's compiler out where there is no card, and everybody else's functions are compiled as ever."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

IMPORTED = """
import sys
import torch
import mtpctl.model
import megatron.core.transformer
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
print("torch._inductor.compile_fx" in sys.modules, hasattr(bias_swiglu, "_torchdynamo_orig_callable"))

@torch.compile(backend="eager")
def own(x):
    return x + 1

print(hasattr(own, "_torchdynamo_orig_callable"), own(torch.ones(1)).item())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a card megatron-core's functions are compiled")
def test_only_functions_of_megatron_core_are_left_as_they_are() -> None:
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTED], capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.splitlines()[-2:] == ["False False", "True 2.0"]
