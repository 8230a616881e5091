"""One update of each stage is profiled: the third, as a trace and as tables in which named phases stand apart."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from torch.profiler import record_function

from mtpctl.trainer.actor import PROFILED_UPDATE, UpdateProfile


def test_third_update_of_a_stage_is_profiled(tmp_path: Path) -> None:
    profile = UpdateProfile(tmp_path / "logs", rank=1)
    for update in range(1, PROFILED_UPDATE + 2):
        with profile.update("rl"), record_function("mtpctl/products"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        assert (tmp_path / "logs").exists() == (update >= PROFILED_UPDATE)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["profile-rl-rank1.json.gz", "profile-rl-rank1.txt"]
    trace = json.loads(gzip.decompress((tmp_path / "logs/profile-rl-rank1.json.gz").read_bytes()))
    assert any(event.get("name") == "mtpctl/products" for event in trace["traceEvents"])
    phases, operations = (tmp_path / "logs/profile-rl-rank1.txt").read_text().split("\n\n")
    assert "| products | 1 |" in phases and "aten::mm" in operations and "mtpctl/" not in operations
