"""Where a run stands, and the checkpoints that carry it over a restart."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpctl.checkpoint.pointer import newest, pointer_of
from mtpctl.cluster.deadlines import within
from mtpctl.controller.buffer import SampleBuffer
from mtpctl.controller.trainers import TrainerGroup
from mtpctl.errors import UserError
from mtpctl.recipe.train import TrainConfig

_FILE = "run.json"
RESCUE_S = 300.0
"""Seconds that the checkpoint of a stage that failed may take: the trainer may be what failed."""
_KEPT = ("stage", "step", "version", "synced_at", "cursor", "losses", "ended")


def ended_stages(root: Path) -> list[str]:
    """Stages that a run had ended at its newest checkpoint under `root`, without reading any tensor.

    Raises UserError where the newest is not whole.
    """
    return list(_newest(root)[1]["ended"])


def newest_version(root: Path) -> tuple[Path | None, int]:
    """The checkpoint that a run would resume from, and the weight version that it counts as: (None, 0) where there is none yet.

    Raises UserError where the newest is not whole.
    """
    path, state = _newest(root)
    return path, int(state["version"])


def version_named(text: str, *others: str) -> tuple[Path, Path, int]:
    """What `--from` names: a run directory (its newest checkpoint) or a checkpoint → the run, the checkpoint, and its weight version.

    Raises UserError for anything else, which may be `others` too, and for a run without one.
    """
    path = Path(text).absolute()
    if (path / _FILE).is_file():
        try:
            return path.parent.parent, path, int(json.loads((path / _FILE).read_text())["version"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--from: {text} is not a whole checkpoint of a run; name another") from error
    if not (path / "recipe.resolved.yaml").is_file():
        kinds = ("a run directory (recipe.resolved.yaml)", f"a checkpoint ({_FILE})", *others)
        raise UserError(f"--from: {text} is neither {' nor '.join(kinds)}")
    checkpoint, version = newest_version(path / "checkpoints")
    if checkpoint is None:
        raise UserError(f"--from: {text} has no checkpoint yet")
    return path, checkpoint, version


def check_stages(root: Path, stages: Sequence[str]) -> None:
    """Raise UserError where the newest checkpoint under `root` is within a stage that is not among `stages`.

    Those would begin without what it has trained.
    """
    path, state = _newest(root)
    stage = state["stage"]
    if stage and stage not in (*state["ended"], *stages):
        raise UserError(
            f"train.stages: {path} is within {stage}, which is not among them; add it, with train.{stage}.steps: {state['step']} to end "
            "it there, or name another run_dir"
        )


def _newest(root: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint and the state in it; without one, None and the state of a run that has not begun."""
    path = newest(root)
    if path is None:
        return None, {"stage": "", "ended": [], "version": 0}
    try:
        state: dict[str, Any] = json.loads((path / _FILE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a whole checkpoint; remove {pointer_of(root)} to take the model as it was made") from error
    return path, state


@dataclass
class RunState:
    """The controller's part of a checkpoint: stage and step, weight version, place in the data, the latest losses of a supervised stage.

    `synced_at` is the step of the stage whose weights the version has, -1 where it has those of none. `buffer` is written beside the
    checkpoint while a stage has one. `saving` is the checkpoint on its way to disk. `stopping` is set when a stop was asked for: stages
    return at their next step. `updating`: the weights may be ahead of `step`, since an update is under way. `saved` is the step of the
    newest checkpoint, 0 for where the stage begins, and `saved_at` when it was taken, on the clock of `time.monotonic`.
    """

    root: Path
    train: TrainConfig
    stage: str = ""
    step: int = 0
    version: int = 0
    synced_at: int = -1
    cursor: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    buffer: SampleBuffer | None = None
    saving: Path | None = None
    updating: bool = False
    saved: int = 0
    saved_at: float = field(default_factory=time.monotonic)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def within_stage(self) -> bool:
        """Whether a stage has begun, and not ended."""
        return bool(self.stage) and self.stage not in self.ended

    def begin(self, stage: str) -> None:
        """Enter a stage, at its first step unless the run was restored within it."""
        if self.stage != stage:
            self.stage, self.step, self.synced_at, self.cursor, self.losses, self.buffer = stage, 0, -1, None, [], None
        self.updating, self.saved, self.saved_at = False, self.step, time.monotonic()

    def end(self, stage: str) -> None:
        """Leave a stage."""
        self.ended.append(stage)

    async def load(self, trainer: TrainerGroup) -> Path | None:
        """Take up the newest checkpoint's place in the run. Returns its folder, None where there is none."""
        found = await trainer.call("latest_checkpoint", str(self.root))
        if found is None:
            return None
        for name, value in json.loads((Path(found) / _FILE).read_text()).items():
            setattr(self, name, value)
        if self._goes_on():
            self.ended.remove(self.stage)
        return Path(found)

    def _goes_on(self) -> bool:
        """Whether the recipe now asks for more updates of the stage that ended last; one that its loss may have ended has had enough."""
        more = self.step < getattr(self.train, self.stage).steps
        return more and self.ended[-1:] == [self.stage] and not (self.stage == "sft" and self.train.sft.until_loss)

    async def checkpoint_if_due(self, trainer: TrainerGroup) -> None:
        """A checkpoint, where the recipe wants one by now; and one that was being written is published where it is whole."""
        await self.settle(trainer, wait=False)
        by_step = self.train.checkpoint_every and self.step % self.train.checkpoint_every == 0
        by_time = self.train.checkpoint_minutes and time.monotonic() - self.saved_at >= 60 * self.train.checkpoint_minutes
        if by_step or by_time:
            await self.checkpoint(trainer, wait=not self.train.async_save)

    async def checkpoint(self, trainer: TrainerGroup, *, wait: bool = True) -> Path | None:
        """Write model, optimizer, this state and the buffer; it becomes the newest once all of it is there.

        With `wait=False` that is at a later `settle`. One checkpoint is written at a time. Returns its folder, None where the
        recipe keeps none.
        """
        if not self.train.keep_checkpoints:
            return None
        await self.settle(trainer)
        path = self.root / f"{self.stage}-{self.step:06d}{'-end' if self.stage in self.ended else ''}"
        folder = Path(await trainer.call("begin_save", str(path)))
        (folder / _FILE).write_text(json.dumps({name: getattr(self, name) for name in _KEPT}))
        if self.buffer is not None:
            self.buffer.save(folder / "buffer.jsonl")
        self.saving, self.saved = path, self.step
        if wait:
            await self.settle(trainer)
        # What writing takes is no part of the minutes, or a large model would do nothing else.
        self.saved_at = time.monotonic()
        return path

    async def rescue(self, trainer: TrainerGroup) -> Path | None:
        """A checkpoint of a stage that has failed. None where there is nothing to add to what was saved, or no way to.

        That is where the stage has done nothing since its newest checkpoint (or its beginning), where an update is under way, and
        where no checkpoint is kept. Raises RuntimeFailure where the trainer does not write it within `RESCUE_S`.
        """
        if not self.within_stage:
            return None
        if self.updating or self.step == self.saved:
            await within(self.settle(trainer), RESCUE_S, "checkpoint")
            return None
        return await within(self.checkpoint(trainer), RESCUE_S, "checkpoint")

    async def settle(self, trainer: TrainerGroup, *, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, if any: once it is whole, or with `wait=False` only if it is.

        Raises RuntimeFailure where it could not be written.
        """
        if self.saving is not None and await trainer.call("finish_save", wait):
            path, self.saving = self.saving, None
            await trainer.call("publish_checkpoint", str(path), self.train.keep_checkpoints)
