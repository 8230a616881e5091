"""Log-probs of sampled responses, computed while others are generated: old log-probs of the policy, and log-probs of a teacher.

A teacher (`train.rl.teacher`) is a log-prob server of the run or at a URL. It scores the policy's own tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_prompt, with_hint
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.logprob.protocol import DeadlineExceeded, ScoreRequest
from mtpctl.logprob.server import ATTEMPTS, LogprobServer
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.rl import TeacherConfig
from mtpctl.recipe.train import Replay
from mtpctl.samples import Ids, Sample, ids_of, logprobs_of

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE = "MTPCTL_TEACHER_KEY"
"""Environment variable with the API key of the teacher's server, if it requires one."""
TEACHER_KEY = "train.rl.teacher"
_MAX_CONNECTIONS = 32
_CHECK_TIMEOUT_S = 30.0
_RETRYABLE = (408, 429, 502, 503, 504)


class OldLogprobScorer:
    """Scores samples for the RL stage: sends one request per sample, which the server answers with its current weights."""

    def __init__(self, server: LogprobServer, temperature: float, deadline_s: float = 600.0, *, replay: Replay = "off") -> None:
        """`deadline_s`: time limit of one answer in seconds, queueing included. `replay`: `train.moe.replay`."""
        self.server, self.temperature, self.deadline_s, self.replay = server, temperature, deadline_s, replay
        self._last_totals = dict.fromkeys(("busy_s", "wait_s", "tokens", "requests", "stall_s"), 0.0)
        self._late_count, self._unscored_count = 0, 0

    async def __call__(self, sample: Sample) -> Sample:
        """Fill in a sample's old log-probs, and the weight version that computed them. With `replay: recompute`, also its expert routes.

        If `ATTEMPTS` requests exceed their deadline, the sample is returned unscored: the trainer computes its old log-probs at the update.
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
                scores = await self.server.score(request)
            except DeadlineExceeded:
                self._late_count += 1
                continue
            sample.old_logprobs, sample.old_version = scores.logprobs, scores.version
            if request.record and scores.routes is not None:
                # Ray's array is a view that would keep the whole batch's answer in the object store.
                sample.routes = scores.routes.copy()
            return sample
        self._unscored_count += 1
        return sample

    def metrics(self) -> dict[str, float]:
        """`logprob/*` and `timing_s/logprob_server` since the last call; empty if the server answered no request and none was late."""
        totals = {name: float(getattr(self.server.counters, name)) for name in self._last_totals}
        differences = {name: totals[name] - last_total for name, last_total in self._last_totals.items()}
        self._last_totals = totals
        late_count, unscored_count = self._late_count, self._unscored_count
        self._late_count = self._unscored_count = 0
        if not differences["requests"] and not late_count:
            return {}
        metrics = {
            "timing_s/logprob_server": differences["busy_s"],
            "logprob/tokens_per_s": differences["tokens"] / differences["busy_s"] if differences["busy_s"] else 0.0,
            "logprob/stall_seconds": differences["stall_s"],
            "logprob/late": float(late_count),
            "logprob/left_to_trainer": float(unscored_count),
        }
        if differences["requests"]:
            metrics["logprob/wait_seconds"] = differences["wait_s"] / differences["requests"]
        return metrics


@dataclass(frozen=True)
class TeacherOptions:
    """Options of a request: temperature, number of candidates per token, and time limit in seconds."""

    temperature: float
    topk: int
    timeout_s: float


@dataclass(frozen=True)
class TeacherScores:
    """Log-probs of the response's tokens (0 for masked ones), and the candidates of each position with their log-probs."""

    logprobs: Sequence[float]
    candidate_ids: Sequence[Sequence[int]] = ()
    candidate_logprobs: Sequence[Sequence[float]] = ()


class TeacherSource(Protocol):
    """A source of a teacher's log-probs. `name` identifies it in error messages."""

    name: str

    async def tokenize(self, text: str) -> list[int] | None:
        """The teacher's token ids of a text, perhaps without a start token; None if it has no tokenizer."""

    async def score(self, sample: Sample, prompt: Ids, options: TeacherOptions) -> TeacherScores:
        """Score the sample's response after `prompt`. Raises TimeoutError, RuntimeFailure."""


class LocalSource:
    """A log-prob server of the run, for a teacher or the policy. `tokenizer`: if None, tokens are not compared with the policy's."""

    def __init__(self, server: LogprobServer, name: str, tokenizer: Tokenizer | None) -> None:
        self.server, self.name, self._tokenizer = server, name, tokenizer

    async def tokenize(self, text: str) -> list[int] | None:
        return None if self._tokenizer is None else self._tokenizer.encode(text, special=True)

    async def score(self, sample: Sample, prompt: Ids, options: TeacherOptions) -> TeacherScores:
        request = ScoreRequest(
            prompt + sample.response_ids,
            len(prompt),
            mask=sample.loss_mask.tolist(),
            temperature=options.temperature,
            topk=options.topk,
            caller="teacher",
            deadline_s=options.timeout_s,
            name=sample.name,
        )
        try:
            scores = await self.server.score(request)
        except DeadlineExceeded as error:
            raise TimeoutError from error
        return TeacherScores(scores.logprobs, scores.topk_ids, scores.topk_logprobs)


class RemoteSource:
    """A log-prob server at a URL, as an async context manager."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/").removesuffix("/v1")

    async def __aenter__(self) -> RemoteSource:
        """Connect. Raises UserError if there is no log-prob server at the URL, or it rejects the key."""
        import httpx

        key = os.environ.get(KEY_VARIABLE)
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {}, timeout=None, limits=httpx.Limits(max_connections=_MAX_CONNECTIONS)
        )
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                response = await self._client.get(f"{self.name}/version")
        except (httpx.HTTPError, TimeoutError) as error:
            await self._client.aclose()
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{TEACHER_KEY}.url: nothing answers at {self.name} ({cause}); start mtpctl logprob-serve") from error
        if (reason := _server_mismatch(response)) is not None:
            await self._client.aclose()
            raise UserError(f"{TEACHER_KEY}.url: {self.name} {reason}")
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self._client.aclose()

    async def tokenize(self, text: str) -> list[int] | None:
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                response = await self._post({"text": text})
        except TimeoutError as error:
            raise UserError(f"{TEACHER_KEY}.url: {self.name} returned no tokens within {_CHECK_TIMEOUT_S:g} s") from error
        if response.status_code == 400 and "tokenizer" in response.text:
            return None
        if response.status_code != 200:
            raise UserError(f"{TEACHER_KEY}.url: {self.name} refused {text[:40]!r}: {response.text[:300]}")
        ids: list[int] = _first_item(response)["token_ids"]
        return ids

    async def score(self, sample: Sample, prompt: Ids, options: TeacherOptions) -> TeacherScores:
        body = {
            "token_ids": (prompt + sample.response_ids).tolist(),
            "prompt_length": len(prompt),
            "mask": sample.loss_mask.tolist(),
            "temperature": options.temperature,
            "top_logprobs": options.topk,
            "timeout_s": min(options.timeout_s, 600.0),
        }
        async with asyncio.timeout(options.timeout_s):
            response = await self._post(body)
        if response.status_code != 200:
            raise RuntimeFailure(f"{TEACHER_KEY}: {self.name} refused {sample.name}: {response.text[:300]}")
        data = _first_item(response)
        logprobs = [0.0 if value is None else value for value in data["logprobs"]]
        candidate_rows = data.get("top_logprobs") or ()
        candidate_ids, candidate_logprobs = ([[token[key] for token in row] for row in candidate_rows] for key in ("id", "logprob"))
        return TeacherScores(logprobs, candidate_ids, candidate_logprobs)

    async def _post(self, body: Mapping[str, object]) -> httpx.Response:
        """Post a request, and retry while the server is busy or down. The caller bounds the time."""
        import httpx

        delay = 0.1
        while True:
            try:
                response = await self._client.post(f"{self.name}/v1/logprobs", json=body)
                if response.status_code not in _RETRYABLE:
                    return response
            except httpx.TransportError:
                pass  # The server may be restarting.
            await asyncio.sleep(delay)
            delay = min(2 * delay, 2.0)


class HintRenderer:
    """Renders the teacher's prompt, which contains the hint."""

    def __init__(self, text: str, tokenizer: Tokenizer, data: DataConfig, tools: Sequence[object]) -> None:
        self._text, self._tokenizer, self._data, self._tools = text, tokenizer, data, tools

    def __call__(self, problem: Problem) -> Ids:
        """The prompt's token ids. Raises UserError if the hint names a column that the row does not have."""
        return ids_of(encode_prompt(self._tokenizer, with_hint(problem, self._text), self._data, self._tools))


class Teacher:
    """Fills in a teacher's log-probs of samples. `temperature`: the rollout temperature, at which both distributions are compared."""

    def __init__(self, config: TeacherConfig, source: TeacherSource, temperature: float, render_prompt: HintRenderer | None = None) -> None:
        self._config, self._source, self._temperature, self._render_hinted_prompt = config, source, temperature, render_prompt

    async def check(self, tokenizer: Tokenizer, problems: Sequence[Problem]) -> None:
        """Raise UserError if the teacher tokenizes these prompts differently, or the hint does not fit them."""
        for problem in problems:
            if self._render_hinted_prompt is not None:
                self._render_hinted_prompt(problem)
            ids = tokenizer.encode(problem.prompt, special=True)
            if len(ids) < 2:
                continue
            teacher_ids = await self._source.tokenize(problem.prompt)
            if teacher_ids is not None and (not teacher_ids or teacher_ids != ids[len(ids) - len(teacher_ids) :]):
                raise UserError(
                    f"{TEACHER_KEY}: {self._source.name} has another tokenizer: {problem.prompt[:40]!r} is {ids[:8]} for the policy and "
                    f"{teacher_ids[:8]} for the teacher; use a teacher with the same vocabulary"
                )

    async def __call__(self, sample: Sample, problem: Problem) -> None:
        """Fill in the teacher's log-probs of the sample's response. Raises RuntimeFailure if it does not answer in time."""
        prompt = sample.prompt_ids if self._render_hinted_prompt is None else self._render_hinted_prompt(problem)
        timeout_s = self._config.timeout_s
        try:
            scores = await self._source.score(sample, prompt, TeacherOptions(self._temperature, self._config.topk, timeout_s))
        except TimeoutError as error:
            raise RuntimeFailure(
                f"{TEACHER_KEY}: {self._source.name} returned no log-probs of {sample.name} within {timeout_s:g} s; "
                f"add replicas, or raise {TEACHER_KEY}.timeout_s"
            ) from error
        sample.teacher_logprobs = logprobs_of(scores.logprobs)
        if topk := self._config.topk:
            # Tokens that were not sampled have no candidates; the loss masks them.
            sample.candidates = ids_of(chain.from_iterable(row or [0] * topk for row in scores.candidate_ids))
            sample.candidate_logprobs = logprobs_of(chain.from_iterable(row or [0.0] * topk for row in scores.candidate_logprobs))
            if len(sample.candidates) != topk * len(sample.response_ids):
                raise RuntimeFailure(f"{TEACHER_KEY}.topk: {self._source.name} did not return {topk} candidates per token of {sample.name}")


def _first_item(response: httpx.Response) -> dict[str, Any]:
    data: dict[str, Any] = response.json()["data"][0]
    return data


def _server_mismatch(response: httpx.Response) -> str | None:
    """Why the server that sent a response to `GET /version` cannot be used; None if it can. vLLM returns a version string."""
    if response.status_code == 401:
        return f"requires a key: set {KEY_VARIABLE}"
    if response.status_code != 200:
        return f"is not a log-prob server (status {response.status_code})"
    try:
        version = response.json()["version"]
    except (ValueError, KeyError, TypeError):
        return "is not a log-prob server; start mtpctl logprob-serve"
    if isinstance(version, int):
        return None
    return (
        "is an inference engine such as vLLM, not a log-prob server: with speculation, its prompt log-probs are wrong for some requests; "
        "serve the model with mtpctl logprob-serve"
    )
