"""Megatron-Bridge's models are imported one architecture at a time."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
from mtpctl.compat.transformer_engine import import_auto_bridge

bridge = import_auto_bridge()
loaded = [name for name in sys.modules if name.startswith("megatron.bridge.models.")]
import megatron.bridge.models as models
from megatron.bridge.models import Gemma2ModelProvider
try:
    models.no_such_name
except AttributeError as error:
    missing = str(error)
print(json.dumps({
    "others": [name for name in loaded if name.split(".")[3] in ("gemma", "nemotronh", "kimi", "ernie", "falcon_h1")],
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
    wanted |= {"MiMoForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
    assert wanted <= set(report["supported"])
