"""`mtpctl doctor --model` for folders, files and names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.doctor.model import examine_model
from mtpctl.errors import UserError
from tests.fakes.toys import LLAMA_EAGLE3, MIMO, QWEN3_5


def test_folder_file_and_name_are_examined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    (tmp_path / "other.json").write_text(json.dumps(QWEN3_5))
    for name, family in {str(tmp_path): "mimo", str(tmp_path / "other.json"): "qwen3.5", "glm-4.5-air": "glm4-moe"}.items():
        diagnosis = examine_model(name)
        rows = {check.name: check.finding for check in diagnosis.checks}
        assert f"({family})" in rows["model"].summary and rows["drafter"].summary == "1 MTP layer"
        assert diagnosis.verdict == "supported" and diagnosis.error is None
        assert ("vLLM on a CPU" in rows) == (family == "qwen3.5")


def test_drafter_folder_is_part_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in LLAMA_EAGLE3.items() if key != "drafter"}))
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(LLAMA_EAGLE3["drafter"]))
    rows = {check.name: check.finding for check in examine_model(str(tmp_path)).checks}
    assert rows["vLLM"].summary == "drafts with its EAGLE-3 drafter"
    assert rows["SGLang"].state == "absent"


def test_unsupported_models_and_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^zai-org/GLM-5: GLM-5 is not supported: "):
        examine_model("zai-org/GLM-5")
    with pytest.raises(UserError, match=r"^--model: .* has no config.json"):
        examine_model(str(tmp_path))
    with pytest.raises(UserError, match=r"^--model: there is no folder "):
        examine_model(str(tmp_path / "nowhere"))
