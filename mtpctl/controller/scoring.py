"""Old log-probs from the log-prob server, while other samples are generated."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_prompt, hinted
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.logprob.protocol import Late, ScoreRequest
from mtpctl.logprob.server import ATTEMPTS, LogprobServer
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.rl import TeacherConfig
from mtpctl.recipe.train import Replay
from mtpctl.samples import Ids, Sample, ids_of, logprobs_of

if TYPE_CHECKING:
    import httpx


class Scoring:
    """The `Score` of the RL stage: one request a sample, answered under the weights that the server has at that time."""

    def __init__(self, server: LogprobServer, temperature: float, deadline_s: float = 600.0, *, replay: Replay = "off") -> None:
        """`deadline_s`: seconds that one answer may take, those in the queue included. `replay`: `train.moe.replay`."""
        self.server, self.temperature, self.deadline_s, self.replay = server, temperature, deadline_s, replay
        self._last = dict.fromkeys(("busy_s", "wait_s", "tokens", "requests", "stall_s"), 0.0)
        self._late, self._unscored = 0, 0

    async def __call__(self, sample: Sample) -> Sample:
        """Fill in the old log-probs of a sample, the weight version that they were computed with, and the routes if they are its.

        After `ATTEMPTS` late answers the sample is returned without: the trainer computes its old log-probs at the update.
        """
        request = ScoreRequest(
            sample.token_ids,
            len(sample.prompt_ids),
            temperature=self.temperature,
            caller="train",
            deadline_s=self.deadline_s,
            routes=sample.routes if self.replay == "rollout" else None,
            record=self.replay == "recompute",
            name=sample.name,
        )
        for _ in range(ATTEMPTS):
            try:
                scored = await self.server.score(request)
            except Late:
                self._late += 1
                continue
            sample.old_logprobs, sample.old_version = scored.logprobs, scored.version
            if request.record and scored.routes is not None:
                # A copy: Ray's array is a view into its object store, and keeps the whole batch's answer there.
                sample.routes = scored.routes.copy()
            return sample
        self._unscored += 1
        return sample

    def metrics(self) -> dict[str, float]:
        """`logprob/*` since the last call; empty where the server had nothing to do."""
        now = {name: float(getattr(self.server.counters, name)) for name in self._last}
        passed = {name: now[name] - before for name, before in self._last.items()}
        self._last = now
        late, unscored = self._late, self._unscored
        self._late = self._unscored = 0
        if not passed["requests"] and not late:
            return {}
        metrics = {
            "timing_s/logprob_server": passed["busy_s"],
            "logprob/tokens_per_s": passed["tokens"] / passed["busy_s"] if passed["busy_s"] else 0.0,
            "logprob/stall_seconds": passed["stall_s"],
            "logprob/late": float(late),
            "logprob/left_to_trainer": float(unscored),
        }
        if passed["requests"]:
            metrics["logprob/wait_seconds"] = passed["wait_s"] / passed["requests"]
        return metrics


# A teacher's log-probs of the policy's own tokens (`train.rl.teacher`), from a log-prob server in the run or at a URL.

KEY = "MTPCTL_TEACHER_KEY"
"""The environment variable with the key of the teacher's server, where it asks for one."""
FIELD = "train.rl.teacher"
_AT_ONCE = 32
_BUSY = (408, 429, 502, 503, 504)


@dataclass(frozen=True)
class Ask:
    """How a teacher is asked: at this temperature, for so many candidates a token, within so many seconds."""

    temperature: float
    topk: int
    timeout_s: float


@dataclass(frozen=True)
class Thought:
    """Log-probs of the response's tokens, 0 where the sample masks them, and of each place's candidates."""

    logprobs: Sequence[float]
    ids: Sequence[Sequence[int]] = ()
    candidates: Sequence[Sequence[float]] = ()


class Source(Protocol):
    """Where a teacher's log-probs come from. `name` is what errors call it."""

    name: str

    async def tokens_of(self, text: str) -> list[int] | None:
        """The teacher's tokens of a text, without the first ones where it has more; None where it has no tokenizer."""

    async def scored(self, sample: Sample, prompt: Ids, ask: Ask) -> Thought:
        """What the teacher thinks of the sample's response behind `prompt`. Raises TimeoutError, RuntimeFailure."""


class ServedInRun:
    """A log-prob server of the run: a teacher's own, or the policy's. `tokenizer`: the model's, None where its folder has none."""

    def __init__(self, server: LogprobServer, name: str, tokenizer: Tokenizer | None) -> None:
        self.server, self.name, self._tokenizer = server, name, tokenizer

    async def tokens_of(self, text: str) -> list[int] | None:
        return None if self._tokenizer is None else self._tokenizer.encode(text, special=True)

    async def scored(self, sample: Sample, prompt: Ids, ask: Ask) -> Thought:
        request = ScoreRequest(
            prompt + sample.response_ids,
            len(prompt),
            mask=sample.loss_mask.tolist(),
            temperature=ask.temperature,
            topk=ask.topk,
            caller="teacher",
            deadline_s=ask.timeout_s,
            name=sample.name,
        )
        try:
            found = await self.server.score(request)
        except Late as late:
            raise TimeoutError from late
        return Thought(found.logprobs, found.topk_ids, found.topk_logprobs)


class ServedAtUrl:
    """A log-prob server at a URL. `async with` it; entering it asks for the first time."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/").removesuffix("/v1")

    async def __aenter__(self) -> ServedAtUrl:
        """Raises UserError where there is no log-prob server at the URL, or it refuses the key."""
        import httpx

        key = os.environ.get(KEY)
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {}, timeout=None, limits=httpx.Limits(max_connections=_AT_ONCE)
        )
        try:
            async with asyncio.timeout(30):
                answer = await self._client.get(f"{self.name}/version")
        except (httpx.HTTPError, TimeoutError) as error:
            await self._client.aclose()
            raise UserError(f"{FIELD}.url: nothing answers at {self.name} ({_line(error)}); start mtpctl logprob-serve") from error
        if (reason := _why_not_logprob_server(answer)) is not None:
            await self._client.aclose()
            raise UserError(f"{FIELD}.url: {self.name} {reason}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.aclose()

    async def tokens_of(self, text: str) -> list[int] | None:
        answer = await self._client.post(f"{self.name}/v1/logprobs", json={"text": text})
        if answer.status_code == 400 and "tokenizer" in answer.text:
            return None
        if answer.status_code != 200:
            raise UserError(f"{FIELD}.url: {self.name} refused {text[:40]!r}: {answer.text[:300]}")
        found: list[int] = _data(answer)["token_ids"]
        return found

    async def scored(self, sample: Sample, prompt: Ids, ask: Ask) -> Thought:
        body = {
            "token_ids": (prompt + sample.response_ids).tolist(),
            "prompt_length": len(prompt),
            "mask": sample.loss_mask.tolist(),
            "temperature": ask.temperature,
            "top_logprobs": ask.topk,
            "timeout_s": min(ask.timeout_s, 600.0),
        }
        async with asyncio.timeout(ask.timeout_s):
            answer = await self._asked(body)
        if answer.status_code != 200:
            raise RuntimeFailure(f"{FIELD}: {self.name} refused {sample.name}: {answer.text[:300]}")
        found = _data(answer)
        logprobs = [0.0 if value is None else value for value in found["logprobs"]]
        rows = found.get("top_logprobs") or ()
        return Thought(logprobs, [[each["id"] for each in row] for row in rows], [[each["logprob"] for each in row] for row in rows])

    async def _asked(self, body: Mapping[str, object]) -> httpx.Response:
        import httpx

        wait = 0.1
        while True:
            try:
                answer = await self._client.post(f"{self.name}/v1/logprobs", json=body)
                if answer.status_code not in _BUSY:
                    return answer
            except httpx.TransportError:
                pass  # It may be starting again; the caller bounds the time.
            await asyncio.sleep(wait)
            wait = min(2 * wait, 2.0)


class Hint:
    """What a teacher reads in place of a problem's prompt. Call it with the problem: it gives the ids."""

    def __init__(self, text: str, tokenizer: Tokenizer, data: DataConfig, tools: Sequence[object]) -> None:
        self._text, self._tokenizer, self._data, self._tools = text, tokenizer, data, tools

    def __call__(self, problem: Problem) -> Ids:
        """Raises UserError where the hint names a column that the row has not."""
        return ids_of(encode_prompt(self._tokenizer, hinted(problem, self._text), self._data, self._tools))


class Teacher:
    """Fills in a teacher's log-probs of samples. `temperature`: that of rollout, at which both distributions are compared."""

    def __init__(self, config: TeacherConfig, source: Source, temperature: float, hint: Hint | None = None) -> None:
        self._config, self._source, self._temperature, self._hint = config, source, temperature, hint

    async def check(self, tokenizer: Tokenizer, problems: Sequence[Problem]) -> None:
        """Raise UserError where the teacher makes other tokens of these prompts, or the hint does not fit them."""
        for problem in problems:
            if self._hint is not None:
                self._hint(problem)
            ids = tokenizer.encode(problem.prompt, special=True)
            if len(ids) < 2:
                continue
            theirs = await self._source.tokens_of(problem.prompt)
            if theirs is not None and (not theirs or theirs != ids[len(ids) - len(theirs) :]):
                raise UserError(
                    f"{FIELD}: {self._source.name} has another tokenizer: {problem.prompt[:40]!r} is {ids[:8]} here and {theirs[:8]} "
                    "there; take a teacher of the same vocabulary"
                )

    async def __call__(self, sample: Sample, problem: Problem) -> None:
        """Fill in the teacher's log-probs of the sample's response. Raises RuntimeFailure where it gives none in time."""
        prompt, timeout_s = sample.prompt_ids if self._hint is None else self._hint(problem), self._config.timeout_s
        try:
            found = await self._source.scored(sample, prompt, Ask(self._temperature, self._config.topk, timeout_s))
        except TimeoutError as error:
            raise RuntimeFailure(
                f"{FIELD}: {self._source.name} gave no log-probs of {sample.name} within {timeout_s:g} s; "
                f"give it more replicas, or raise {FIELD}.timeout_s"
            ) from error
        sample.teacher_logprobs = logprobs_of(found.logprobs)
        if topk := self._config.topk:
            # Places that nobody sampled have none; no loss sees them.
            sample.candidates = ids_of(chain.from_iterable(row or [0] * topk for row in found.ids))
            sample.candidate_logprobs = logprobs_of(chain.from_iterable(row or [0.0] * topk for row in found.candidates))
            if len(sample.candidates) != topk * len(sample.response_ids):
                raise RuntimeFailure(f"{FIELD}.topk: {self._source.name} named other than {topk} candidates a token of {sample.name}")


def _data(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["data"][0]
    return found


def _why_not_logprob_server(answer: httpx.Response) -> str | None:
    """The reason why an answer to `GET /version` is not from a log-prob server, else None. vLLM returns a string there."""
    if answer.status_code == 401:
        return f"requires a key: set {KEY}"
    if answer.status_code != 200:
        return f"is not a log-prob server (status {answer.status_code})"
    try:
        version = answer.json()["version"]
    except (ValueError, KeyError, TypeError):
        return "is not a log-prob server; start mtpctl logprob-serve"
    if isinstance(version, int):
        return None
    return (
        "is an inference engine such as vLLM, not a log-prob server: its prompt log-probs are wrong for some requests if it speculates; "
        "serve the model with mtpctl logprob-serve"
    )


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
