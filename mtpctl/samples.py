"""The sample: a response with all data that is recorded about it until it is trained on.

Each stage of the pipeline sets fields of the same object: rollout sets tokens, behaviour log-probs, version spans, speculation counts and
routes; scoring sets old log-probs and their weight version; the reward function sets the reward and its parts.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mtpctl.routes import Routes, from_json, to_json

Ids = array[int]
"""Token ids, int32."""
Logprobs = array[float]
"""Log-probs in nats, float32."""
Mask = array[int]
"""0 or 1 for each token, int8."""


# Defaults, copied for each sample: creating an array calls Python's audit hooks, and some packages install slow ones.
_NO_IDS, _NO_MASK, _NO_LOGPROBS = array("i"), array("b"), array("f")


def ids_of(values: Iterable[int]) -> Ids:
    return values if isinstance(values, array) and values.typecode == "i" else array("i", values)


def logprobs_of(values: Iterable[float]) -> Logprobs:
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values)


def mask_of(values: Iterable[int]) -> Mask:
    return values if isinstance(values, array) and values.typecode == "b" else array("b", map(int, values))


@dataclass(slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled under weight version `version`.

    `stale_kv`: the request kept the KV cache of an earlier version across a weight sync (`sync.kv: keep`), so the tokens were not sampled
    from the distribution that `version` has after their prefix. The flag remains set if the engine later recomputes the request's cache.
    """

    start: int
    end: int
    version: int
    stale_kv: bool = False

    def __reduce__(self) -> tuple[type[VersionSpan], tuple[int, int, int, bool]]:
        return VersionSpan, (self.start, self.end, self.version, self.stale_kv)

    def to_dict(self) -> dict[str, object]:
        return {"start": self.start, "end": self.end, "version": self.version, "stale_kv": self.stale_kv}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VersionSpan:
        """Inverse of `to_dict`. Unknown fields are ignored."""
        return cls(data["start"], data["end"], data["version"], data["stale_kv"])


@dataclass(slots=True)
class Speculation:
    """Draft tokens proposed and accepted for one sample in `steps` verification steps, in total and by draft position."""

    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    steps: int = 0

    def __reduce__(self) -> tuple[type[Speculation], tuple[int, int, list[int], int]]:
        return Speculation, (self.drafted, self.accepted, self.accepted_by_position, self.steps)


@dataclass(slots=True)
class EnvironmentUse:
    """The environment's calls for one response: `turns` that it answered, and total `seconds`.

    `errors` and `timeouts` count calls that failed or exceeded the response's deadline; `failure` describes the last of them in one line.
    With an agent, `turns` counts the model's answers, and `samples` the samples of the trajectory. `rewritten` counts the samples that
    started because the agent had changed earlier messages.
    """

    turns: int = 0
    seconds: float = 0.0
    errors: int = 0
    timeouts: int = 0
    failure: str = ""
    samples: int = 0
    rewritten: int = 0


@dataclass(slots=True)
class Sample:
    """One response to one prompt. Per-token fields have the length of `response_ids`.

    Per-token fields and `prompt_ids` are Python's `array`s: they behave like lists, take a few bytes per token, and numpy and torch can
    use them without a copy. The constructor accepts any iterable for them.

    Attributes:
        index: of the response in its group.
        loss_mask: 1 for tokens that the policy sampled, 0 for tokens of an environment.
        reward_parts: additional values of the reward function, which are logged.
        spent_s: seconds of work by engines and environments, which count against the deadline.
        environment: None without an environment.
        environment_reward: result of the environment's `reward()`; None without an environment.
        routes: see `mtpctl.routes`; None if not recorded. A token's row is from the forward pass that sampled the next token, so it belongs
            to that token's weight version.
        earlier: if this is the last sample of an agent's trajectory, the previous ones. They get the same reward.
        teacher_logprobs: log-probs of `train.rl.teacher`; None without a teacher.
        candidates: the teacher's k most likely tokens at each response token, as one array of k times the response's length; None if not
            requested.
        candidate_logprobs: the teacher's log-probs of `candidates`.
        cached_tokens: prompt tokens found in the engine's prefix cache; None for an engine without one.
    """

    prompt_id: str
    group_id: str
    prompt_ids: Ids
    index: int = 0
    response_ids: Ids = field(default_factory=lambda: _NO_IDS[:])
    loss_mask: Mask = field(default_factory=lambda: _NO_MASK[:])
    behaviour_logprobs: Logprobs = field(default_factory=lambda: _NO_LOGPROBS[:])
    version_spans: list[VersionSpan] = field(default_factory=list)
    old_logprobs: Logprobs | None = None
    old_version: int | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str | None = None
    speculation: Speculation = field(default_factory=Speculation)
    spent_s: float = 0.0
    environment: EnvironmentUse | None = None
    environment_reward: float | None = None
    routes: Routes | None = field(default=None, compare=False)
    earlier: list[Sample] = field(default_factory=list)
    teacher_logprobs: Logprobs | None = None
    candidates: Ids | None = None
    candidate_logprobs: Logprobs | None = None
    cached_tokens: int | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            prompt_id: str,
            group_id: str,
            prompt_ids: Iterable[int],
            index: int = 0,
            response_ids: Iterable[int] = (),
            loss_mask: Iterable[int] = (),
            behaviour_logprobs: Iterable[float] = (),
            version_spans: list[VersionSpan] = ...,
            old_logprobs: Iterable[float] | None = None,
            old_version: int | None = None,
            reward: float | None = None,
            reward_parts: dict[str, float] = ...,
            finish_reason: str | None = None,
            speculation: Speculation = ...,
            spent_s: float = 0.0,
            environment: EnvironmentUse | None = None,
            environment_reward: float | None = None,
            routes: Routes | None = None,
            earlier: list[Sample] = ...,
            teacher_logprobs: Iterable[float] | None = None,
            candidates: Iterable[int] | None = None,
            candidate_logprobs: Iterable[float] | None = None,
            cached_tokens: int | None = None,
        ) -> None:
            """The dataclass's constructor, with iterables for arrays."""

    def __post_init__(self) -> None:
        self.prompt_ids, self.response_ids = ids_of(self.prompt_ids), ids_of(self.response_ids)
        self.loss_mask, self.behaviour_logprobs = mask_of(self.loss_mask), logprobs_of(self.behaviour_logprobs)
        if self.old_logprobs is not None:
            self.old_logprobs = logprobs_of(self.old_logprobs)
        if self.teacher_logprobs is not None:
            self.teacher_logprobs = logprobs_of(self.teacher_logprobs)
        if self.candidates is not None and self.candidate_logprobs is not None:
            self.candidates, self.candidate_logprobs = ids_of(self.candidates), logprobs_of(self.candidate_logprobs)

    def __reduce__(self) -> tuple[type[Sample], tuple[object, ...]]:
        # Dataclasses with slots are pickled slowly, field by field in Python, and each sample is in several messages.
        return Sample, _fields_of(self)

    @property
    def token_ids(self) -> Ids:
        """The prompt's and the response's tokens."""
        return self.prompt_ids + self.response_ids

    @property
    def trajectory(self) -> list[Sample]:
        """All samples of this trajectory in order; only this one unless an agent created several."""
        return [*self.earlier, self] if self.earlier else [self]

    @property
    def num_sampled(self) -> int:
        """Number of response tokens that the policy sampled, which are in the loss."""
        return self.loss_mask.tobytes().count(1)

    @property
    def length(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def name(self) -> str:
        """The sample's name in messages: the prompt's id and the index of the response."""
        return f"{self.prompt_id}/{self.index}"

    @property
    def num_routed(self) -> int:
        """Number of leading tokens with routes, counted from the start of the prompt."""
        return 0 if self.routes is None else len(self.routes)

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, *, trained: bool = True, stale_kv: bool = False
    ) -> None:
        """Append tokens that were sampled under weight version `version`, or with `trained=False`, tokens of an environment.

        `stale_kv`: see `VersionSpan`. Raises ValueError if the lengths differ.
        """
        if len(token_ids) != len(logprobs):
            raise ValueError(f"got {len(token_ids)} tokens, but {len(logprobs)} log-probs")
        if not len(token_ids):
            return
        start = len(self.response_ids)
        self.response_ids.extend(ids_of(token_ids))
        self.behaviour_logprobs.extend(logprobs_of(logprobs))
        self.loss_mask.frombytes((b"\1" if trained else b"\0") * len(token_ids))
        end = len(self.response_ids)
        last = self.version_spans[-1] if self.version_spans else None
        if last is not None and (last.version, last.stale_kv) == (version, stale_kv):
            last.end = end
        else:
            self.version_spans.append(VersionSpan(start, end, version, stale_kv))

    def add_routes(self, rows: Routes) -> None:
        """Append the routes of the next tokens. Rows for the last token and beyond are dropped."""
        import numpy as np

        routes = rows if self.routes is None else np.concatenate([self.routes, rows])
        self.routes = routes[: max(self.length - 1, 0)]

    def truncate(self, length: int) -> None:
        """Truncate the response to `length` tokens. Call it before scoring: log-probs of the scorer and the teacher are not truncated."""
        del self.response_ids[length:], self.loss_mask[length:], self.behaviour_logprobs[length:]
        self.version_spans = [span for span in self.version_spans if span.start < length]
        if self.version_spans:
            self.version_spans[-1].end = min(self.version_spans[-1].end, length)
        if self.routes is not None:
            self.routes = self.routes[: max(self.length - 1, 0)]

    def copy(self) -> Sample:
        """A copy that shares no array with this sample except the routes, which are never modified in place."""
        copied = Sample(*_fields_of(self))  # much faster than dataclasses.replace, and every request copies samples
        copied.prompt_ids, copied.response_ids = self.prompt_ids[:], self.response_ids[:]
        copied.loss_mask, copied.behaviour_logprobs = self.loss_mask[:], self.behaviour_logprobs[:]
        copied.version_spans = [replace(span) for span in self.version_spans]
        copied.old_logprobs = None if self.old_logprobs is None else self.old_logprobs[:]
        copied.teacher_logprobs = None if self.teacher_logprobs is None else self.teacher_logprobs[:]
        copied.candidates = None if self.candidates is None else self.candidates[:]
        copied.candidate_logprobs = None if self.candidate_logprobs is None else self.candidate_logprobs[:]
        copied.reward_parts = dict(self.reward_parts)
        copied.speculation = replace(self.speculation, accepted_by_position=self.speculation.accepted_by_position[:])
        copied.environment = None if self.environment is None else replace(self.environment)
        copied.earlier = [sample.copy() for sample in self.earlier]
        return copied

    def to_dict(self, *, packed: bool = False) -> dict[str, object]:
        """The sample as JSON, with arrays as lists of numbers or, if `packed`, as base64, which is much faster."""
        plain: dict[str, object] = {name: _plain(getattr(self, name), packed) for name in _JSON_FIELDS}
        if self.routes is not None:
            plain["routes"] = to_json(self.routes)
        if self.earlier:
            plain["earlier"] = [sample.to_dict(packed=packed) for sample in self.earlier]
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Inverse of `to_dict`. Unknown fields are ignored, so that adding a field does not change the format of checkpoints."""
        values: dict[str, Any] = {column.name: _unpacked(data[column.name]) for column in fields(cls) if column.name in data}
        values["version_spans"] = [VersionSpan.from_dict(span) for span in data["version_spans"]]
        values["speculation"] = Speculation(**data["speculation"])
        values["earlier"] = [cls.from_dict(sample) for sample in data.get("earlier", ())]
        if values.get("environment") is not None:
            values["environment"] = EnvironmentUse(**values["environment"])
        if values.get("routes") is not None:
            values["routes"] = from_json(values["routes"])
        return cls(**values)


_fields_of: Callable[[Sample], tuple[Any, ...]] = attrgetter(*(each.name for each in fields(Sample)))
_JSON_FIELDS = tuple(each.name for each in fields(Sample) if each.name not in ("routes", "earlier"))


def _plain(value: object, packed: bool) -> object:
    """A field's value as JSON."""
    if isinstance(value, array):
        # In native byte order: all supported machines are little-endian.
        return {"array": value.typecode, "data": base64.b64encode(value).decode()} if packed else value.tolist()
    if isinstance(value, list):
        return [item.to_dict() for item in value]
    if isinstance(value, dict):
        return dict(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _unpacked(value: object) -> object:
    """A field's value from JSON. Packed values become arrays."""
    if not isinstance(value, Mapping) or "array" not in value:
        return value
    return array(value["array"], base64.b64decode(value["data"], validate=True))


def response_limit(sample: Sample, *, max_tokens: int, context: int) -> int:
    """The maximum length of the response: `max_tokens`, or the rest of the context after the prompt if that is less."""
    return min(max_tokens, context - len(sample.prompt_ids))


@dataclass(frozen=True, slots=True)
class ExtraSampling:
    """Additional sampling parameters of served requests, as in vLLM. Training objectives do not support them.

    `logit_bias`: by token id. `allowed_token_ids`: None for all. `grammar`: keyword arguments of vLLM's `StructuredOutputsParams`; empty
    for free text.
    """

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    bad_words: list[str] = field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    grammar: Mapping[str, object] = field(default_factory=dict)

    @property
    def changed(self) -> list[str]:
        """The names of the settings that differ from their defaults."""
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(_DEFAULT_EXTRA_SAMPLING, each.name)]


_DEFAULT_EXTRA_SAMPLING = ExtraSampling()


class Unwanted(asyncio.Event):
    """An event that is set when responses are no longer needed. callbacks: called when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: set[Callable[[], None]] = set()

    def set(self) -> None:
        super().set()
        for callback in list(self.callbacks):
            callback()


async def finished_before_unwanted(work: asyncio.Future[Any], unwanted: Unwanted) -> bool:
    """Wait until `work` is done or `unwanted` is set, which cancels `work`. Returns whether `work` is done.

    Unlike `mtpctl.cluster.deadlines.finished_before`, this creates no task per response, because many responses wait for one event.
    """
    either: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object = None) -> None:
        if not either.done():
            either.set_result(None)

    work.add_done_callback(wake)
    unwanted.callbacks.add(wake)
    if unwanted.is_set():
        wake()
    try:
        await either
        return work.done()
    finally:
        work.remove_done_callback(wake)
        unwanted.callbacks.discard(wake)
        work.cancel()


@dataclass(slots=True)
class GenerationRequest:
    """A request for one response.

    Attributes:
        sample: tokens are appended to it. It is new or a partial rollout.
        max_tokens: maximum length of the whole response, including existing tokens.
        seed: makes sampling reproducible.
        deadline_s: maximum seconds that engines and environments may work on the response. In a request to a pool it is the total; in a
            request to an engine, what remains of it. Waiting for a free slot does not count.
        unwanted: set when the response is no longer needed. Generation is then cancelled, and the sample is returned without new tokens.
        problem: the input of the environment; not sent to engines.
        extra_sampling: set only for served requests, which are not trained on.
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
    unwanted: Unwanted | None = None
    problem: object = None
    extra_sampling: ExtraSampling | None = None

    def attempt(self) -> GenerationRequest:
        """The request to an engine for a copy of the sample, without the fields that only a pool uses."""
        attempt = GenerationRequest(*_request_fields_of(self))
        attempt.sample, attempt.unwanted, attempt.problem = self.sample.copy(), None, None
        attempt.deadline_s = max(self.deadline_s - self.sample.spent_s, 0.0)
        return attempt


_request_fields_of: Callable[[GenerationRequest], tuple[Any, ...]] = attrgetter(*(each.name for each in fields(GenerationRequest)))
