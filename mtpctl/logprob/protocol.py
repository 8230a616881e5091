"""Requests, answers and errors of the log-prob server, without torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.routes import Routes, RouteShape
from mtpctl.samples import Logprobs
from mtpctl.trainer.config import DraftScores

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Range of temperatures for which scaled logits stay within fp32. An overflow fails the batch, and only on one pipeline stage."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Tokens to score.

    Args:
        token_ids: prompt and response. The response, from `prompt_length` on, gets log-probs.
        mask: one entry per response token, 0 for no log-prob; None: all tokens.
        topk: most likely tokens to return per position.
        mtp: also return log-probs of the MTP depths.
        version: score only with this weight version.
        at_least: score with this version or a newer one.
        caller: callers get equal shares of a full server.
        deadline_s: seconds within which the answer must arrive, including the waits for the weights and in the queue.
        routes: experts to use for the first tokens (`mtpctl.routes`); the model chooses those of the other tokens.
        record: return the experts that the pass used.
        name: name in errors.
    """

    token_ids: Sequence[int]
    prompt_length: int = 1
    mask: list[int] | None = None
    temperature: float = 1.0
    topk: int = 0
    mtp: bool = False
    version: int | None = None
    at_least: int | None = None
    caller: str = ""
    deadline_s: float = 600.0
    routes: Routes | None = field(default=None, compare=False)
    record: bool = False
    name: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass."""
        return len(self.token_ids)

    def allows(self, version: int) -> bool:
        """Whether this weight version may be used."""
        return (self.version is None or version == self.version) and (self.at_least is None or version >= self.at_least)


@dataclass(slots=True)
class Scored:
    """Log-prob and entropy of each response token (nats) under weight version `version`, and further requested values.

    Entries outside the mask are 0. topk_ids and topk_logprobs are [tokens, k], most likely first; drafts has one entry per depth.
    """

    version: int
    logprobs: Logprobs
    entropy: Logprobs
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    drafts: list[DraftScores] = field(default_factory=list)
    routes: Routes | None = field(default=None, compare=False)


class RequestRefused(UserError):
    """The request is invalid. The message names the field and the limit."""


class VersionGone(UserError):
    """The requested weight version is no longer available, or contradicts `at_least`."""


class QueueFull(RuntimeFailure):
    """The queue is full. `retry_after_s`: estimated seconds until there is room."""

    def __init__(self, tokens: int, retry_after_s: float) -> None:
        super().__init__(f"{tokens} tokens are waiting already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class ReplicaDead(RuntimeFailure):
    """A replica died or does not answer. Its requests go to another one."""


class DeadlineExceeded(RuntimeFailure):
    """A request was not answered within its deadline."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a model: maximum sequence length, vocabulary size, number of MTP depths, and the shape of routes if it has experts."""

    positions: int
    vocab: int
    depths: int
    routes: RouteShape | None = None

    def check(self, request: ScoreRequest) -> None:
        """Raise RequestRefused for a request that the model cannot score."""
        ids = request.token_ids
        if len(ids) < 2:
            raise RequestRefused(f"token_ids: {len(ids)} token(s) leave nothing to score; give at least 2")
        if len(ids) > self.positions:
            raise RequestRefused(f"token_ids: {len(ids)} tokens are more than the {self.positions} positions of the model")
        if not 1 <= request.prompt_length < len(ids):
            raise RequestRefused(f"prompt_length: must be 1 to {len(ids) - 1}, got {request.prompt_length}")
        lowest, highest = _min_max(ids)
        if lowest < 0 or highest >= self.vocab:
            raise RequestRefused(f"token_ids: {lowest if lowest < 0 else highest} is not a token; ids are 0 to {self.vocab - 1}")
        if request.mask is not None and len(request.mask) != len(ids) - request.prompt_length:
            raise RequestRefused(f"mask: has {len(request.mask)} entries for {len(ids) - request.prompt_length} response tokens")
        if not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:
            raise RequestRefused(f"temperature: must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, got {request.temperature:g}")
        if not 0 <= request.topk <= self.vocab:
            raise RequestRefused(f"topk: must be 0 to {self.vocab}, got {request.topk}")
        if request.mtp and not self.depths:
            raise RequestRefused("mtp: the served model has no MTP layers")
        if request.routes is None and not request.record:
            return
        if self.routes is None:
            raise RequestRefused("routes: the served model has no experts to route to")
        if request.routes is not None and (error := self.routes.fault(request.routes, len(ids))):
            raise RequestRefused(f"routes: {f'sample {request.name}: ' if request.name else ''}{error}")


def _min_max(ids: Sequence[int]) -> tuple[int, int]:
    if not isinstance(ids, array):
        return min(ids), max(ids)
    values = np.asarray(ids)
    return int(values.min()), int(values.max())
