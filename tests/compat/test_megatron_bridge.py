"""Megatron-Bridge is imported without Transformer Engine and one architecture at a time, and no stub stays behind."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtpctl.compat.megatron_bridge import import_auto_bridge

PROGRAM = """
import json, sys
from mtpctl.compat.megatron_bridge import import_auto_bridge

bridge = import_auto_bridge()
loaded = [name for name in sys.modules if name.startswith("megatron.bridge.models.")]
import megatron.bridge.models as models
from megatron.bridge.models import Gemma2ModelProvider
try:
    models.no_such_name
except AttributeError as error:
    missing = str(error)
print(json.dumps({
    "others": [name for name in loaded if name.split(".")[3] in ("gemma", "nemotron_omni", "kimi", "ernie_vl", "falcon_h1")],
    "late": Gemma2ModelProvider.__module__,
    "missing": missing,
    "supported": bridge.list_supported_models(),
}))
"""


def test_supported_families_are_registered_and_other_architectures_are_imported_on_use() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["others"] == []
    assert report["late"].startswith("megatron.bridge.models.gemma")
    assert "no_such_name" in report["missing"]
    wanted = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"}
    wanted |= {"MiMoForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"}
    wanted |= {"Ernie4_5_MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
    assert wanted <= set(report["supported"])


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_stubs_are_removed_after_the_import() -> None:
    bridge = import_auto_bridge()
    assert bridge.__name__ == "AutoBridge"
    assert not [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]
    from megatron.core.models.gpt import gpt_layer_specs

    assert gpt_layer_specs.HAVE_TE is False


def test_another_release_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.0")
    with pytest.raises(RuntimeError, match=r"megatron-bridge 0\.7\.0 is installed"):
        import_auto_bridge()


class _Operations(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["split_qkv_weights", "split_qkv_biases"])
def test_heads_are_split_as_upstream_does_but_without_indices(name: str, gated: bool, groups: int) -> None:
    """An index tensor on the CPU would be copied to the GPU, which waits for it."""
    import_auto_bridge()
    split = getattr(importlib.import_module("megatron.bridge.models.conversion.param_mapping"), name)
    config = SimpleNamespace(num_attention_heads=6, num_query_groups=groups, kv_channels=5, hidden_size=7, attention_output_gate=gated)
    rows = ((2 if gated else 1) * 6 + 2 * groups) * 5
    qkv = torch.randn(rows) if name == "split_qkv_biases" else torch.randn(rows, 7)
    with _Operations() as operations:
        parts = split(config, qkv)
    assert "index" not in operations.names
    for part, expected in zip(parts, split.__wrapped__(config, qkv), strict=True):
        assert torch.equal(part, expected)
