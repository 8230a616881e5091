"""`numerics: bitwise` through `mtpctl train`: engine and trainer agree to the last bit while target and drafter train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.toys import QWEN3_5, QWEN3_MOE_EAGLE3
from tests.fakes.train_command import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
UPDATES = 6
RUNS = {
    "recomputed": ["async.staleness_threshold=0"],
    "experts": ["async.staleness_threshold=0", f"model.config={json.dumps(QWEN3_MOE_EAGLE3)}", "train.moe.replay=rollout"],
    "linear attention": ["async.staleness_threshold=0", f"model.config={json.dumps(QWEN3_5)}", "logprob.standalone=true"],
    "ranks": [
        "async.staleness_threshold=0",
        "model.config.num_key_value_heads=2",
        "cluster.num_cpus=4",
        "rollout.tp=2",
        "train.parallel={tp: 2, sequence_parallel: true}",
        "logprob={standalone: true, parallel: {tp: 2}}",
    ],
    "server": ["async.staleness_threshold=1", "logprob.standalone=true"],
    "engine's own": ["async.staleness_threshold=1", "train.rl.old_logprobs=behaviour"],
}
"""Sources of old log-probs, the last two with responses that continue under new weights. The second replays the engine's routes."""
ON_POLICY = ("recomputed", "experts", "linear attention", "ranks")


@pytest.mark.parametrize("run", RUNS)
def test_log_probs_of_a_version_are_equal_in_every_update(run: str, tmp_path: Path) -> None:
    # The toy's rewards are all 0; the entropy moves the target's weights.
    sets = ["numerics=bitwise", "rollout.speculation.num_tokens=3", "train.rl.entropy_coef=0.05", "async.sync_every=1", *RUNS[run]]
    start = Start.of(tmp_path / "run", "train", UPDATES, *sets)
    assert start.end(800) == 0, start.log.read_text()[-3000:]
    rows = [row for row in start.rows() if row.get("phase") == "rl" and "actor/pg_loss" in row]
    assert len(rows) == UPDATES
    same = [row["rollout_corr/abs_diff_same_version"] for row in rows if "rollout_corr/abs_diff_same_version" in row]
    # With stale samples, an update may have no token that was sampled with the weights that score it.
    assert len(same) >= (UPDATES if run in ON_POLICY else 1) and set(same) == {0.0}
    assert min(row["actor/grad_norm"] for row in rows) > 0 and sum(row["rollout/spec_accepted"] for row in rows) > 0
    if run in ON_POLICY:
        assert {_on_policy(row) for row in rows} == {(0.0, 1.0, 0.0, 0.0)}


def _on_policy(row: dict[str, Any]) -> tuple[float, ...]:
    """Mean difference of all tokens, and ratio and clip fractions of an update's only minibatch."""
    return tuple(row[name] for name in ("rollout_corr/abs_diff", "actor/ratio_mean", "actor/clip_fraction_low", "actor/clip_fraction_high"))
