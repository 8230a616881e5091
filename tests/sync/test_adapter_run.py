"""A run that trains an adapter and syncs only the adapter, with a real engine, drafter and log-prob replica.

The run is started twice: the first start loses its rollout engine, the second resumes with a trained adapter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.adapter_runs import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_engine_and_trainer_agree_with_a_synced_adapter(tmp_path: Path) -> None:
    start = Start(tmp_path / "run", tmp_path / "first.log")
    start.wait_for(2)
    start.engine().kill()
    done = len(start.steps())
    start.wait_for(done + 3)
    start.stop()
    first = len(start.steps())
    again = Start(tmp_path / "run", tmp_path / "second.log")
    again.wait_for(first + 2)
    again.stop()

    rows = again.steps()
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    # Means over tokens that are scored by the weights which sampled them: the engine's W x + s B (A x), the replica's (W + s B A) x.
    same = [row["rollout_corr/abs_diff_same_version"] for row in rows if "rollout_corr/abs_diff_same_version" in row]
    assert len(same) >= 3
    assert max(same) < 1e-5
    # By now the policies of two versions differ by more than that, so that a sync which did nothing would be seen.
    assert max(row["rollout_corr/abs_diff"] for row in rows) > 1e-3
    # What moves at a sync is the adapter and the draft, not 8 MB of weights.
    assert max(row["sync/gb_per_s"] * row["sync/seconds"] for row in rows) < 3e-3
