"""The order in which training problems are drawn: epoch after epoch without end, shuffled by seed and epoch, and resumable."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cached_property
from typing import TypedDict

from mtpctl.data.problems import Problem
from mtpctl.errors import UserError


class CursorState(TypedDict):
    """The place of a cursor, and what its order depends on, as a checkpoint holds them."""

    epoch: int
    position: int
    seed: int
    shuffle: bool
    fingerprint: str


class PromptCursor:
    """Iterates over the problems without end. Its state is the epoch and the position in it: a resumed run repeats and skips none."""

    def __init__(self, problems: Sequence[Problem], seed: int, *, shuffle: bool = True) -> None:
        """Raises UserError where there are no problems."""
        if not problems:
            raise UserError("data.path: the training set is empty; add problems")
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._begin(epoch=0, position=0)

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(len(self._problems)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)

    @property
    def epoch(self) -> int:
        """Epoch of the next problem, from 0."""
        return self._epoch + (self._position == len(self._order))

    @property
    def drawn(self) -> int:
        """How many problems were drawn so far, over all epochs."""
        return self._epoch * len(self._order) + self._position

    def __iter__(self) -> PromptCursor:
        return self

    def __next__(self) -> Problem:
        if self._position == len(self._order):
            self._begin(self._epoch + 1, 0)
        problem = self._problems[self._order[self._position]]
        self._position += 1
        return problem

    def take(self, count: int) -> list[Problem]:
        return [next(self) for _ in range(count)]

    def state_dict(self) -> CursorState:
        """The state for `load_state_dict`, as JSON takes it."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: CursorState) -> None:
        """Continue from `state`. Raises UserError where it is of another seed, order or set of problems."""
        now = self.state_dict()
        for key, field, before, mine in (
            ("seed", "seed", state["seed"], now["seed"]),
            ("shuffle", "data.shuffle", state["shuffle"], now["shuffle"]),
            ("fingerprint", "data.path", state["fingerprint"], now["fingerprint"]),
        ):
            if before != mine:
                raise UserError(
                    f"{field}: the run was begun with other training data ({key} {before}, now {mine}); restore it or start a new run_dir"
                )
        self._begin(state["epoch"], state["position"])

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for problem in self._problems:
            digest.update(f"{problem.prompt_id}\x00{problem.prompt}\x00{problem.answer}\x01".encode())
        return digest.hexdigest()[:16]
