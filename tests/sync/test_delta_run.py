"""A run that syncs only what changed, with a real engine, drafter and log-prob replica, which loses its engine and is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.cluster.leftovers import SHARED_MEMORY
from tests.fakes.adapter_runs import SETTINGS, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

DELTA = {name: value for name, value in SETTINGS.items() if name not in ("train.lora", "sync.sections")} | {
    "sync.delta": "true",
    "train.precision": "bf16",
    "train.rl.optimizer": "{lr: 1e-6, mtp_lr: 3e-6, warmup_steps: 0}",
}
ELEMENTS = 1_969_920


@pytest.mark.parametrize("transport", ["shm", "storage"])
def test_run_with_changes_survives_a_lost_engine_and_a_resume(tmp_path: Path, transport: str) -> None:
    bucket = tmp_path / "bucket"
    settings = DELTA | {"sync.transport": transport} | ({"sync.url": f"file://{bucket}/{{name}}"} if transport == "storage" else {})
    start = Start(tmp_path / "run", tmp_path / "first.log", settings)
    start.wait_for(2)
    # Its successor reads a complete version and the changes after it.
    start.engine().kill()
    done = len(start.steps())
    start.wait_for(done + 3)
    start.stop()
    first = len(start.steps())
    again = Start(tmp_path / "run", tmp_path / "second.log", settings)
    again.wait_for(first + 2)
    again.stop()

    rows = again.steps()
    assert len(rows) >= first + 2
    # Both ends compare the checksums of every tensor, except at a sync without a live engine.
    assert sum(row["sync/verified"] == 55 for row in rows) >= len(rows) - 2 and rows[-1]["sync/verified"] == 55
    shares = ["sync/changed_share", "sync/changed_share_target", "sync/changed_share_draft"]
    assert all(0 < row[share] < 0.1 for row in rows for share in shares)
    # A complete sync sends 2 bytes an element.
    assert max(row["sync/gb_per_s"] * row["sync/seconds"] for row in rows) < 0.2 * 2 * ELEMENTS / 1e9
    assert not list(bucket.rglob("*.bin")), "a run that ends removes its versions"
    assert not list(SHARED_MEMORY.glob("mtpctl-upload-*"))
