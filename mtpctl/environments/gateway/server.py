"""The endpoint's HTTP routes. Each trajectory has its own base URL, whose secret part is its key.

POST /t/SECRET/v1/chat/completions   a chat completion
POST /t/SECRET/v1/reward             {"reward": 0.5}: the trajectory's reward
POST /t/SECRET/v1/finish             ends the trajectory; may contain its reward
GET  /t/SECRET/v1/models             the name of the model; also GET /v1/models
POST /v1/trajectories                the next problem, for external agents; always requires the endpoint's key
POST /v1/chat/completions            a chat completion outside of any trajectory, if `single_requests` is set
GET  /health                         status, and the number of open trajectories
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mtpctl.data.tokenizers import Tokenizer
from mtpctl.environments.gateway.answers import Completion
from mtpctl.environments.gateway.fields import FieldRules, RequestInvalid
from mtpctl.environments.gateway.messages import ChatRequest
from mtpctl.environments.gateway.trajectory import REJECT, Model, Trajectory
from mtpctl.errors import MtpctlError
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.web.guard import Guard, HttpBounds, error_body, http_error
from mtpctl.web.json_body import BodyInvalid, check_text, parse_object, shown
from mtpctl.web.server import address_of, serving

REWARD_HEADER = "mtpctl-reward"
IGNORED_HEADER = "mtpctl-ignored"
"""Response header: the ignored fields of the request."""
IGNORED = 32
"""Maximum number of names in `IGNORED_HEADER`."""
WAIT_S = 30.0
"""Seconds that a client waits for a problem before it must retry."""

NextProblem = Callable[[], Awaitable["Assignment"]]
SingleRequests = Callable[[], GenerationRequest]
"""Returns the settings of a request outside of any trajectory."""


@dataclass(frozen=True)
class Assignment:
    """A problem for an external agent, which sets `finished` through the finish route."""

    secret: str
    problem: dict[str, object]
    finished: asyncio.Event

    @property
    def path(self) -> str:
        """The path of the base URL."""
        return f"/t/{self.secret}/v1"


class Gateway:
    """Serves trajectories over HTTP, on the socket `bound`, in its `async with` block."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        name: str,
        turns: int,
        bound: socket.socket,
        *,
        key: str | None = None,
        rules: FieldRules = REJECT,
        client_limit: int | None = None,
    ) -> None:
        """`name`: the model's name; `turns`: maximum number of answers in a trajectory; `rules`: see `Trajectory`.

        `key`: required by every route except those under a trajectory's secret. Without a key, only `POST /v1/trajectories` requires a
        token, which is generated here. `client_limit`: maximum number of open problems per address; None: no limit.
        """
        self._model, self._tokenizer, self._name, self._turns, self._bound = model, tokenizer, name, turns, bound
        self._rules, self._client_limit = rules, client_limit
        self.token = key or secrets.token_urlsafe(18)
        self._clients: dict[str, str] = {}
        self._open_by_client: Counter[str] = Counter()
        self._open: dict[str, Trajectory] = {}
        self._assignments: dict[str, Assignment] = {}
        self.next_problem: NextProblem | None = None
        self.single_requests: SingleRequests | None = None
        routes = [
            Route("/t/{secret}/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/t/{secret}/v1/reward", self._rewarded, methods=["POST"]),
            Route("/t/{secret}/v1/finish", self._finished, methods=["POST"]),
            Route("/t/{secret}/v1/models", self._models),
            Route("/v1/trajectories", self._next_trajectory, methods=["POST"]),
            Route("/v1/chat/completions", self._alone, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]
        app = Starlette(routes=routes, exception_handlers={MtpctlError: _refused, HTTPException: http_error})
        app.router.redirect_slashes = False
        self.app = Guard(app, HttpBounds(), key, open_under="/t/", tokens={"/v1/trajectories": self.token})
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
        """Start a trajectory. Returns its secret, and the trajectory."""
        secret = secrets.token_urlsafe(18)
        trajectory = self._open[secret] = Trajectory(request, self._model, self._turns, self._rules)
        return secret, trajectory

    def base_url(self, secret: str) -> str:
        """The `base_url` of an OpenAI client for this trajectory."""
        return f"{self.address}/t/{secret}/v1"

    def restart_clock(self, secret: str) -> None:
        """Restart a trajectory's deadline."""
        self._open[secret].restart_clock()

    def idle_s(self, secret: str) -> float:
        """Seconds since the last request of a trajectory's agent."""
        return self._open[secret].idle_s

    def close(self, secret: str) -> list[Sample]:
        """End a trajectory. Returns its samples."""
        self._assignments.pop(secret, None)
        if (client := self._clients.pop(secret, None)) is not None:
            self._release(client)
        return self._open.pop(secret).end()

    def assign(self, secret: str, problem: dict[str, object]) -> Assignment:
        """Prepare a trajectory for an external agent."""
        assignment = self._assignments[secret] = Assignment(secret, problem, asyncio.Event())
        return assignment

    # ------------------------------------------------------------------------------------------------------- routes

    def _trajectory(self, request: Request) -> Trajectory:
        trajectory = self._open.get(request.path_params["secret"])
        if trajectory is None:
            raise RequestInvalid("there is no such trajectory, or it has ended", "trajectory_ended", 410)
        if reward := request.headers.get(REWARD_HEADER):
            trajectory.reward = _number(reward)
        trajectory.touch()
        return trajectory

    async def _completions(self, request: Request) -> Response:
        return await self._answered(self._trajectory(request), _chat(await request.body()))

    async def _alone(self, request: Request) -> Response:
        if self.single_requests is None:
            raise RequestInvalid("answers are given within a trajectory; take the base URL of one, from /v1/trajectories")
        chat = _chat(await request.body())
        secret, trajectory = self.open(self.single_requests())
        try:
            return await self._answered(trajectory, chat)
        finally:
            self.close(secret)

    async def _answered(self, trajectory: Trajectory, chat: ChatRequest) -> Response:
        answers = await trajectory.answer(chat)
        ids = bool(chat.return_tokens_as_token_ids)
        completion = Completion(self._name, answers, self._tokenizer, logprobs=bool(chat.logprobs), ids=ids)
        headers = {IGNORED_HEADER: _header(chat.ignored)} if chat.ignored else None
        if not chat.stream:
            return JSONResponse(completion.whole(), headers=headers)
        usage = chat.stream_options is not None and chat.stream_options.include_usage
        return StreamingResponse(_as_async(completion.stream(usage=usage)), headers=headers, media_type="text/event-stream")

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
        if (assignment := self._assignments.get(request.path_params["secret"])) is not None:
            assignment.finished.set()
        return JSONResponse({"finished": True})

    async def _models(self, request: Request) -> Response:
        if "secret" in request.path_params:
            self._trajectory(request)
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "mtpctl"}]})

    async def _next_trajectory(self, request: Request) -> Response:
        if self.next_problem is None:
            raise RequestInvalid("this run starts its agents itself (rollout.agent); with rollout.gateway: true it hands out problems")
        client = request.client.host if request.client else ""
        if self._client_limit is not None and self._open_by_client[client] >= self._client_limit:
            raise RequestInvalid(
                f"this client already has {self._client_limit} open trajectories (rollout.agents_per_client); finish one",
                "client_limit",
                429,
            )
        self._open_by_client[client] += 1
        assignment: Assignment | None = None
        try:
            assignment = await asyncio.wait_for(self.next_problem(), WAIT_S)
        except TimeoutError:
            return JSONResponse(error_body("no problem is waiting; ask again", "server_error"), 503, {"retry-after": "1"})
        finally:
            if assignment is None:
                self._release(client)
        self._clients[assignment.secret] = client
        # Contains the address that the client used, which differs from ours behind a proxy.
        base = f"{request.url.scheme}://{request.headers.get('host', '')}{assignment.path}"
        return JSONResponse({"base_url": base, "problem": assignment.problem})

    def _release(self, client: str) -> None:
        self._open_by_client[client] -= 1
        if not self._open_by_client[client]:
            del self._open_by_client[client]

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "trajectories": len(self._open)})


async def _refused(_: Request, error: Exception) -> Response:
    status, code = (error.status, error.code) if isinstance(error, RequestInvalid) else (503, "engine_failed")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": str(error), "type": kind, "code": code}}, status)


def _chat(body: bytes) -> ChatRequest:
    fields = _json(body)
    try:
        check_text(fields)
        return ChatRequest.model_validate(fields)
    except BodyInvalid as error:
        raise RequestInvalid(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = shown(".".join(map(str, first["loc"])))[1:-1] or "body"
        raise RequestInvalid(f"{field}: {first['msg']}") from error


def _json(body: bytes) -> dict[str, object]:
    try:
        return parse_object(body)
    except BodyInvalid as error:
        raise RequestInvalid(str(error)) from error


def _header(names: list[str]) -> str:
    more = [f"and {len(names) - IGNORED} more"] if len(names) > IGNORED else []
    return ", ".join([*(ascii(name)[1:-1] for name in names[:IGNORED]), *more])


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RequestInvalid(f"reward: must be a finite number, got {str(value)[:40]!r}")
    return number


async def _as_async(lines: Iterable[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line
