"""The endpoint's HTTP side: each trajectory has a base URL of its own, whose secret part is its key.

POST /t/SECRET/v1/chat/completions   an answer, as OpenAI's clients ask for it
POST /t/SECRET/v1/reward             {"reward": 0.5}: the trajectory's reward
POST /t/SECRET/v1/finish             the trajectory is over; may carry its reward as well
GET  /t/SECRET/v1/models             the name of the model
POST /v1/trajectories                the next problem, for agents that the run did not start, with the key of the endpoint
POST /v1/chat/completions            an answer outside of any trajectory, of which nothing is kept, where `anyone` may ask
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import MtpctlError
from mtpctl.rollout.gateway.answers import Completion
from mtpctl.rollout.gateway.messages import ChatRequest, RequestInvalid
from mtpctl.rollout.gateway.trajectory import Model, Trajectory
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.web.guard import Guard, HttpBounds, error_body
from mtpctl.web.server import address_of, serving

REWARD_HEADER = "mtpctl-reward"
WAIT_S = 30.0
"""Seconds for which a client that asks for a problem waits for one, before it has to ask again."""

NextProblem = Callable[[], Awaitable["Handed | None"]]
Anyone = Callable[[], GenerationRequest]
"""The settings of a request that belongs to no trajectory."""


@dataclass(frozen=True)
class Handed:
    """A problem for an agent that the run did not start. `finished` is set once the agent says that it is done."""

    path: str
    problem: dict[str, object]
    finished: asyncio.Event


class Gateway:
    """Serves trajectories over HTTP. `async with` it: it listens on the socket `bound` in between."""

    def __init__(self, model: Model, tokenizer: Tokenizer, name: str, turns: int, bound: socket.socket, *, key: str | None = None) -> None:
        """`name` is what the model is called; `turns`: the answers of a trajectory, at most; `key`: what asking for problems takes."""
        self._model, self._tokenizer, self._name, self._turns, self._bound = model, tokenizer, name, turns, bound
        self._open: dict[str, Trajectory] = {}
        self._handed: dict[str, Handed] = {}
        self.next_problem: NextProblem | None = None
        self.anyone: Anyone | None = None
        routes = [
            Route("/t/{secret}/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/t/{secret}/v1/reward", self._rewarded, methods=["POST"]),
            Route("/t/{secret}/v1/finish", self._finished, methods=["POST"]),
            Route("/t/{secret}/v1/models", self._models),
            Route("/v1/trajectories", self._handed_out, methods=["POST"]),
            Route("/v1/chat/completions", self._alone, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]
        app = Starlette(routes=routes, exception_handlers={MtpctlError: _refused, HTTPException: _not_found})
        self.app = Guard(app, HttpBounds(), key, open_under="/t/")
        self._serving = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Gateway:
        await self._serving.enter_async_context(serving(self.app, self._bound))
        return self

    async def __aexit__(self, *_: object) -> None:
        for trajectory in self._open.values():
            trajectory.end()
        await self._serving.aclose()

    @property
    def address(self) -> str:
        """`http://HOST:PORT`."""
        return address_of(self._bound)

    def open(self, request: GenerationRequest) -> tuple[str, Trajectory]:
        """Begin a trajectory. Returns its secret, and itself."""
        secret = secrets.token_urlsafe(18)
        trajectory = self._open[secret] = Trajectory(request, self._model, self._turns)
        return secret, trajectory

    def base_url(self, secret: str) -> str:
        """What an OpenAI client of this trajectory takes as its `base_url`."""
        return f"{self.address}/t/{secret}/v1"

    def restart_clock(self, secret: str) -> None:
        """Have a trajectory's time begin now."""
        self._open[secret].restart_clock()

    def close(self, secret: str) -> list[Sample]:
        """End a trajectory. Returns its samples."""
        self._handed.pop(secret, None)
        return self._open.pop(secret).end()

    def hand_out(self, secret: str, problem: dict[str, object]) -> Handed:
        """The trajectory as it is handed to an agent that the run did not start."""
        handed = self._handed[secret] = Handed(f"/t/{secret}/v1", problem, asyncio.Event())
        return handed

    # ------------------------------------------------------------------------------------------------------- routes

    def _trajectory(self, request: Request) -> Trajectory:
        trajectory = self._open.get(request.path_params["secret"])
        if trajectory is None:
            raise RequestInvalid("there is no such trajectory, or it has ended", "trajectory_ended", 410)
        if given := request.headers.get(REWARD_HEADER):
            trajectory.reward = _number(given)
        return trajectory

    async def _completions(self, request: Request) -> Response:
        return await self._answered(self._trajectory(request), _chat(await request.body()))

    async def _alone(self, request: Request) -> Response:
        if self.anyone is None:
            raise RequestInvalid("answers are given within a trajectory; take the base URL of one, from /v1/trajectories")
        asked = _chat(await request.body())
        secret, trajectory = self.open(self.anyone())
        try:
            return await self._answered(trajectory, asked)
        finally:
            self.close(secret)

    async def _answered(self, trajectory: Trajectory, asked: ChatRequest) -> Response:
        answers = await trajectory.answer(asked)
        completion = Completion(asked.model or self._name, answers, self._tokenizer, logprobs=asked.logprobs)
        if not asked.stream:
            return JSONResponse(completion.whole())
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(_as_async(completion.stream(usage=usage)), media_type="text/event-stream")

    async def _rewarded(self, request: Request) -> Response:
        trajectory = self._trajectory(request)
        body = _json(await request.body())
        if "reward" not in body:
            raise RequestInvalid('reward: missing; send {"reward": 0.5}')
        trajectory.reward = _number(body["reward"])
        return JSONResponse({"reward": trajectory.reward})

    async def _finished(self, request: Request) -> Response:
        trajectory, content = self._trajectory(request), await request.body()
        if content and "reward" in (body := _json(content)):
            trajectory.reward = _number(body["reward"])
        if (handed := self._handed.get(request.path_params["secret"])) is not None:
            handed.finished.set()
        return JSONResponse({"finished": True})

    async def _models(self, request: Request) -> Response:
        if "secret" in request.path_params:
            self._trajectory(request)
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "mtpctl"}]})

    async def _handed_out(self, request: Request) -> Response:
        if self.next_problem is None:
            raise RequestInvalid("this run starts its agents itself (rollout.agent); with rollout.gateway: true it hands out problems")
        try:
            handed = await asyncio.wait_for(self.next_problem(), WAIT_S)
        except TimeoutError:
            handed = None
        if handed is None:
            return JSONResponse(error_body("no problem is waiting; ask again", "server_error"), 503, {"retry-after": "1"})
        # Under the address that the client knows: behind a proxy it is another one than ours.
        base = f"{request.url.scheme}://{request.headers.get('host', '')}{handed.path}"
        return JSONResponse({"base_url": base, "problem": handed.problem})

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "trajectories": len(self._open)})


async def _refused(_: Request, error: Exception) -> Response:
    status, code = (error.status, error.code) if isinstance(error, RequestInvalid) else (503, "engine_failed")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": str(error), "type": kind, "code": code}}, status)


async def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)


def _chat(body: bytes) -> ChatRequest:
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise RequestInvalid(f"{place}: {first['msg']}") from error
    except RecursionError as error:
        raise RequestInvalid("body: nested too deeply") from error


def _json(body: bytes) -> dict[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(f"body: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestInvalid("body: must be an object")
    return found


def _number(given: object) -> float:
    try:
        number = float(given) if isinstance(given, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RequestInvalid(f"reward: must be a finite number, got {str(given)[:40]!r}")
    return number


async def _as_async(lines: Iterable[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line
