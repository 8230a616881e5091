"""What the engine is asked for when it scores a sequence, and what it answers. Needs no torch, so that the log-prob server shares it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpctl.routes import Routes
from mtpctl.samples import Logprobs


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What one sequence is scored for. topk: how many of the likeliest tokens to name; mtp: whether to score the MTP depths as well."""

    temperature: float = 1.0
    topk: int = 0
    mtp: bool = False


@dataclass(slots=True)
class DraftScores:
    """One MTP depth over the response: the log-prob of each token, and whether the depth would have drafted it greedily.

    None where no drafter can be asked: the first tokens of each turn, up to the depth, and tokens outside the mask.
    """

    logprobs: list[float | None]
    hits: list[bool | None]


@dataclass(slots=True)
class TokenScores:
    """One sequence, an entry for each response token: its log-prob, and the entropy of the distribution it was drawn from (nats).

    topk_ids and topk_logprobs are [tokens, k], likeliest first; drafts: one a depth. All three are empty where not asked for. routes: those
    that the pass took; None where not asked for.
    """

    logprobs: Logprobs
    entropy: Logprobs
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    drafts: list[DraftScores] = field(default_factory=list)
    routes: Routes | None = None
