"""What the log-prob server is asked, what it answers, and how it refuses. No torch: callers and the HTTP face import this."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.trainer.scores import DraftScores

COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures between which no model's logits leave fp32 when divided: a pass that fails over one fails for all requests in it, and on
one pipeline stage alone."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Tokens to be scored.

    token_ids: prompt and response; the response, from `prompt_length` on, is what gets log-probs. mask: one entry a response
    token, 0 where none is wanted; None: all of them. topk: how many likeliest tokens to name; mtp: whether the MTP depths
    answer too. version: only these weights; at_least: these or newer ones. caller: callers get equal shares of a full server.
    deadline_s: how long it may wait for its weights and its turn.
    """

    token_ids: list[int]
    prompt_length: int = 1
    mask: list[int] | None = None
    temperature: float = 1.0
    topk: int = 0
    mtp: bool = False
    version: int | None = None
    at_least: int | None = None
    caller: str = ""
    deadline_s: float = 600.0

    @property
    def tokens(self) -> int:
        """Tokens of the forward pass."""
        return len(self.token_ids)

    def allows(self, version: int) -> bool:
        """Whether weights of this version may answer."""
        return (self.version is None or version == self.version) and (self.at_least is None or version >= self.at_least)


@dataclass(slots=True)
class Scored:
    """Per response token, in nats, under the weights `version`: log-prob, entropy of its distribution, and what else was asked.

    Entries outside the mask are 0. topk_ids and topk_logprobs are [tokens, k], likeliest first; drafts: one a depth.
    """

    version: int
    logprobs: list[float]
    entropy: list[float]
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    drafts: list[DraftScores] = field(default_factory=list)


class RequestRefused(UserError):
    """The request itself is wrong; the message names the field and the bound."""


class VersionGone(UserError):
    """The weights that a request pins are no longer held, or never were."""


class QueueFull(RuntimeFailure):
    """The server has as much to do as it may hold. `retry_after_s`: when there should be room."""

    def __init__(self, tokens: int, retry_after_s: float) -> None:
        super().__init__(f"{tokens} tokens are waiting already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class ReplicaDead(RuntimeFailure):
    """A replica's process is gone or does not answer. Its requests go to another one."""


class Late(RuntimeFailure):
    """A request was not answered within its deadline."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a model can take: longest sequence, token ids below `vocab`, and MTP depths it has."""

    positions: int
    vocab: int
    depths: int

    def check(self, request: ScoreRequest) -> None:
        """Raise RequestRefused for a request that no forward pass could serve."""
        ids = request.token_ids
        if len(ids) < 2:
            raise RequestRefused(f"token_ids: {len(ids)} token(s) leave nothing to score; give at least 2")
        if len(ids) > self.positions:
            raise RequestRefused(f"token_ids: {len(ids)} tokens are more than the {self.positions} positions of the model")
        if not 1 <= request.prompt_length < len(ids):
            raise RequestRefused(f"prompt_length: must be 1 to {len(ids) - 1}, got {request.prompt_length}")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab:
            raise RequestRefused(f"token_ids: {low if low < 0 else high} is not a token; ids are 0 to {self.vocab - 1}")
        if request.mask is not None and len(request.mask) != len(ids) - request.prompt_length:
            raise RequestRefused(f"mask: has {len(request.mask)} entries for {len(ids) - request.prompt_length} response tokens")
        if not COLDEST <= request.temperature <= HOTTEST:
            raise RequestRefused(f"temperature: must be {COLDEST:g} to {HOTTEST:g}, got {request.temperature:g}")
        if not 0 <= request.topk <= self.vocab:
            raise RequestRefused(f"topk: must be 0 to {self.vocab}, got {request.topk}")
        if request.mtp and not self.depths:
            raise RequestRefused("mtp: the served model has no MTP layers")
