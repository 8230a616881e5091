"""An endless, resumable walk over the training problems: a new order each epoch, each given by seed and epoch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mtpctl.data.problems import Problem
from mtpctl.errors import UserError


class PromptCursor:
    """Iterates for ever. Its state is the epoch and the place in it, so resuming repeats and skips nothing."""

    def __init__(self, problems: Sequence[Problem], seed: int, *, shuffle: bool = True) -> None:
        """Raises UserError for an empty set."""
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
        """Problems given out so far, over all epochs: a number that no two draws share."""
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
        """The next `count` problems."""
        return [next(self) for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready place in the walk."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError where seed, order or problems are not those of that walk."""
        for key, field, mine in (
            ("seed", "seed", self._seed),
            ("shuffle", "data.shuffle", self._shuffle),
            ("fingerprint", "data.path", self._fingerprint),
        ):
            if state[key] != mine:
                raise UserError(
                    f"{field}: the run was begun with other training data ({key} {state[key]}, now {mine}); "
                    "restore it or start a new run_dir"
                )
        self._begin(state["epoch"], state["position"])

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for problem in self._problems:
            digest.update(f"{problem.prompt_id}\x00{problem.prompt}\x00{problem.answer}\x01".encode())
        return digest.hexdigest()[:16]
