"""The main job under random events: actors killed and stopped, replicas added and removed, disk and memory full, files damaged, signals.

What has to hold is checked from the records that each run leaves: `metrics.jsonl`, `samples/` and the last checkpoint. How many events
there are, and which, say the variables `MTPCTL_CHAOS_EVENTS`, `MTPCTL_CHAOS_SEED` and `MTPCTL_CHAOS_KINDS` (separated by commas).
docs/benchmarks/chaos.md has what came of many.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mtpctl.checkpoint.finding import newest_checkpoint, prepare_resume
from mtpctl.controller.buffer import SampleBuffer
from mtpctl.telemetry.metrics_file import load_history
from mtpctl.telemetry.sample_log import SampleRow, read_samples
from tests.environment import with_tree
from tests.fakes.chaos import (
    ELASTIC,
    FILLS,
    HOST_KINDS,
    KINDS,
    SCALES,
    SERVER,
    Disturbed,
    Hosts,
    drawn,
    events_asked,
    hosts,
    kinds_asked,
    seed_asked,
    space,
)
from tests.fakes.chaos_damage import damage_checkpoint, unnoticed
from tests.fakes.checkpoint_folders import write_checkpoint

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

PROMPTS, RESPONSES = 4, 4
"""`train.rl.prompts_per_step` and `train.rl.group_size` of the runs."""
BACK_S = 120.0
STEPS_AN_EVENT = 4
MINUTE_S = 60.0


def run(folder: Path, events: int, sets: Sequence[str], *, seed: int, steps: int, on: Hosts | None = None) -> tuple[Path, Disturbed]:
    """A run of `steps` updates of RL that `events` events disturb. Returns its directory, and how it was."""
    folder.mkdir()
    # Actors on other hosts would not see its disk.
    with space(folder, wanted=on is None) as place:
        kinds = HOST_KINDS if on is not None else (*KINDS, *FILLS) if place.works else KINDS
        kinds = (*kinds, *SCALES) if ELASTIC in sets else kinds
        disturbed = Disturbed(
            folder, [*sets, f"train.rl.steps={steps}"], drawn(seed, events, steps - 2, kinds_asked(kinds)), place, seed, on
        )
        try:
            disturbed.drive(5 * MINUTE_S + 1.5 * MINUTE_S * events)
        finally:
            if disturbed.seen.exists():
                shutil.copytree(disturbed.seen, folder / "run", ignore=shutil.ignore_patterns("*.partial", "filler"))
    return folder / "run", disturbed


def number_of(group: str) -> int:
    """Index of a group's prompt in drawing order; a group that was requested again has a suffix."""
    return int(group.partition(".")[0])


def check_every_prompt(run_dir: Path, steps: int) -> list[SampleRow]:
    """Each prompt that was drawn was trained on once, or dropped and recorded, or waits in the last checkpoint.

    Returns what was trained.
    """
    rows = read_samples(run_dir)
    trained = [row for row in rows if row["kind"] == "update"]
    at: dict[int, set[int]] = {}
    for row in trained:
        at.setdefault(number_of(row["group"]), set()).add(row["step"])
    assert {number: steps for number, steps in at.items() if len(steps) > 1} == {}, "trained more than once"
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(1, steps + 1), PROMPTS * RESPONSES)
    assert set(Counter((row["group"], row["index"]) for row in trained).values()) == {1}
    checkpoint = newest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None and checkpoint.name == f"rl-{steps:06d}-end"
    waiting = {group.number for groups in SampleBuffer.load(checkpoint / "buffer.jsonl") for group in groups}
    assert not waiting & at.keys(), "trained, and to be trained again"
    cursor = json.loads((checkpoint / "run.json").read_text())["cursor"]
    assert cursor["epoch"] == 0, "more problems than are drawn"
    dropped = {number_of(row["group"]) for row in rows if row["kind"] == "dropped" and row["note"]}
    assert set(range(cursor["position"])) - at.keys() - waiting - dropped == set(), "neither trained, nor dropped, nor waiting"
    return trained


def check_versions(run_dir: Path, trained: Sequence[SampleRow]) -> None:
    """Each token has the version that it was sampled from: scored under that version it has the log-prob that the engine gave it."""
    for row in trained:
        ends = [0, *(end for _, end, _ in row["versions"])]
        assert [begin for begin, _, _ in row["versions"]] == ends[:-1] and ends[-1] == row["tokens"]
        versions = [version for _, _, version in row["versions"]]
        assert versions == sorted(versions)
    updates = [row.metrics for row in load_history(run_dir).rows if row.phase == "rl" and "reward/mean" in row.metrics]
    compared = [row["rollout_corr/abs_diff_same_version"] for row in updates if "rollout_corr/abs_diff_same_version" in row]
    assert len(compared) >= len(updates) / 2 and max(compared) < 1e-4
    assert all(row["async/staleness_max"] <= 8 for row in updates)
    # 0 where every replica was being restarted, and will read that version from the store.
    verified = [row["sync/verified"] > 0 for row in updates if "sync/verified" in row]
    assert sum(verified) >= len(verified) / 2


def check_restarts(run_dir: Path) -> list[float]:
    """Each trainer that was lost was back in time. Returns the seconds that they took."""
    back = [result for event in load_history(run_dir).events if (result := re.search(r"^trainer back.* after (\d+) s", event.message))]
    seconds = [float(result[1]) for result in back]
    assert all(each <= BACK_S for each in seconds), seconds
    return seconds


def shorter(less: Sequence[int], than: Sequence[int]) -> float:
    """The p-value of Kolmogorov and Smirnov's one-sided test: how probable samples are that are so much shorter by chance."""
    values = np.unique([*less, *than])
    shares = [np.searchsorted(np.sort(lengths), values, side="right") / len(lengths) for lengths in (less, than)]
    gap = max(0.0, float(np.max(shares[0] - shares[1])))
    return math.exp(-2 * gap**2 * len(less) * len(than) / (len(less) + len(than)))


def test_length_check_detects_cut_responses() -> None:
    draw = np.random.default_rng(0)
    whole, others, cut = draw.integers(3, 20, 800), draw.integers(3, 20, 800), np.minimum(draw.integers(3, 20, 800), 15)
    assert shorter(others.tolist(), whole.tolist()) > 0.01 > shorter(cut.tolist(), whole.tolist())
    assert shorter(whole.tolist(), cut.tolist()) > 0.01, "longer ones are none of its business"


def test_damage_missing_from_the_log_is_reported_as_unnoticed(tmp_path: Path) -> None:
    root, draw = tmp_path / "run" / "checkpoints", random.Random(0)
    for name in ("rl-000002", "rl-000004"):
        write_checkpoint(tmp_path / "run", name)
    message, damage = damage_checkpoint(root, draw, len("before\n"))
    assert damage is not None and damage.file.parent.name == "rl-000004" and message.startswith("rl-000004/")
    assert damage_checkpoint(root, draw, 0)[1] is None, "one checkpoint stays whole"
    assert unnoticed([damage], root, "before\nrl resumes after step 4, from rl-000004\n")
    line = prepare_resume(root).lines[0]
    assert not unnoticed([damage], root, f"before\n{line}\nrl resumes after step 2, from rl-000002\n")
    shutil.rmtree(root / "rl-000004.damaged")
    assert unnoticed([damage], root, f"before\n{line}\n") == ["rl-000004 was damaged, and is not kept"]


def test_random_events_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    events, seed = events_asked(), seed_asked()
    steps, sets = STEPS_AN_EVENT * events, (*SERVER, ELASTIC)
    disturbed, how = run(tmp_path / "disturbed", events, sets, seed=seed, steps=steps)
    report(disturbed, how)
    trained = check_every_prompt(disturbed, steps)
    check_versions(disturbed, trained)
    check_restarts(disturbed)


def test_kills_do_not_shorten_the_responses_that_are_trained_on(tmp_path: Path) -> None:
    """Long responses are in flight for longer, so events hit them more often.

    The policy stays as it is: the lengths of two undisturbed runs differ as well once their policies do.
    """
    events, seed = events_asked(), seed_asked()
    steps, sets = STEPS_AN_EVENT * events, (*SERVER, ELASTIC, "train.rl.optimizer.lr=1e-12")
    lengths = []
    for name, count in (("disturbed", events), ("undisturbed", 0)):
        result, how = run(tmp_path / name, count, sets, seed=seed, steps=steps)
        report(result, how)
        lengths.append([row["tokens"] for row in check_every_prompt(result, steps)])
    assert shorter(*lengths) > 0.01


def test_deterministic_run_under_failures_ends_with_the_undisturbed_weights(tmp_path: Path) -> None:
    events, seed = events_asked(), seed_asked()
    steps, sets = STEPS_AN_EVENT * events, (*SERVER, "async.deterministic=true")
    weights = []
    for name, count in (("disturbed", events), ("undisturbed", 0)):
        result, how = run(tmp_path / name, count, sets, seed=seed, steps=steps)
        report(result, how)
        check_every_prompt(result, steps)
        command = [sys.executable, "-m", "mtpctl", "convert-hf", str(result), str(tmp_path / f"{name}-hf")]
        subprocess.run(command, check=True, capture_output=True, timeout=300, env=with_tree())
        weights.append((tmp_path / f"{name}-hf" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_lost_hosts_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    """Two data-parallel trainer ranks, a log-prob replica and engines over five hosts; the trainer goes on with one rank if need be."""
    events, seed = events_asked(), seed_asked()
    steps = STEPS_AN_EVENT * events
    with hosts(4) as four:
        sets = (*SERVER, ELASTIC, "train.parallel.dp=2", "train.min_dp=1")
        result, how = run(tmp_path / "hosts", events, sets, seed=seed, steps=steps, on=four)
    report(result, how)
    check_versions(result, check_every_prompt(result, steps))
    check_restarts(result)


def report(run_dir: Path, how: Disturbed) -> None:
    """Record the events in the folder `MTPCTL_CHAOS_REPORT`, if it is set."""
    if not (folder := os.environ.get("MTPCTL_CHAOS_REPORT")):
        return
    place = Path(folder) / f"{run_dir.parent.name}-{how.seed}"
    place.mkdir(parents=True, exist_ok=True)
    for file in (how.folder / "events.jsonl", how.log, run_dir / "metrics.jsonl"):
        shutil.copy(file, place)
