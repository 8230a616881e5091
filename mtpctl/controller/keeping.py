"""Which samples of a run are kept to be read: some of each update, each evaluation, and of the groups that were dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mtpctl.controller.buffer import Group
from mtpctl.data.problems import Problem
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.samples import Sample
from mtpctl.telemetry.sample_log import sample_row, spread
from mtpctl.telemetry.session import Telemetry


class Keeper:
    """Passes at most `count` samples of each occasion to the telemetry, as text. With a `count` of 0 it does nothing.

    Decoding so few of the samples costs less than their rewards did; writing is not done here.
    """

    def __init__(self, telemetry: Telemetry, tokenizer: Tokenizer, count: int) -> None:
        self.telemetry, self.tokenizer, self.count = telemetry, tokenizer, count
        self._dropped = (-1, 0)  # step, and how many of its samples were kept

    def updated(self, step: int, groups: Sequence[Group]) -> None:
        """Keep samples that the update `step` was made with."""
        if not self.count:
            return
        problems = {group.group_id: group.problem for group in groups}
        chosen = spread([sample for group in groups for sample in group.samples], self.count)
        decode = self.tokenizer.decode
        rows = [sample_row(each, decode, step=step, kind="update", answer=problems[each.group_id].answer) for each in chosen]
        self.telemetry.samples(rows)

    def evaluated(self, step: int, answers: Mapping[str, Iterable[tuple[Problem, list[Sample]]]]) -> None:
        """Keep answers of an evaluation after the update `step`: of each held-out set, by its name, as many."""
        for name, pairs in answers.items() if self.count else ():
            problems = [(problem, sample) for problem, samples in pairs for sample in samples]
            of = {id(sample): problem for problem, sample in problems}
            chosen = spread([sample for _, sample in problems], self.count)
            decode = self.tokenizer.decode
            rows = [sample_row(s, decode, step=step, kind="eval", answer=of[id(s)].answer, held_out=name) for s in chosen]
            self.telemetry.samples(rows)

    def dropped(self, step: int, group: Group, why: str) -> None:
        """Keep one sample of a group that was left out before the update `step`, up to `count` for each update."""
        before = self._dropped[1] if self._dropped[0] == step else 0
        if before < self.count and group.samples:
            self._dropped = (step, before + 1)
            self.telemetry.samples(
                [sample_row(group.samples[0], self.tokenizer.decode, step=step, kind="dropped", answer=group.problem.answer, note=why)]
            )
