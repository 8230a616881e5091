"""The endpoint's HTTP routes, and responses in OpenAI's format. Each trajectory has its own base URL, whose secret part is its key.

POST /t/SECRET/v1/chat/completions   a chat completion
POST /t/SECRET/v1/reward             {"reward": 0.5}: the trajectory's reward
POST /t/SECRET/v1/finish             ends the trajectory of an external agent; may contain the reward
GET  /t/SECRET/v1/models             the name of the model; also GET /v1/models
POST /v1/trajectories                the next problem, for external agents; always requires the endpoint's key
POST /v1/chat/completions            a chat completion outside of any trajectory, if `create_single_request` is set
GET  /health                         status, and the number of open trajectories
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mtpctl.data.tokenizers import Tokenizer
from mtpctl.environments.gateway.requests import ChatMessage, ChatRequest, FieldRules, Function, RequestInvalid, ToolCall
from mtpctl.environments.gateway.trajectory import REJECT, Answer, ChatBackend, Trajectory
from mtpctl.errors import MtpctlError
from mtpctl.rollout.protocol import ToolCallParser
from mtpctl.samples import GenerationRequest, Sample
from mtpctl.web.guard import BodyInvalid, Guard, HttpBounds, check_text, error_body, http_error, parse_json_object, quote_value
from mtpctl.web.server import address_of, serving

REWARD_HEADER = "mtpctl-reward"
IGNORED_HEADER = "mtpctl-ignored"
"""Response header: the ignored fields of the request."""
MAX_LISTED_FIELDS = 32
"""Maximum number of names in `IGNORED_HEADER`."""
PROBLEM_WAIT_S = 30.0
"""Maximum seconds that a request for a problem waits before the client must retry."""

NextProblem = Callable[[], Awaitable["Assignment"]]
CreateSingleRequest = Callable[[], GenerationRequest]
"""Returns the settings of a request outside of any trajectory."""


@dataclass(frozen=True)
class Assignment:
    """A problem for an external agent. `finished` is set by the finish route, or when the trajectory ends without it."""

    secret: str
    problem: dict[str, object]
    finished: asyncio.Event

    @property
    def path(self) -> str:
        """The path of the base URL."""
        return f"/t/{self.secret}/v1"


class Gateway:
    """Serves trajectories over HTTP on the socket `listener` while its `async with` block runs."""

    def __init__(
        self,
        backend: ChatBackend,
        tokenizer: Tokenizer,
        name: str,
        max_turns: int,
        listener: socket.socket,
        *,
        key: str | None = None,
        rules: FieldRules = REJECT,
        client_limit: int | None = None,
    ) -> None:
        """`name`: the model's name; `max_turns`: maximum number of answers in a trajectory; `rules`: see `Trajectory`.

        `key`: required by every route except `/health` and those under a trajectory's secret. Without a key, only `POST /v1/trajectories`
        requires a token, which is generated here. `client_limit`: maximum number of open problems per address; None: no limit.
        """
        self._backend, self._tokenizer, self._name, self._max_turns, self._listener = backend, tokenizer, name, max_turns, listener
        self._rules, self._client_limit = rules, client_limit
        self.token = key or secrets.token_urlsafe(18)
        self._clients: dict[str, str] = {}
        self._open_by_client: Counter[str] = Counter()
        self._open: dict[str, Trajectory] = {}
        self._assignments: dict[str, Assignment] = {}
        self.next_problem: NextProblem | None = None
        self.create_single_request: CreateSingleRequest | None = None
        routes = [
            Route("/t/{secret}/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/t/{secret}/v1/reward", self._set_reward, methods=["POST"]),
            Route("/t/{secret}/v1/finish", self._finish, methods=["POST"]),
            Route("/t/{secret}/v1/models", self._models),
            Route("/v1/trajectories", self._next_trajectory, methods=["POST"]),
            Route("/v1/chat/completions", self._single_completion, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]
        app = Starlette(routes=routes, exception_handlers={MtpctlError: _error_response, HTTPException: http_error})
        app.router.redirect_slashes = False
        self.app = Guard(app, HttpBounds(), key, public_prefix="/t/", tokens={"/v1/trajectories": self.token})
        self._serving = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Gateway:
        await self._serving.enter_async_context(serving(self.app, self._listener))
        return self

    async def __aexit__(self, *_: object) -> None:
        for trajectory in self._open.values():
            trajectory.end()
        await self._serving.aclose()

    @property
    def address(self) -> str:
        """`http://HOST:PORT`."""
        return address_of(self._listener)

    def open(self, request: GenerationRequest) -> tuple[str, Trajectory]:
        """Start a trajectory. Returns its secret, and the trajectory."""
        secret = secrets.token_urlsafe(18)
        trajectory = self._open[secret] = Trajectory(request, self._backend, self._max_turns, self._rules)
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

    def _get_trajectory(self, request: Request) -> Trajectory:
        trajectory = self._open.get(request.path_params["secret"])
        if trajectory is None:
            raise RequestInvalid("there is no such trajectory, or it has ended", "trajectory_ended", 410)
        if reward := request.headers.get(REWARD_HEADER):
            trajectory.reward = _parse_reward(reward)
        trajectory.touch()
        return trajectory

    async def _completions(self, request: Request) -> Response:
        return await self._respond(self._get_trajectory(request), _parse_chat_request(await request.body()))

    async def _single_completion(self, request: Request) -> Response:
        if self.create_single_request is None:
            raise RequestInvalid("requests need the base URL of a trajectory; create one with POST /v1/trajectories")
        chat = _parse_chat_request(await request.body())
        secret, trajectory = self.open(self.create_single_request())
        try:
            return await self._respond(trajectory, chat)
        finally:
            self.close(secret)

    async def _respond(self, trajectory: Trajectory, chat: ChatRequest) -> Response:
        answers = await trajectory.answer(chat)
        token_ids = bool(chat.return_tokens_as_token_ids)
        completion = Completion(self._name, answers, self._tokenizer, logprobs=bool(chat.logprobs), token_ids=token_ids)
        headers = {IGNORED_HEADER: _format_field_list(chat.ignored)} if chat.ignored else None
        if not chat.stream:
            # Starlette's JSON is not escaped, so it cannot contain the lone surrogates that a model may write.
            return Response(json.dumps(completion.to_json()), headers=headers, media_type="application/json")
        include_usage = chat.stream_options is not None and chat.stream_options.include_usage
        return StreamingResponse(_iterate(completion.stream(include_usage=include_usage)), headers=headers, media_type="text/event-stream")

    async def _set_reward(self, request: Request) -> Response:
        trajectory = self._get_trajectory(request)
        body = _parse_body(await request.body())
        if "reward" not in body:
            raise RequestInvalid('reward: missing; send {"reward": 0.5}')
        trajectory.reward = _parse_reward(body["reward"])
        return JSONResponse({"reward": trajectory.reward})

    async def _finish(self, request: Request) -> Response:
        trajectory, content = self._get_trajectory(request), await request.body()
        if content and "reward" in (body := _parse_body(content)):
            trajectory.reward = _parse_reward(body["reward"])
        if (assignment := self._assignments.get(request.path_params["secret"])) is not None:
            assignment.finished.set()
        return JSONResponse({"finished": True})

    async def _models(self, request: Request) -> Response:
        if "secret" in request.path_params:
            self._get_trajectory(request)
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
            assignment = await asyncio.wait_for(self.next_problem(), PROBLEM_WAIT_S)
        except TimeoutError:
            return JSONResponse(error_body("no problem is waiting; ask again", "server_error"), 503, {"retry-after": "1"})
        finally:
            if assignment is None:
                self._release(client)
        self._clients[assignment.secret] = client
        # The address that the client used. Behind a proxy, it differs from the gateway's address.
        base_url = f"{request.url.scheme}://{request.headers.get('host', '')}{assignment.path}"
        return JSONResponse({"base_url": base_url, "problem": assignment.problem})

    def _release(self, client: str) -> None:
        self._open_by_client[client] -= 1
        if not self._open_by_client[client]:
            del self._open_by_client[client]

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "trajectories": len(self._open)})


async def _error_response(_: Request, error: Exception) -> Response:
    status, code = (error.status, error.code) if isinstance(error, RequestInvalid) else (503, "engine_failed")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": str(error), "type": kind, "code": code}}, status)


def _parse_chat_request(body: bytes) -> ChatRequest:
    fields = _parse_body(body)
    try:
        check_text(fields)
        return ChatRequest.model_validate(fields)
    except BodyInvalid as error:
        raise RequestInvalid(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = quote_value(".".join(map(str, first["loc"])))[1:-1] or "body"
        raise RequestInvalid(f"{field}: {first['msg']}") from error


def _parse_body(body: bytes) -> dict[str, object]:
    try:
        return parse_json_object(body)
    except BodyInvalid as error:
        raise RequestInvalid(str(error)) from error


def _format_field_list(names: list[str]) -> str:
    remainder = [f"and {len(names) - MAX_LISTED_FIELDS} more"] if len(names) > MAX_LISTED_FIELDS else []
    return ", ".join([*(ascii(name)[1:-1] for name in names[:MAX_LISTED_FIELDS]), *remainder])


def _parse_reward(value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RequestInvalid(f"reward: must be a finite number, got {str(value)[:40]!r}")
    return number


async def _iterate(lines: Iterable[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line


class AnswerReader:
    """Converts tokens to messages. `calls` parses tool calls; None: tool calls are not parsed."""

    def __init__(self, tokenizer: Tokenizer, parse_calls: ToolCallParser | None) -> None:
        self._tokenizer, self._parse_calls = tokenizer, parse_calls

    def __call__(self, tokens: Sequence[int], stops: Sequence[str], tools: Sequence[dict[str, Any]]) -> ChatMessage:
        """Convert the tokens of a turn, without its end token, up to the first of `stops`. Parse tool calls if there are `tools`."""
        text = _cut_at_stop(self._tokenizer.decode(tokens), stops)
        if tools and self._parse_calls is not None:
            # Some formats mark a call with special tokens, which `text` lacks.
            content, calls = self._parse_calls(_cut_at_stop(self._tokenizer.decode(tokens, special=True), stops), tools)
            if calls:
                tool_calls = [
                    ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=Function(name=name, arguments=args)) for name, args in calls
                ]
                return ChatMessage(role="assistant", content=content or None, tool_calls=tool_calls)
        return ChatMessage(role="assistant", content=text)


def _cut_at_stop(text: str, stops: Sequence[str]) -> str:
    positions = [position for position in map(text.find, stops) if position >= 0]
    return text[: min(positions)] if positions else text


class Completion:
    """One response of the endpoint."""

    def __init__(self, model: str, answers: Sequence[Answer], tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool = False) -> None:
        """`model`: the model's name; `logprobs`: include the log-prob of each token; `token_ids`: name these tokens `token_id:N`."""
        self._answers, self._tokenizer, self._logprobs, self._ids = answers, tokenizer, logprobs, token_ids
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def to_json(self) -> dict[str, object]:
        """The body of a complete response."""
        choices = [
            {
                "index": index,
                "message": _message_json(answer),
                "finish_reason": answer.finish_reason,
                "logprobs": self._logprobs_json(answer),
            }
            for index, answer in enumerate(self._answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def stream(self, *, include_usage: bool) -> Iterator[str]:
        """The response as server-sent events: role, text, tool calls and finish reason of each choice."""
        for index, answer in enumerate(self._answers):
            message = _message_json(answer)
            tool_calls = [{"index": position, **call} for position, call in enumerate(message.pop("tool_calls", []))]
            deltas = [
                {"role": "assistant", "content": ""},
                *([message] if message["content"] else []),
                *({"tool_calls": [call]} for call in tool_calls),
            ]
            logprobs = self._logprobs_json(answer)
            for position, delta in enumerate(deltas):
                yield self._event(
                    [{"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs if position == 1 else None}]
                )
            # An answer without text still has the log-prob of its end token.
            remaining_logprobs = logprobs if len(deltas) == 1 else None
            yield self._event([{"index": index, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": remaining_logprobs}])
        if include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **fields: object) -> str:
        return f"data: {json.dumps({**self._head, 'object': 'chat.completion.chunk', 'choices': choices, **fields})}\n\n"

    def _usage(self) -> dict[str, int]:
        prompt_tokens = max(answer.prompt_length for answer in self._answers)
        completion_tokens = sum(len(answer.tokens) for answer in self._answers)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}

    def _logprobs_json(self, answer: Answer) -> dict[str, object] | None:
        if not self._logprobs:
            return None
        pieces = self._tokenizer.token_bytes(answer.tokens)
        names = [f"token_id:{token}" for token in answer.tokens] if self._ids else [piece.decode(errors="replace") for piece in pieces]
        rows = [
            {"token": name, "logprob": logprob, "bytes": list(piece), "top_logprobs": []}
            for name, piece, logprob in zip(names, pieces, answer.logprobs, strict=True)
        ]
        return {"content": rows, "refusal": None}


def _message_json(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content}
    if answer.message.tool_calls:
        message["tool_calls"] = [call.model_dump() for call in answer.message.tool_calls]
    return message
