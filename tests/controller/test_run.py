"""A run from its checkpoint to its end, with a trainer that does nothing."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from mtpctl.controller.prepare import Prepared, open_model, prepare
from mtpctl.controller.resume import StartingPoint
from mtpctl.controller.run import Run
from mtpctl.controller.state import load_resume_state
from mtpctl.errors import MtpctlError, PrerequisiteMissing, RuntimeFailure
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.session import Telemetry
from tests.fakes.checkpoint_folders import write_checkpoint
from tests.fakes.runs import anywhere, recipe
from tests.fakes.trainer_group import FakeTrainerGroup


class Rows:
    """Telemetry that keeps the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, kind: str, message: str) -> None:
        self.events.append(message)

    def log(self, *_: Any) -> None: ...

    def waiting(self, what: Any) -> None: ...


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_resume_message_of_rl_lists_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    async def nothing(self: Run, *_: Any) -> tuple[None, None]:
        return None, None

    class Stopped:
        def __init__(self, *requested: Any, startup_task: Any, recover: Any) -> None:
            self.state = requested[-1]

        async def run(self) -> None:
            self.state.stop_requested.set()

    monkeypatch.setattr("mtpctl.controller.run.TrainerGroup", FakeTrainerGroup)
    monkeypatch.setattr("mtpctl.controller.run.reserve_bundles", anywhere)
    monkeypatch.setattr(Run, "_start_actors", nothing)
    monkeypatch.setattr(Run, "_run_rl", nothing)
    monkeypatch.setattr("mtpctl.controller.run.SftStage", Stopped)
    monkeypatch.setattr("mtpctl.controller.run.RunState.checkpoint", nothing)
    resumed = write_checkpoint(tmp_path / "run", f"{stage}-000004", ended=["sft"] if stage == "rl" else [])
    requested, rows = recipe(tmp_path / "run", "train.stages=[sft,rl]", "train.sft.steps=9", "train.rl.steps=9"), Rows()
    prepared = Prepared(open_model(requested, requested.run_path), cast(Any, None), cast(Any, None), 64)
    starting_point = StartingPoint(resumed, load_resume_state(resumed, requested.train))
    run = Run(
        requested, prepared, RunDirectory(requested.run_path), cast(Telemetry, rows), "other log-probs", starting_point=starting_point
    )
    asyncio.run(run.run())
    line = next(event for event in rows.events if "resumes after step 4" in event)
    assert line.endswith("other log-probs") == (stage == "rl")


@pytest.mark.parametrize("failure", [RuntimeFailure("rollout replica 0, start: out of memory"), PrerequisiteMissing("no room for it")])
def test_failed_stage_saves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: MtpctlError) -> None:
    """The engines do not start, which the concurrent supervised stage learns after three updates."""
    done, failed = 0, asyncio.Event()

    class Trainer(FakeTrainerGroup):
        async def sft_step(self, rows: list[Any]) -> dict[str, float]:
            nonlocal done
            done += 1
            if done == 3:
                failed.set()
            await asyncio.sleep(0)
            return await super().sft_step(rows)

    async def engines(self: Run, stack: Any) -> Any:
        await failed.wait()
        raise failure

    monkeypatch.setattr("mtpctl.controller.run.TrainerGroup", Trainer)
    monkeypatch.setattr("mtpctl.controller.run.reserve_bundles", anywhere)
    monkeypatch.setattr(Run, "_start_actors", engines)
    begun = recipe(tmp_path / "run", "train.stages=[sft,rl]", "train.rl.steps=1", "train.sft.steps=1000", "train.sft.batch_size=1")
    home, rows = begun.run_path, Rows()
    run = Run(begun, prepare(begun, home), RunDirectory(home), cast(Telemetry, rows))
    with pytest.raises(type(failure), match=str(failure)):
        asyncio.run(run.run())
    saved = home / "checkpoints" / f"sft-{done:06d}"
    assert json.loads((saved / "run.json").read_text())["step"] == done < 10
    assert rows.events[-1] == f"failed in sft at step {done}; checkpoint {saved}"


def test_stop_at_the_end_of_a_stage_is_reported_if_another_stage_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrived while the stage's last checkpoint was written."""

    class Ended:
        def __init__(self, *requested: Any, startup_task: Any, recover: Any) -> None:
            self.state = requested[-1]

        async def run(self) -> None:
            self.state.ended.append("sft")
            self.state.stop_requested.set()

    async def nothing(self: Run, *_: Any) -> tuple[None, None]:
        return None, None

    monkeypatch.setattr("mtpctl.controller.run.TrainerGroup", FakeTrainerGroup)
    monkeypatch.setattr("mtpctl.controller.run.reserve_bundles", anywhere)
    monkeypatch.setattr(Run, "_start_actors", nothing)
    monkeypatch.setattr("mtpctl.controller.run.SftStage", Ended)
    begun, rows = recipe(tmp_path / "run", "train.stages=[sft,rl]", "train.sft.steps=9", "train.rl.steps=9"), Rows()
    run = Run(begun, prepare(begun, begun.run_path), RunDirectory(begun.run_path), cast(Telemetry, rows))
    run.stop_handler.number = signal.SIGTERM
    assert asyncio.run(run.run()) == signal.SIGTERM
    assert rows.events[-1] == "stopped at the end of sft; rl has not begun"
