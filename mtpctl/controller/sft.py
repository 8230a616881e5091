"""The supervised stage: next-token loss and MTP loss on worked solutions, or on the assistant's turns of conversations."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from mtpctl.controller.prepare import Prepared
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import Revive, TrainerGroup, TrainerLost, not_revived
from mtpctl.data.problems import PromptCursor
from mtpctl.data.prompts import SftSample, encode_sft
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.session import Telemetry

WINDOW = 10
"""Updates over which the loss is averaged for `until_loss`."""


class SftStage:
    """Runs the updates of `train.sft.steps` that are not done yet. `name`: the section of `train` with its settings.

    Args:
        background: starts the actors of the next stage. If it fails, this stage fails at its next step.
        revive: restarts a lost trainer.
    """

    name: Literal["sft", "draft"] = "sft"

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        trainer: TrainerGroup,
        telemetry: Telemetry,
        state: RunState,
        *,
        background: asyncio.Task[object] | None = None,
        revive: Revive = not_revived,
    ) -> None:
        self.recipe, self.prepared, self.trainer, self.telemetry, self.state = recipe, prepared, trainer, telemetry, state
        self.background, self.revive = background, revive
        self._draw()

    def _draw(self) -> None:
        """Position the cursor at the saved state."""
        self.cursor = PromptCursor(self.prepared.problems.supervised, self.recipe.seed, shuffle=self.recipe.data.shuffle)
        if self.state.cursor is not None:
            self.cursor.load_state_dict(self.state.cursor)

    async def run(self) -> None:
        """Run the updates. If the trainer is lost, those since the newest checkpoint are repeated."""
        while True:
            try:
                return await self._updates()
            except TrainerLost as lost:
                await self.revive(lost, redraw=True)
                self._draw()

    async def _updates(self) -> None:
        """Run updates and checkpoints until all are done, the loss reaches `until_loss`, or a stop is requested."""
        train, bad = self.recipe.train, 0
        stage = train.draft if self.name == "draft" else train.sft
        update = self.trainer.draft_step if self.name == "draft" else self.trainer.sft_step
        while self.state.step < stage.steps and not self.state.stopping.is_set():
            losses = self.state.losses
            if len(losses) == WINDOW and sum(losses) / WINDOW <= train.sft.until_loss:
                self.telemetry.event("sft", f"mean loss {sum(losses) / WINDOW:.3g} after {self.state.step} updates: far enough")
                return
            if self.background is not None and self.background.done():
                self.background.result()
            began = time.perf_counter()
            sequences = [self._sequence() for _ in range(stage.batch_size)]
            self.state.updating = True
            metrics = await update(sequences)
            seconds = time.perf_counter() - began
            bad = check_applied(metrics, bad, self.recipe.train.max_bad_steps)
            if "sft/loss" in metrics and not metrics["skipped"]:
                self.state.losses = [*losses, metrics["sft/loss"]][-WINDOW:]
            self.state.step += 1
            self.state.cursor = self.cursor.state_dict()
            self.state.updating = False
            metrics |= {"timing_s/step": seconds, "perf/tokens_per_s": metrics.pop("perf/tokens") / seconds}
            metrics |= self.state.copy_metrics()
            self.telemetry.log(self.state.step, metrics, self.name)
            await self.state.checkpoint_if_due(self.trainer)

    def _sequence(self) -> SftSample:
        return encode_sft(self.prepared.tokenizer, next(self.cursor), self.recipe.data, self.prepared.tools, self.prepared.ends)


def check_applied(metrics: dict[str, float], bad: int, limit: int) -> int:
    """Count consecutive updates that were skipped because the loss or gradient was not finite.

    An update counts as skipped only if all its optimizer steps were skipped.

    Args:
        bad: the count before this update.

    Returns:
        The new count.

    Raises:
        RuntimeFailure: if the count reaches `limit`.
    """
    if metrics["skipped"] < 1:
        return 0
    if bad + 1 >= limit:
        raise RuntimeFailure(f"trainer: {bad + 1} updates in a row had a loss or gradient that is not finite; lower the learning rate")
    return bad + 1
