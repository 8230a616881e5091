"""The supervised stages.

`sft`: next-token loss and MTP loss on worked solutions, or on the assistant's turns of conversations.
`draft`: trains only the drafter, on samples from the rollout engines, which are stored in a file in the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

from mtpctl.controller.prepare import Prepared
from mtpctl.controller.state import RunState
from mtpctl.controller.trainers import RecoverTrainer, TrainerGroup, TrainerLost, no_recovery
from mtpctl.data.problems import PromptCursor
from mtpctl.data.prompts import SftSample, encode_sft
from mtpctl.errors import RuntimeFailure
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.protocol import Generator, create_request
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.telemetry.session import Telemetry

LOSS_WINDOW = 10
"""Updates over which the loss is averaged for `until_loss`."""


class SftStage:
    """Runs the updates of `train.sft.steps` that are not done yet. `name`: the section of `train` with its settings.

    Args:
        startup_task: starts the actors of the next stage. If it fails, this stage fails at its next step.
        recover: restarts a lost trainer.
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
        startup_task: asyncio.Task[object] | None = None,
        recover: RecoverTrainer = no_recovery,
    ) -> None:
        self.recipe, self.prepared, self.trainer, self.telemetry, self.state = recipe, prepared, trainer, telemetry, state
        self.startup_task, self.recover = startup_task, recover
        self._reset_cursor()

    def _reset_cursor(self) -> None:
        """Set the cursor to the saved position."""
        self.cursor = PromptCursor(self.prepared.problems.supervised, self.recipe.seed, shuffle=self.recipe.data.shuffle)
        if self.state.cursor is not None:
            self.cursor.load_state_dict(self.state.cursor)

    async def run(self) -> None:
        """Run the updates. If the trainer is lost, those since the newest checkpoint are repeated."""
        while True:
            try:
                return await self._run_updates()
            except TrainerLost as error:
                await self.recover(error, redraw_prompts=True)
                self._reset_cursor()

    async def _run_updates(self) -> None:
        """Run updates and checkpoints until all are done, the loss reaches `until_loss`, or a stop is requested."""
        train, num_skipped = self.recipe.train, 0
        config = train.draft if self.name == "draft" else train.sft
        update = self.trainer.draft_step if self.name == "draft" else self.trainer.sft_step
        while self.state.step < config.steps and not self.state.stop_requested.is_set():
            losses = self.state.losses
            if len(losses) == LOSS_WINDOW and sum(losses) / LOSS_WINDOW <= train.sft.until_loss:
                self.telemetry.event("sft", f"mean loss {sum(losses) / LOSS_WINDOW:.3g} after {self.state.step} updates: the stage ends")
                return
            if self.startup_task is not None and self.startup_task.done():
                self.startup_task.result()
            started_at = time.perf_counter()
            sequences = [self._next_sequence() for _ in range(config.batch_size)]
            self.state.is_updating = True
            metrics = await update(sequences)
            seconds = time.perf_counter() - started_at
            if "sft/loss" in metrics and not metrics["skipped"]:
                self.state.losses = [*losses, metrics["sft/loss"]][-LOSS_WINDOW:]
            self.state.step += 1
            self.state.cursor = self.cursor.state_dict()
            self.state.is_updating = False
            num_skipped = count_skipped(metrics, num_skipped, train.max_bad_steps)
            metrics |= {"timing_s/step": seconds, "perf/tokens_per_s": metrics.pop("perf/tokens") / seconds}
            metrics |= self.state.checkpoint_copy_metrics()
            self.telemetry.log(self.state.step, metrics, self.name)
            await self.state.checkpoint_if_due(self.trainer)

    def _next_sequence(self) -> SftSample:
        return encode_sft(self.prepared.tokenizer, next(self.cursor), self.recipe.data, self.prepared.tools, self.prepared.end_tokens)


def count_skipped(metrics: dict[str, float], num_skipped: int, limit: int) -> int:
    """The new value of `num_skipped`: updates in a row whose optimizer steps were all skipped, because loss or gradient was not finite.

    Raises RuntimeFailure at `limit`.
    """
    if metrics["skipped"] < 1:
        return 0
    if num_skipped + 1 >= limit:
        cause = "a loss or gradient that is not finite; lower the learning rate"
        if "actor/grad_norm" in metrics:  # It is omitted if it is not finite.
            cause = (
                "a loss or MTP gradient that is not finite, but a finite trunk gradient; check the loss, the teacher and optimizer.mtp_lr"
            )
        raise RuntimeFailure(f"trainer: {num_skipped + 1} updates in a row had {cause}")
    return num_skipped + 1


SAMPLES_FILE = "draft_samples.jsonl"
"""File of the draft stage's samples in the run directory. Each line has the sample's number, prompt ids, response ids and loss mask."""


class DraftStage(SftStage):
    """Generates `train.draft.samples` responses, and runs the updates of `train.draft.steps` on them.

    Args:
        generator: the engines, which have the weights of the model's folder; None if the stage trains on the responses in the rows.
        file: stores the samples. Samples that it already contains are not generated again.
    """

    name = "draft"

    def __init__(self, *args: Any, generator: Generator | None, file: Path, **options: Any) -> None:
        super().__init__(*args, **options)
        self.generator, self.file = generator, file
        self.samples: list[SftSample] = []

    async def run(self) -> None:
        """Generate the missing samples, and run the updates. Raises RuntimeFailure if no response has a token."""
        if self.generator is not None and self.state.step < self.recipe.train.draft.steps:
            _remove_partial_line(self.file)
            samples_by_number = dict(_read_samples(self.file))
            await self._generate(self.generator, samples_by_number)
            # Samples are sorted by number, because short responses finish first.
            self.samples = [samples_by_number[number] for number in sorted(samples_by_number) if samples_by_number[number].target]
            if not self.samples and not self.state.stop_requested.is_set():
                raise RuntimeFailure("train.draft.samples: no response has a token; check the prompts and rollout.max_tokens")
        if not self.state.stop_requested.is_set():
            await super().run()

    def _next_sequence(self) -> SftSample:
        if self.generator is None:
            return super()._next_sequence()
        number = self.cursor.drawn
        next(self.cursor)  # Counts the drawn samples. Checkpoints contain the cursor.
        return self.samples[number % len(self.samples)]

    async def _generate(self, generator: Generator, samples_by_number: dict[int, SftSample]) -> None:
        """Add the missing samples to `samples_by_number` and to the file. Returns early if a stop is requested."""
        recipe, prepared = self.recipe, self.prepared
        missing_numbers = [number for number in range(recipe.train.draft.samples) if number not in samples_by_number]
        if not missing_numbers:
            return
        self.telemetry.event("draft", f"generating {len(missing_numbers):,} samples with the model")
        problems = PromptCursor(prepared.problems.train, recipe.seed, shuffle=recipe.data.shuffle).take(recipe.train.draft.samples)

        async def generate_requests() -> AsyncIterator[GenerationRequest]:
            for number in missing_numbers:
                problem = problems[number]
                sample = Sample(problem.prompt_id, str(number), prepared.prompt_ids(problem, recipe.data), index=number)
                yield create_request(recipe.rollout, sample, context=prepared.context, end_ids=prepared.end_ids, problem=problem)

        with self.file.open("a") as stream:
            async with contextlib.aclosing(generator.generate(generate_requests())) as samples:
                async for sample in samples:
                    sft_sample = SftSample(sample.prompt_ids.tolist(), sample.response_ids.tolist(), sample.loss_mask.tolist())
                    samples_by_number[sample.index] = sft_sample
                    stream.write(json.dumps([sample.index, *sft_sample]) + "\n")
                    if self.state.stop_requested.is_set():
                        return
        tokens = sum(len(sft_sample.target) for sft_sample in samples_by_number.values())
        self.telemetry.event("draft", f"{len(samples_by_number):,} samples, {tokens:,} tokens")


def _remove_partial_line(file: Path) -> None:
    """Remove an incomplete last line, which a killed run leaves. Otherwise the next sample would be appended to it."""
    if file.exists():
        with file.open("r+b") as stream:
            stream.truncate(stream.read().rfind(b"\n") + 1)


def _read_samples(file: Path) -> Iterator[tuple[int, SftSample]]:
    """The numbered samples in a file. Damaged lines are skipped."""
    if file.exists():
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                number, *row = json.loads(line)
                yield number, SftSample(*row)
