"""Checkpoints of a run: contents, and publication in the foreground or in the background."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mtpctl.checkpoint.listing import entry_of_text
from mtpctl.controller.buffer import SampleBuffer
from mtpctl.controller.sft import count_skipped
from mtpctl.controller.state import (
    FAILURE_PERIOD_S,
    RETRY_S,
    RunState,
    find_newest_version,
    load_resume_state,
    read_ended_stages,
    resolve_checkpoint,
)
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.errors import RuntimeFailure, SaveFailed, UserError
from mtpctl.recipe.train import TrainConfig
from tests.fakes.checkpoint_folders import BYTES, SHARD, flip, write_checkpoint
from tests.fakes.trainer_group import FakeTrainerGroup


def run(tmp_path: Path, **fields: Any) -> tuple[RunState, FakeTrainerGroup, TrainerGroup]:
    state, trainer = RunState(tmp_path, TrainConfig(checkpoint_every=2, **fields)), FakeTrainerGroup()
    state.begin("sft")
    return state, trainer, cast(TrainerGroup, trainer)


def clock(patch: pytest.MonkeyPatch) -> list[float]:
    """The time that the state has, which the test sets."""
    now = [1000.0]
    patch.setattr("mtpctl.controller.state.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def step(state: RunState, trainer: TrainerGroup) -> None:
    state.step += 1
    await state.checkpoint_if_due(trainer)


def test_checkpoint_is_published_before_the_next_step(tmp_path: Path) -> None:
    async def main() -> None:
        state, trainer, group = run(tmp_path)
        for _ in range(5):
            await step(state, group)
        assert trainer.published == ["sft-000002", "sft-000004"]
        assert json.loads((tmp_path / "sft-000004" / "run.json").read_text())["step"] == 4

    asyncio.run(main())


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.minutes = 0.0
        monkeypatch.setattr("mtpctl.controller.state.time.monotonic", lambda: 60 * self.minutes)


def test_default_checkpoint_interval_is_ten_minutes_without_writing_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the time that writing takes is no part."""
    clock = Clock(monkeypatch)

    class Slow(FakeTrainerGroup):
        async def called(self, method: str) -> None:
            clock.minutes += 4 * (method == "finish_save")

    async def main() -> None:
        state, trainer = RunState(tmp_path, TrainConfig()), Slow()
        clock.minutes = 100.0
        state.begin("sft")
        for _ in range(12):
            clock.minutes += 3
            await step(state, cast(TrainerGroup, trainer))
        assert trainer.published == ["sft-000004", "sft-000008", "sft-000012"]

    asyncio.run(main())


def test_without_minutes_only_updates_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def main() -> None:
        state, trainer, group = run(tmp_path, checkpoint_minutes=0)
        for _ in range(3):
            clock.minutes += 1000
            await step(state, group)
        assert trainer.published == ["sft-000002"]

    asyncio.run(main())


def test_failed_stage_saves_updates_since_the_newest_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        state, trainer, group = run(tmp_path)
        assert await state.save_after_failure(group) is None, "nothing was trained"
        for _ in range(3):
            await step(state, group)
        assert await state.save_after_failure(group) == tmp_path / "sft-000003"
        assert await state.save_after_failure(group) is None, "it is there"
        await step(state, group)
        await step(state, group)
        state.is_updating = True
        assert await state.save_after_failure(group) is None, "the weights are no step's"
        assert trainer.published == ["sft-000002", "sft-000003", "sft-000004"]

    asyncio.run(main())


def test_failed_stage_waits_for_the_checkpoint_in_progress(tmp_path: Path) -> None:
    async def main() -> None:
        state, trainer, group = run(tmp_path, async_save=True)
        await step(state, group)
        await step(state, group)
        assert await state.save_after_failure(group) is None and trainer.published == ["sft-000002"]

    asyncio.run(main())


def test_run_stopped_before_its_resumed_stage_keeps_the_checkpoint(tmp_path: Path) -> None:
    """The checkpoint has the buffer, which the stage has not read yet. A stage that has its buffer writes another checkpoint."""

    async def main() -> None:
        state, trainer, group = run(tmp_path)
        state.step = state.saved_step = 4
        assert await state.checkpoint_at_stop(group) == tmp_path / "sft-000004" and trainer.published == ["sft-000004"]
        assert await state.checkpoint_at_stop(group) == tmp_path / "sft-000004" and trainer.published == ["sft-000004"]
        state.buffer = SampleBuffer()
        assert await state.checkpoint_at_stop(group) == tmp_path / "sft-000004" and trainer.published == ["sft-000004"] * 2

    asyncio.run(main())


def test_no_checkpoint_is_written_with_keep_checkpoints_0(tmp_path: Path) -> None:
    async def main() -> None:
        state, trainer, group = run(tmp_path, keep_checkpoints=0)
        await step(state, group)
        await step(state, group)
        assert await state.checkpoint(group) is None
        assert await state.save_after_failure(group) is None
        assert trainer.published == [] and list(tmp_path.iterdir()) == []

    asyncio.run(main())


def test_async_checkpoint_is_published_when_complete_with_its_initial_state(tmp_path: Path) -> None:
    async def main() -> None:
        state, trainer, group = run(tmp_path, async_save=True)
        await step(state, group)
        await step(state, group)
        await step(state, group)
        assert trainer.published == []
        trainer.written = True
        await step(state, group)
        assert trainer.published == ["sft-000002"]
        assert json.loads((tmp_path / "sft-000002" / "run.json").read_text())["step"] == 2

    asyncio.run(main())


def test_next_checkpoint_and_stop_wait_for_the_current_one(tmp_path: Path) -> None:
    async def main() -> None:
        state, trainer, group = run(tmp_path, async_save=True)
        for _ in range(4):
            await step(state, group)
        assert trainer.published == ["sft-000002"]
        await state.checkpoint(group)
        assert trainer.published == ["sft-000002", "sft-000004", "sft-000004"]

    asyncio.run(main())


@pytest.mark.parametrize("in_background", [False, True])
def test_failed_checkpoint_is_retried_after_a_later_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool) -> None:
    now = clock(monkeypatch)

    async def main() -> None:
        state, trainer, group = run(tmp_path, async_save=in_background)
        message: list[str] = []
        state.report = message.append
        trainer.failing_saves, trainer.written = 1, True
        for _ in range(2 + in_background):
            await step(state, group)
        failed = f"checkpoint {tmp_path}/sft-000002 was not written: disk full"
        assert message == [f"{failed}; training continues, and a later update writes the next checkpoint"]
        await step(state, group)
        assert trainer.published == [] and not list(tmp_path.iterdir()), "not at once"
        now[0] += RETRY_S
        for _ in range(1 + in_background):
            await step(state, group)
        assert trainer.published == ["sft-000005" if in_background else "sft-000004"] and len(message) == 1
        for _ in range(2 + in_background):
            await step(state, group)
        assert trainer.published[1:] == (["sft-000006", "sft-000008"] if in_background else ["sft-000006"]), "as often as before"

    asyncio.run(main())


def test_run_fails_after_minutes_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)

    async def main() -> None:
        state, trainer, group = run(tmp_path)
        trainer.failing_saves = 3
        for _ in range(2):
            await step(state, group)
        now[0] += FAILURE_PERIOD_S
        await step(state, group)  # an update that takes so long has a try after it
        assert len(state.failure_times) == 2
        now[0] += RETRY_S
        message = "sft-000004 was not written: disk full; 3 attempts in 5 minutes failed; free space and start the same command again"
        with pytest.raises(RuntimeFailure, match=message):
            await step(state, group)

    asyncio.run(main())


def test_final_checkpoint_replaces_a_failed_one(tmp_path: Path) -> None:
    async def main() -> None:
        state, trainer, group = run(tmp_path, async_save=True)
        for _ in range(2):
            await step(state, group)
        trainer.failing_saves = 1
        state.ended.append("sft")
        assert await state.checkpoint(group) == tmp_path / "sft-000002-end"
        assert trainer.published == ["sft-000002-end"]
        trainer.failing_saves = 1
        with pytest.raises(SaveFailed, match="sft-000002-end was not written: disk full"):
            await state.checkpoint(group)

    asyncio.run(main())


@pytest.mark.parametrize("part", ["run.json", "buffer.jsonl"])
def test_checkpoint_without_the_controllers_part_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Published, it would be a run whose groups are lost. What was done since the one before it is saved once there is room."""
    full = True
    write = Path.write_text

    def text(path: Path, *args: Any) -> int:
        if full and part == path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args)

    class Buffer(SampleBuffer):
        def snapshot_writer(self, path: Path) -> Callable[[], Any]:
            return lambda: text(path, "") or entry_of_text("")

    monkeypatch.setattr(Path, "write_text", text)

    async def main() -> None:
        nonlocal full
        state, trainer, group = run(tmp_path)
        state.buffer = Buffer()
        await step(state, group)
        message: list[str] = []
        state.report = message.append
        await step(state, group)
        assert "sft-000002 was not written: No space left on device; training continues" in message[0]
        assert trainer.published == [] and not trainer.folder.exists()
        full = False
        assert await state.save_after_failure(group) == tmp_path / "sft-000002"
        assert trainer.published == ["sft-000002"]
        assert {"buffer.jsonl", "run.json"} < {file.name for file in (tmp_path / "sft-000002").iterdir()}

    asyncio.run(main())


def test_newest_checkpoint_is_read_without_a_trainer(tmp_path: Path) -> None:
    message: list[str] = []
    root = tmp_path / "checkpoints"
    assert (read_ended_stages(root), find_newest_version(root, message.append)) == ([], (None, 0))
    path = write_checkpoint(tmp_path, "rl-000004", version=3)
    assert (read_ended_stages(root), find_newest_version(root, message.append)) == (["sft"], (path, 3))
    write_checkpoint(tmp_path, "rl-000006", version=5)
    flip(root / "rl-000006" / SHARD)
    assert find_newest_version(root, message.append) == (path, 3)
    (line,) = message
    assert line.startswith(f"{root}/rl-000006/{SHARD} has changed since") and line.endswith("; rl-000004 is used instead")
    for each in (path, root / "rl-000006"):
        os.truncate(each / SHARD, BYTES - 1)
    for read in (read_ended_stages, lambda root: find_newest_version(root, message.append)):
        with pytest.raises(
            UserError, match=r"rl-000006/__0_0\.distcp has 4,095 bytes, .*: the checkpoint is incomplete, and so are all older ones \(1\)"
        ):
            read(root)


@pytest.mark.parametrize("applied", [0.0, 0.25, 0.75])
def test_skipped_updates_in_a_row_end_the_run_unless_one_is_partly_applied(applied: float) -> None:
    bad = 0
    for skipped in (1.0, 1.0, applied, 1.0, 1.0):
        bad = count_skipped({"skipped": skipped}, bad, 3)
    with pytest.raises(RuntimeFailure, match="3 updates in a row had a loss or gradient that is not finite; lower the learning rate"):
        count_skipped({"skipped": 1.0}, bad, 3)
    with pytest.raises(RuntimeFailure, match="had a loss or MTP gradient that is not finite, but a finite trunk gradient; check the loss"):
        count_skipped({"skipped": 1.0, "actor/grad_norm": 0.5}, bad, 3)


def test_buffer_is_in_the_final_checkpoint_of_its_stage_only(tmp_path: Path) -> None:
    """So that the stage can continue."""

    async def main() -> None:
        state, _, group = run(tmp_path)
        state.begin("rl")
        state.buffer = SampleBuffer()
        state.ended.append("rl")
        assert (await state.checkpoint(group) or Path()).name == "rl-000000-end"
        assert (tmp_path / "rl-000000-end" / "buffer.jsonl").exists()
        state.begin("sft")
        assert state.buffer is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("stage", "sft", "rl", "goes_on"),
    [
        ("rl", {"steps": 2}, {"steps": 6}, True),
        ("rl", {"steps": 2}, {"steps": 4}, False),
        ("rl", {"steps": 2}, {"steps": 3}, False),
        ("rl", {"steps": 9}, {"steps": 4}, False),
        ("sft", {"steps": 6}, {"steps": 4}, True),
        ("sft", {"steps": 6, "until_loss": 0.1}, {"steps": 4}, False),
    ],
)
def test_ended_stage_continues_if_more_updates_are_configured(
    tmp_path: Path, stage: str, sft: dict[str, Any], rl: dict[str, Any], goes_on: bool
) -> None:
    """But not one that came before another, nor one that its loss has ended."""
    ended = ["sft", "rl"] if stage == "rl" else ["sft"]
    (tmp_path / "end").mkdir()
    retained = {"stage": stage, "step": 4, "version": 3, "cursor": {"epoch": 1}, "ended": ended}
    (tmp_path / "end" / "run.json").write_text(json.dumps(retained))

    state = RunState(tmp_path, TrainConfig.model_validate({"sft": sft, "rl": rl}))
    state.load(load_resume_state(tmp_path / "end", state.train))
    assert state.ended == (ended[:-1] if goes_on else ended)
    state.begin(stage)
    assert (state.step, state.cursor) == (4, {"epoch": 1})


@pytest.mark.parametrize("text", ["{}", '{"version": null}', "[]", "{"])
def test_folder_with_a_foreign_state_is_not_a_checkpoint(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"^--from: .*files\.json is missing; name another"):
        resolve_checkpoint(str(tmp_path), report=print)
