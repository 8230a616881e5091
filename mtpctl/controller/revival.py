"""Brings back a lost trainer: its ranks are started anew, and take weights and optimizer from the newest checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from mtpctl.checkpoint.finding import settle
from mtpctl.cluster.replicas import FORGET_S
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import HostGone, TrainerGroup, TrainerLost
from mtpctl.controller.waits import Waits
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.session import Telemetry
from mtpctl.trainer.actor import Parameters


class Revival:
    """Called with the loss, brings the trainer back; rollout and everything else go on meanwhile.

    `folder`: that of the model. `reference`: that of the policy which RL began with.
    """

    def __init__(
        self, recipe: Recipe, trainer: TrainerGroup, state: RunState, telemetry: Telemetry, waits: Waits, *, folder: Path, reference: Path
    ) -> None:
        self.recipe, self.trainer, self.state, self.telemetry, self.waits = recipe, trainer, state, telemetry, waits
        self.folder, self.reference = folder, reference
        self._lost_at: list[float] = []
        self._counts: Parameters

    async def __call__(self, lost: TrainerLost, *, anew: bool = False) -> Path | None:
        """Start the ranks anew and set the run's state back to the newest checkpoint.

        Returns the checkpoint, or None where it is not within this stage, which then begins again. `anew`: samples since the checkpoint are
        gone as well, and their prompts are drawn again. Raises RuntimeFailure where the trainer was lost more than `train.max_restarts`
        times within an hour, and `lost` itself where that is 0 or the recipe takes no checkpoints before the end of a stage.
        """
        self.state.updating, self.state.lost = False, True
        choice = await asyncio.to_thread(settle, self.state.root)
        for line in choice.lines:
            self.telemetry.event("checkpoint", line)
        if choice.damaged and not anew:
            # The groups of earlier updates are gone, so the stage has to continue with those of the checkpoint before.
            raise lost
        path, seconds = await self._until_back(lost, lambda: self._restored(choice.path, anew))
        self.state.lost = False
        source = "the beginning of the stage" if path is None else path.name
        self._tell_back(seconds, f": {self.state.stage} goes on after step {self.state.step}, from {source}")
        return path

    async def at_start(self, lost: TrainerLost) -> Parameters:
        """Bring back a trainer that was lost before the first stage, with no state to set back. Returns what `TrainerGroup.build` does."""

        async def nothing() -> None: ...

        _, seconds = await self._until_back(lost, nothing)
        self._tell_back(seconds, "")
        return self._counts

    def _tell_back(self, seconds: float, what: str) -> None:
        ranks, asked = self.trainer.recipe.train.parallel.world_size, self.recipe.train.parallel.world_size
        fewer = f" with {ranks} of {asked} ranks" if ranks < asked else ""
        self.telemetry.event("restart", f"trainer back{fewer} after {seconds:.0f} s{what}")

    async def _until_back[T](self, lost: TrainerLost, then: Callable[[], Awaitable[T]]) -> tuple[T, float]:
        """Start the ranks anew, build their models and call `then`; again from the start where the trainer is lost meanwhile.

        Returns what `then` returned, and the seconds that all of it took.
        """
        began, count = time.monotonic(), 0
        while True:
            if not count or not isinstance(lost, HostGone):
                count = self._counted(lost)
            self.telemetry.event(
                "restart", f"{lost}; starting the trainer anew, {count} of train.max_restarts: {self.recipe.train.max_restarts}"
            )
            try:
                with self.waits.on("trainer: starting anew", "trainer rank 0"):
                    await self.trainer.start_anew(lambda line: self.telemetry.event("restart", line), self.state.stopping)
                    self._counts = await self.trainer.build(self.folder)
                    return await then(), time.monotonic() - began
            except TrainerLost as again:
                lost = again

    def _counted(self, lost: TrainerLost) -> int:
        """Times that the trainer was lost within an hour, this one included. Raises RuntimeFailure, or `lost`, where these are too many."""
        train, now = self.recipe.train, time.monotonic()
        self._lost_at = [*(then for then in self._lost_at if now - then < FORGET_S), now]
        if not train.revives:
            raise lost
        if len(self._lost_at) > train.max_restarts:
            if train.max_restarts:
                raise RuntimeFailure(f"{lost}; train.max_restarts: {train.max_restarts} within an hour are used up") from lost
            raise lost
        return len(self._lost_at)

    async def _restored(self, newest: Path | None, anew: bool) -> Path | None:
        stage = self.state.stage
        within_it = self.state.go_back(newest, anew=anew)
        if newest is not None and not within_it:
            await self.trainer.restore(newest)
        await self.state.until_saved(lambda: self.trainer.begin_stage(stage, self.reference, resumed=within_it))
        if newest is not None and within_it:
            await self.trainer.restore(newest)
        return newest if within_it else None
