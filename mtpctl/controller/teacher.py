"""A teacher's log-probs of the policy's own tokens, from a log-prob server at a URL (`train.rl.teacher`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import RuntimeFailure, UserError
from mtpctl.recipe.rl import TeacherConfig
from mtpctl.samples import Sample, logprobs_of

if TYPE_CHECKING:
    import httpx

KEY = "MTPCTL_TEACHER_KEY"
"""The environment variable with the key of the teacher's server, where it asks for one."""
_AT_ONCE = 32
_BUSY = (408, 429, 502, 503, 504)


class Teacher:
    """Asks the teacher of each sample. `async with` it; entering it asks for the first time."""

    def __init__(self, config: TeacherConfig, temperature: float) -> None:
        """`temperature`: that of rollout, at which both distributions are compared."""
        self._config, self._temperature = config, temperature
        self._url = config.url.rstrip("/").removesuffix("/v1")

    async def __aenter__(self) -> Teacher:
        """Raises UserError where there is no log-prob server at the URL, or it refuses the key."""
        import httpx

        key = os.environ.get(KEY)
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._config.timeout_s),
            limits=httpx.Limits(max_connections=_AT_ONCE),
        )
        try:
            answer = await self._client.get(f"{self._url}/version")
        except httpx.HTTPError as error:
            await self._client.aclose()
            raise UserError(f"train.rl.teacher.url: nothing answers at {self._url} ({_line(error)}); start mtpctl logprob-serve") from error
        if answer.status_code != 200 or "version" not in answer.text:
            await self._client.aclose()
            why = f"asks for a key: set {KEY}" if answer.status_code == 401 else f"is no log-prob server (status {answer.status_code})"
            raise UserError(f"train.rl.teacher.url: {self._url} {why}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.aclose()

    async def check_tokens(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """Raise UserError where the teacher makes other tokens of these texts: its log-probs would be of other words."""
        for text in texts:
            ids = tokenizer.encode(text, special=True)
            if len(ids) < 2:
                continue
            answer = await self._client.post(f"{self._url}/v1/logprobs", json={"text": text})
            if answer.status_code == 400 and "tokenizer" in answer.text:
                return  # It has none, and takes ids as they are.
            theirs = _data(answer)["token_ids"] if answer.status_code == 200 else None
            if theirs is None or theirs != ids[len(ids) - len(theirs) :]:
                raise UserError(
                    f"train.rl.teacher.url: the teacher has another tokenizer: {text[:40]!r} is {ids[:8]} here and {theirs and theirs[:8]} "
                    "there; take a teacher of the same vocabulary"
                )

    async def __call__(self, sample: Sample) -> None:
        """Fill in the teacher's log-probs of the sample's response. Raises RuntimeFailure where it gives none in time."""
        body = {
            "token_ids": sample.token_ids.tolist(),
            "prompt_length": len(sample.prompt_ids),
            "mask": sample.loss_mask.tolist(),
            "temperature": self._temperature,
            "timeout_s": min(self._config.timeout_s, 600.0),
        }
        try:
            async with asyncio.timeout(self._config.timeout_s):
                answer = await self._asked(body)
        except TimeoutError as error:
            raise RuntimeFailure(
                f"train.rl.teacher.url: {self._url} gave no log-probs of {sample.name} within {self._config.timeout_s:g} s; "
                "give it more replicas, or raise train.rl.teacher.timeout_s"
            ) from error
        if answer.status_code != 200:
            raise RuntimeFailure(f"train.rl.teacher.url: {self._url} refused {sample.name}: {answer.text[:300]}")
        sample.teacher_logprobs = logprobs_of(0.0 if value is None else value for value in _data(answer)["logprobs"])

    async def _asked(self, body: dict[str, object]) -> httpx.Response:
        import httpx

        wait = 0.1
        while True:
            try:
                answer = await self._client.post(f"{self._url}/v1/logprobs", json=body)
                if answer.status_code not in _BUSY:
                    return answer
            except httpx.TransportError:
                pass  # It may be starting again; the caller bounds the time.
            await asyncio.sleep(wait)
            wait = min(2 * wait, 2.0)


def _data(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["data"][0]
    return found


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
