"""A checkpoint of adapters is converted to a PEFT folder, or to the merged model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.hf_writer import HfWriter
from mtpctl.errors import ThresholdMissed, UserError
from tests.fakes.convert_models import converted, model, tensors
from tests.fakes.peft_files import LORA, spoiled, trained
from tests.fakes.tiny import engine, mimo, sequences


@pytest.mark.parametrize("case", ["mimo", "qwen3-moe", "qwen3.5", "nemotron-h"])
def test_merged_adapter_is_converted_and_verified(tmp_path: Path, case: str) -> None:
    model(case, tmp_path / "hf")
    published = trained(tmp_path, HfFolder.open(tmp_path / "hf"))
    converted(tmp_path / "step-1", tmp_path / "merged", model=tmp_path / "hf", merge=True)
    result, before = tensors(tmp_path / "merged"), tensors(tmp_path / "hf")
    assert result.keys() == published.keys() == before.keys()
    changed = {name for name in result if not torch.equal(result[name], before[name])}
    assert any("mlp" in name or "experts" in name for name in changed) and (case == "qwen3-moe" or any("mtp" in name for name in changed))
    assert all(torch.equal(result[name], value) for name, value in published.items())


SERVED = """
import sys
from pathlib import Path
import peft, torch
from transformers import AutoModelForCausalLM
root, ids = Path(sys.argv[1]), torch.tensor([[int(token) for token in sys.argv[2].split(",")]])
def load(name):
    return AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
with torch.no_grad():
    base, merged = load("hf"), load("merged")(ids).logits
    moved = float((base(ids).logits - merged).abs().max())
    adapted = peft.PeftModel.from_pretrained(base, root / "adapter").eval()(ids).logits
print("found", moved, float((adapted - merged).abs().max()))
"""
"""In a separate process, without the engine's patches for CPUs."""


def test_peft_folder_gives_the_logits_of_the_merged_model(tmp_path: Path) -> None:
    model("qwen3", tmp_path / "hf")
    trained(tmp_path, HfFolder.open(tmp_path / "hf"), mode="off")
    converted(tmp_path / "step-1", tmp_path / "adapter", model=tmp_path / "hf")
    converted(tmp_path / "step-1", tmp_path / "merged", model=tmp_path / "hf", merge=True)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8.0 and "q_proj" in config["target_modules"]
    ids = ",".join(map(str, sequences(1)[0].token_ids))
    done = subprocess.run([sys.executable, "-c", SERVED, str(tmp_path), ids], capture_output=True, text=True, check=True)
    moved, apart = map(float, done.stdout.split("found")[1].split())
    assert moved > 0.01 and apart < 1e-5


@pytest.mark.parametrize("case", ["mimo", "qwen3-moe", "qwen3.5"])
def test_verify_compares_merged_weights_with_base_and_adapter(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model(case, tmp_path / "hf")
    trained(tmp_path, HfFolder.open(tmp_path / "hf"))
    conversion = converted(tmp_path / "step-1", tmp_path / "merged", model=tmp_path / "hf", merge=True, verify=True)
    assert (
        conversion.verified is not None
        and conversion.verified.num_tensors == conversion.tensors
        and conversion.verified.max_logit_diff < 1e-5
    )
    assert (conversion.verified.max_mtp_logit_diff is None) == (case == "qwen3-moe")
    monkeypatch.setattr(HfWriter, "put", spoiled(HfWriter.put, "o_proj.weight"))
    with pytest.raises(ThresholdMissed, match=r"verify: .*o_proj\.weight differs, first at element 0"):
        converted(tmp_path / "step-1", tmp_path / "spoiled", model=tmp_path / "hf", merge=True, verify=True)
    assert not (tmp_path / "spoiled").exists()


@pytest.mark.parametrize("case", ["mimo", "qwen3.5"])
def test_verify_compares_the_peft_folder_with_the_checkpoint(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model(case, tmp_path / "hf")
    trained(tmp_path, HfFolder.open(tmp_path / "hf"))
    conversion = converted(tmp_path / "step-1", tmp_path / "adapter", model=tmp_path / "hf", verify=True)
    assert (
        conversion.verified is not None
        and conversion.verified.num_tensors == conversion.tensors
        and conversion.verified.max_logit_diff < 1e-4
    )
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for change, message in (
        (lambda name, value: {name: value + 1e-3}, "verify: .*lora_A.weight differs"),
        (lambda name, value: {}, "verify: only one side has .*lora_A.weight"),
    ):
        first = min(stored)
        spoilt = {**{name: value for name, value in stored.items() if name != first}, **change(first, stored[first])}
        monkeypatch.setattr("mtpctl.convert.verification.load_file", lambda _, spoilt=spoilt: spoilt)
        with pytest.raises(ThresholdMissed, match=message):
            converted(tmp_path / "step-1", tmp_path / "spoiled", model=tmp_path / "hf", verify=True)


def test_mismatched_adapters_are_rejected(tmp_path: Path) -> None:
    folder = mimo(tmp_path / "hf")
    with engine(folder, lora=LORA) as trainer:
        trainer.save(tmp_path / "step-1")
    other = mimo(tmp_path / "other", initializer_range=0.3)
    with pytest.raises(UserError, match="was trained on other weights"):
        converted(tmp_path / "step-1", tmp_path / "merged", model=other.path, merge=True)
    with pytest.raises(UserError, match="does not name its model"):
        converted(tmp_path / "step-1", tmp_path / "merged", merge=True)
    with pytest.raises(UserError, match="--dtype: an adapter is written in the dtype of its training"):
        converted(tmp_path / "step-1", tmp_path / "adapter", model=folder.path, dtype="fp16")
    with pytest.raises(UserError, match="contains no adapter"):
        converted(folder.path, tmp_path / "checkpoint", merge=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "other", "step-1"]
