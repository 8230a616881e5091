"""Megatron-Bridge is imported without Transformer Engine and one architecture at a time, and no stub stays behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest

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
