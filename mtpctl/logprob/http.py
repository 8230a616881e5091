"""The HTTP routes of a log-prob server, and its Prometheus metrics. If the queue is full, a request gets status 429."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from mtpctl.data.tokenizers import Tokenizer, text_offsets
from mtpctl.errors import MtpctlError, RuntimeFailure
from mtpctl.logprob.protocol import DeadlineExceeded, QueueFull, RequestRefused, Scored, ScoreRequest, VersionGone
from mtpctl.logprob.schemas import (
    MAX_SEQUENCES,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    DepthScores,
    LogprobsRequest,
    LogprobsResponse,
    RoutesField,
    SequenceScores,
    TopLogprob,
)
from mtpctl.logprob.server import LogprobServer
from mtpctl.routes import Routes, from_json, to_json
from mtpctl.web.guard import BodyInvalid, Guard, HttpBounds, error_body, http_error, parse_json, quote_value
from mtpctl.web.server import METRICS_TYPE, Series, prometheus_text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from typing_extensions import TypeIs

MAX_NUMBERS = 1 << 21
"""Maximum number of numeric values in a response: tokens times values per token."""
BYTES_PER_TOKEN = 4
"""Estimated bytes of a token's text. In the response of `/v1/completions`, each byte is a number."""


class _StrictRequest(Request):
    """A request with strict JSON parsing, because clients are not trusted."""

    async def json(self) -> object:
        try:
            return parse_json(await self.body())
        except BodyInvalid as error:
            raise HTTPException(400, str(error)) from error


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


def make_app(server: LogprobServer, tokenizer: Tokenizer | None, name: str, *, key: str | None = None, bounds: HttpBounds) -> Guard:
    """Create the ASGI application. `tokenizer`: if None, only token ids are accepted. `key`: the API key that clients must send, if any."""
    api = FastAPI(
        title="mtpctl log-prob server",
        version=version_of("mtpctl"),
        description=f"Per-token log-probs under {name}.",
        redoc_url=None,
        redirect_slashes=False,
    )
    api.router.route_class = _StrictRoute

    started = int(time.time())

    @api.post("/v1/logprobs", response_model=LogprobsResponse)
    async def logprobs(body: LogprobsRequest, request: Request) -> Response:
        requests = _build_requests(body, _caller_name(body.user, request), server, tokenizer)
        route_numbers = 0
        if body.record_routes and server.bounds.routes:
            # Routes count as one number per four bytes.
            route_numbers = server.bounds.routes.token_bytes // 4 + 1
        _check_size(server, requests, 1 + body.mtp * server.bounds.depths + 2 * body.top_logprobs + route_numbers)
        if body.stream:
            return StreamingResponse(_stream_lines(server, requests, body), media_type="application/x-ndjson")
        data: list[SequenceScores | None] = [None] * len(requests)
        async for index, scored in server.stream(requests, wait=False):
            data[index] = _sequence_scores(index, requests[index], scored, body)
        answer = LogprobsResponse(model=name, data=[d for d in data if d is not None], usage=_token_usage(requests))
        return Response(answer.model_dump_json(), media_type="application/json")

    @api.post("/v1/completions", response_model=CompletionResponse)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        body.check()
        topk = body.logprobs or 0
        sequences = _encode_prompts(body.prompt, tokenizer)
        requests = [ScoreRequest(ids, topk=topk, caller=_caller_name(body.user, request), deadline_s=60.0) for ids in sequences]
        _check_requests(server, requests)
        _check_size(server, requests, 1 + 2 * topk + BYTES_PER_TOKEN)
        answers: dict[int, Scored] = {}
        async for index, scored in server.stream(requests, wait=False):
            answers[index] = scored
        choices = [_build_choice(i, requests[i], answers[i], body, tokenizer) for i in range(len(requests))]
        response = CompletionResponse(
            id=f"cmpl-{uuid.uuid4().hex}", created=int(time.time()), model=name, choices=choices, usage=_token_usage(requests)
        )
        return Response(response.model_dump_json(), media_type="application/json")

    @api.get("/health")
    async def health() -> Response:
        replicas = server.health()
        alive = any(replica["alive"] for replica in replicas)
        return JSONResponse({"status": "ok" if alive else "unavailable", "replicas": replicas}, 200 if alive else 503)

    @api.get("/version")
    async def version() -> dict[str, object]:
        return {
            "version": server.version,
            "available": server.dispatcher.available_versions(),
            "model": name,
            "mtpctl": version_of("mtpctl"),
        }

    @api.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": started, "owned_by": "mtpctl"}]}

    @api.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus(server), media_type=METRICS_TYPE)

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field_path = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(error_body(f"{quote_value(field_path)[1:-1] or 'body'}: {first['msg']}", "invalid_request_error"), 400)

    api.add_exception_handler(HTTPException, http_error)

    @api.exception_handler(MtpctlError)
    async def failed(_: Request, error: MtpctlError) -> Response:
        return JSONResponse(error_body(str(error), _error_type(error)), _status_code(error), _retry_header(error))

    return Guard(api, bounds, key)


def _status_code(error: MtpctlError) -> int:
    if isinstance(error, RequestRefused):
        return 400
    if isinstance(error, VersionGone):
        return 410
    if isinstance(error, QueueFull):
        return 429
    return 504 if isinstance(error, DeadlineExceeded) else 503


def _error_type(error: MtpctlError) -> str:
    return "server_error" if isinstance(error, RuntimeFailure) and not isinstance(error, QueueFull) else "invalid_request_error"


def _retry_header(error: MtpctlError) -> dict[str, str] | None:
    return {"retry-after": str(math.ceil(error.retry_after_s))} if isinstance(error, QueueFull) else None


# ---------------------------------------------------------------------------------------------------------- requests


def _caller_name(user: str, request: Request) -> str:
    """The caller for fair queueing: the request's user, or else its address."""
    return f"user {user}" if user else f"host {request.client.host if request.client else ''}"


def _encode_prompts(ids_or_texts: str | list[str] | list[int] | list[list[int]], tokenizer: Tokenizer | None) -> list[list[int]]:
    if isinstance(ids_or_texts, str) or _are_texts(ids_or_texts):
        texts = [ids_or_texts] if isinstance(ids_or_texts, str) else ids_or_texts
        if tokenizer is None:
            raise RequestRefused("text: the served model has no tokenizer; send token ids")
        try:
            # `text.encode()` rejects lone surrogates.
            return [tokenizer.encode(text.encode().decode(), special=True) for text in texts]
        except UnicodeEncodeError as error:
            raise RequestRefused(f"text: lone surrogate at character {error.start}") from error
    return _as_lists(ids_or_texts)


def _are_texts(values: list[str] | list[int] | list[list[int]]) -> TypeIs[list[str]]:
    return bool(values) and isinstance(values[0], str)


def _are_lists(values: list[int] | list[list[int]]) -> TypeIs[list[list[int]]]:
    return bool(values) and isinstance(values[0], list)


def _as_lists(values: list[int] | list[list[int]]) -> list[list[int]]:
    """Return a list of lists unchanged, and wrap a single list."""
    return values if _are_lists(values) else [values]


def _build_requests(body: LogprobsRequest, caller: str, server: LogprobServer, tokenizer: Tokenizer | None) -> list[ScoreRequest]:
    ids_or_texts = body.token_ids if body.token_ids is not None else body.text
    if ids_or_texts is None or (body.token_ids is not None and body.text is not None):
        raise RequestRefused("token_ids, text: give one of them")
    sequences = _encode_prompts(ids_or_texts, tokenizer)
    starts = body.prompt_length if isinstance(body.prompt_length, list) else [body.prompt_length] * len(sequences)
    masks: list[list[int] | None] = [None] * len(sequences)
    if body.mask is not None:
        masks = [*_as_lists(body.mask)]
    routes: list[Routes | None] = [None] * len(sequences)
    if body.routes is not None:
        routes = [_parse_routes(each) for each in (body.routes if isinstance(body.routes, list) else [body.routes])]
    for field, values in (("prompt_length", starts), ("mask", masks), ("routes", routes)):
        if len(values) != len(sequences):
            raise RequestRefused(f"{field}: has {len(values)} entries for {len(sequences)} sequences")
    requests = [
        ScoreRequest(
            token_ids=ids,
            prompt_length=start,
            mask=mask,
            temperature=body.temperature,
            topk=body.top_logprobs,
            mtp=body.mtp,
            version=body.version,
            at_least=body.at_least,
            caller=caller,
            deadline_s=body.timeout_s,
            routes=sequence_routes,
            record=body.record_routes,
        )
        for ids, start, mask, sequence_routes in zip(sequences, starts, masks, routes, strict=True)
    ]
    _check_requests(server, requests)
    return requests


def _parse_routes(field: RoutesField | None) -> Routes | None:
    try:
        return None if field is None else from_json(field.model_dump())
    except ValueError as error:
        raise RequestRefused(f"routes: {error}") from error


def _check_requests(server: LogprobServer, requests: list[ScoreRequest]) -> None:
    if len(requests) > MAX_SEQUENCES:
        raise RequestRefused(f"{len(requests)} sequences are more than the {MAX_SEQUENCES} of one request; send several")
    for index, request in enumerate(requests):
        try:
            server.bounds.check(request)
        except RequestRefused as error:
            raise RequestRefused(f"sequence {index}: {error}" if len(requests) > 1 else str(error)) from None


def _check_size(server: LogprobServer, requests: list[ScoreRequest], numbers_per_token: int) -> None:
    """Reject a request whose response would be too large, or for which the queue has no room, before any sequence is queued."""
    tokens = sum(request.tokens for request in requests)
    if tokens > server.limits.queue_tokens:
        raise RequestRefused(f"{tokens} tokens are more than the {server.limits.queue_tokens} that may wait; send several requests")
    if tokens * numbers_per_token > MAX_NUMBERS:
        raise RequestRefused(f"{tokens} tokens with {numbers_per_token} numbers each are more than {MAX_NUMBERS}; send several requests")
    server.check_room(requests)


# ----------------------------------------------------------------------------------------------------------- answers


async def _stream_lines(server: LogprobServer, requests: list[ScoreRequest], body: LogprobsRequest) -> AsyncIterator[str]:
    try:
        async for index, scored in server.stream(requests, wait=False):
            yield _sequence_scores(index, requests[index], scored, body).model_dump_json() + "\n"
    except MtpctlError as error:
        # The status line has been sent, so the error comes as the last line.
        yield JSONResponse(error_body(str(error), _error_type(error))).body.decode() + "\n"  # type: ignore[union-attr]


def _sequence_scores(index: int, request: ScoreRequest, scored: Scored, body: LogprobsRequest) -> SequenceScores:
    mask = request.mask or [1] * len(scored.logprobs)
    top = [
        [TopLogprob(id=i, logprob=value) for i, value in zip(ids, values, strict=True)] if is_scored else []
        for ids, values, is_scored in zip(scored.topk_ids, scored.topk_logprobs, mask, strict=False)
    ]
    return SequenceScores(
        index=index,
        version=scored.version,
        token_ids=list(request.token_ids[request.prompt_length :]),
        logprobs=[value if is_scored else None for value, is_scored in zip(scored.logprobs, mask, strict=True)],
        entropy=[value if is_scored else None for value, is_scored in zip(scored.entropy, mask, strict=True)],
        top_logprobs=top if body.top_logprobs else None,
        mtp=[DepthScores(depth=k, logprobs=d.logprobs, hits=d.hits) for k, d in enumerate(scored.drafts, 1)] if body.mtp else None,
        routes=RoutesField.model_validate(to_json(scored.routes)) if scored.routes is not None else None,
    )


def _build_choice(
    index: int, request: ScoreRequest, scored: Scored, body: CompletionRequest, tokenizer: Tokenizer | None
) -> CompletionChoice:
    ids = request.token_ids
    text = tokenizer.decode(ids) if tokenizer is not None else ""
    if body.logprobs is None:
        return CompletionChoice(index=index, text=text, logprobs=None)
    token_text = partial(_token_text, tokenizer=None if body.return_tokens_as_token_ids else tokenizer)
    token_texts = [token_text(i) for i in ids]
    token_bytes = tokenizer.token_bytes(ids) if tokenizer is not None else [b""] * len(ids)
    special_ids = tokenizer.special_ids if tokenizer is not None else ()
    top: list[dict[str, float] | None] | None = None
    if body.logprobs:
        top = [None]
        for position, (top_ids, values) in enumerate(zip(scored.topk_ids, scored.topk_logprobs, strict=True)):
            # As in OpenAI's API, the actual token is always included.
            top_logprobs = {token_text(i): value for i, value in zip(top_ids, values, strict=True)}
            top.append({token_texts[position + 1]: scored.logprobs[position]} | top_logprobs)
    logprobs = CompletionLogprobs(
        tokens=token_texts,
        token_logprobs=[None, *scored.logprobs],
        top_logprobs=top,
        text_offset=text_offsets([b"" if i in special_ids else piece for i, piece in zip(ids, token_bytes, strict=True)], text),
        bytes=None if tokenizer is None else [list(piece) for piece in token_bytes],
    )
    return CompletionChoice(index=index, text=text, logprobs=logprobs)


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token as text, or as its id if it has no text (special tokens, parts of a character)."""
    text = tokenizer.decode([token_id]) if tokenizer is not None else ""
    return text if text and "\ufffd" not in text else f"token_id:{token_id}"


def _token_usage(requests: list[ScoreRequest]) -> dict[str, int]:
    tokens = sum(request.tokens for request in requests)
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def prometheus(server: LogprobServer) -> str:
    """All metrics in the text format of Prometheus."""
    counters = server.counters
    series = [
        Series("requests_total", "counter", "Sequences answered.", counters.requests),
        Series("failed_total", "counter", "Sequences that ended in an error.", counters.failed),
        Series("refused_total", "counter", "Sequences rejected because the queue was full.", counters.queue_full),
        Series("tokens_total", "counter", "Tokens of the forward passes.", counters.tokens),
        Series("batches_total", "counter", "Forward passes.", counters.batches),
        Series("retried_total", "counter", "Sequences retried after a failed pass.", counters.retried),
        Series("replica_restarts_total", "counter", "Restarted replicas.", server.replicas.num_restarts),
        Series("updates_total", "counter", "Weight updates applied.", counters.updates),
        Series("busy_seconds_total", "counter", "Replica seconds in forward passes.", counters.busy_s),
        Series("request_seconds_total", "counter", "Seconds from submission to answer, over all sequences.", counters.wait_s),
        Series("stall_seconds_total", "counter", "Seconds that serving was paused for weight updates.", counters.stall_s),
        Series("queue_tokens", "gauge", "Queued tokens.", server.queue.tokens),
        Series("queue_requests", "gauge", "Queued sequences.", server.queue.requests),
        Series("queue_limit_tokens", "gauge", "Maximum queued tokens.", server.limits.queue_tokens),
        Series("replicas_alive", "gauge", "Serving replicas.", len(server.replicas.live())),
        Series("replicas", "gauge", "Configured replicas.", len(server.replicas.slots)),
        Series("version", "gauge", "Current weight version.", server.version),
    ]
    return prometheus_text("mtpctl_logprob_", series)
