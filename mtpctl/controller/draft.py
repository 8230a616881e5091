"""The stage that trains only the drafter, on samples that the model itself generates.

training prompts ──► rollout engines ──► samples (a file in the run directory) ──► updates of the drafter
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from mtpctl.controller.sft import SftStage
from mtpctl.data.problems import PromptCursor
from mtpctl.data.prompts import SftSample
from mtpctl.errors import RuntimeFailure
from mtpctl.rollout.protocol import Generator, request_for
from mtpctl.samples import GenerationRequest, Sample

SAMPLES = "draft_samples.jsonl"
"""File of this stage's samples in the run directory. Each line has the sample's number, prompt ids, response ids and loss mask."""


class DraftStage(SftStage):
    """Generates `train.draft.samples` responses, and runs the updates of `train.draft.steps` on them.

    Args:
        generator: the engines, which have the weights of the model's folder; None if the stage trains on the responses of rows.
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
            _drop_cut_line(self.file)
            stored = dict(_stored(self.file))
            await self._generate(self.generator, stored)
            # By number, because short responses finish first.
            self.samples = [stored[number] for number in sorted(stored) if stored[number].target]
            if not self.samples and not self.state.stopping.is_set():
                raise RuntimeFailure("train.draft.samples: no response has a token; check the prompts and rollout.max_tokens")
        if not self.state.stopping.is_set():
            await super().run()

    def _sequence(self) -> SftSample:
        if self.generator is None:
            return super()._sequence()
        number = self.cursor.drawn
        next(self.cursor)  # Counts the drawn samples. Checkpoints contain the cursor.
        return self.samples[number % len(self.samples)]

    async def _generate(self, generator: Generator, stored: dict[int, SftSample]) -> None:
        """Add the missing samples to `stored` and to the file. Returns early if a stop is requested."""
        recipe, prepared = self.recipe, self.prepared
        missing = [number for number in range(recipe.train.draft.samples) if number not in stored]
        if not missing:
            return
        self.telemetry.event("draft", f"generating {len(missing):,} samples with the model")
        problems = PromptCursor(prepared.problems.train, recipe.seed, shuffle=recipe.data.shuffle).take(recipe.train.draft.samples)

        async def requests() -> AsyncIterator[GenerationRequest]:
            for number in missing:
                problem = problems[number]
                sample = Sample(problem.prompt_id, str(number), prepared.prompt_ids(problem, recipe.data), index=number)
                yield request_for(recipe.rollout, sample, context=prepared.context, end_ids=prepared.end_ids, problem=problem)

        with self.file.open("a") as stream:
            async with contextlib.aclosing(generator.generate(requests())) as samples:
                async for sample in samples:
                    row = SftSample(sample.prompt_ids.tolist(), sample.response_ids.tolist(), sample.loss_mask.tolist())
                    stored[sample.index] = row
                    stream.write(json.dumps([sample.index, *row]) + "\n")
                    if self.state.stopping.is_set():
                        return
        self.telemetry.event("draft", f"{len(stored):,} samples, {sum(len(row.target) for row in stored.values()):,} tokens")


def _drop_cut_line(file: Path) -> None:
    """Remove an incomplete last line, which a killed run leaves. Otherwise the next sample would be appended to it."""
    if file.exists():
        with file.open("r+b") as stream:
            stream.truncate(stream.read().rfind(b"\n") + 1)


def _stored(file: Path) -> Iterator[tuple[int, SftSample]]:
    """The numbered samples in a file. Damaged lines are skipped."""
    if file.exists():
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                number, *row = json.loads(line)
                yield number, SftSample(*row)
