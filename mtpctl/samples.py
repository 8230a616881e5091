"""What makes the whole way from prompt to optimizer: one sample, growing by whole fields.

Nobody repacks a sample. Rollout fills tokens, behaviour log-probs, version spans and speculation counts; scoring adds
old log-probs and entropy with the version that made them; the checker adds the reward.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled under weight version `version`."""

    start: int
    end: int
    version: int


@dataclass(slots=True)
class Speculation:
    """Draft tokens proposed and accepted while one sample was generated, in all and by draft position."""

    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    steps: int = 0


@dataclass(slots=True)
class Sample:
    """One response to one prompt. Per-token lists run over the response and have the length of `response_ids`.

    `spent_s`: seconds of its deadline that are used up, in places of engines and in environments.
    """

    prompt_id: str
    group_id: str
    prompt_ids: list[int]
    index: int = 0
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    behaviour_logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    old_logprobs: list[float] | None = None
    old_entropy: list[float] | None = None
    old_version: int | None = None
    reward: float | None = None
    finish_reason: str | None = None
    speculation: Speculation = field(default_factory=Speculation)
    spent_s: float = 0.0

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    def append(self, token_ids: list[int], logprobs: list[float], version: int, *, trained: bool = True) -> None:
        """Add sampled tokens, or with `trained=False` tokens of the environment, which no loss sees.

        Raises ValueError where the lengths differ.
        """
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens came with {len(logprobs)} log-probs")
        if not token_ids:
            return
        start = len(self.response_ids)
        self.response_ids += token_ids
        self.behaviour_logprobs += logprobs
        self.loss_mask += [int(trained)] * len(token_ids)
        end = len(self.response_ids)
        if self.version_spans and self.version_spans[-1].version == version:
            self.version_spans[-1].end = end
        else:
            self.version_spans.append(VersionSpan(start, end, version))

    def cut(self, length: int) -> None:
        """Drop response tokens from `length` on, with all that belongs to them; what was speculated stays counted."""
        del self.response_ids[length:], self.loss_mask[length:], self.behaviour_logprobs[length:]
        self.version_spans = [span for span in self.version_spans if span.start < length]
        if self.version_spans:
            self.version_spans[-1].end = min(self.version_spans[-1].end, length)

    def copy(self) -> Sample:
        """One that grows by itself: the two share no list."""
        own: dict[str, Any] = {each.name: value[:] for each in fields(self) if isinstance(value := getattr(self, each.name), list)}
        own["version_spans"] = [replace(span) for span in self.version_spans]
        own["speculation"] = replace(self.speculation, accepted_by_position=self.speculation.accepted_by_position[:])
        return replace(self, **own)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`."""
        spans = [VersionSpan(**span) for span in data["version_spans"]]
        return cls(**{**data, "version_spans": spans, "speculation": Speculation(**data["speculation"])})


def response_limit(sample: Sample, *, max_tokens: int, context: int) -> int:
    """Tokens that the response may have: `max_tokens`, or what its prompt leaves of the context where that is less."""
    return min(max_tokens, context - len(sample.prompt_ids))


@dataclass(slots=True)
class GenerationRequest:
    """One response wanted.

    `sample` is where tokens are appended: new and empty, or a partial rollout to be continued. `max_tokens` bounds the
    whole response, tokens already there included. `seed` makes sampling repeatable. `deadline_s` bounds the time in which the response
    is worked on: of a pool all of it, of an engine what is left. Waiting for a place counts with neither. `unwanted` is set once nobody
    wants the response any more: it is given up, and its sample comes back as it was asked for.
    """

    sample: Sample
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    deadline_s: float = 600.0
    unwanted: asyncio.Event | None = None
