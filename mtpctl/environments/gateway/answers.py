"""Responses in OpenAI's format: the message of a turn's tokens, a complete response, and a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from mtpctl.data.tokenizers import Tokenizer
from mtpctl.environments.gateway.messages import ChatMessage, Function, ToolCall
from mtpctl.environments.gateway.trajectory import Answer
from mtpctl.rollout.protocol import ReadCalls


class AnswerReader:
    """Converts tokens to messages. `calls` parses tool calls; None: no tool calls."""

    def __init__(self, tokenizer: Tokenizer, calls: ReadCalls | None) -> None:
        self._tokenizer, self._calls = tokenizer, calls

    def __call__(self, tokens: Sequence[int], stops: Sequence[str], tools: Sequence[dict[str, Any]]) -> ChatMessage:
        """The message of a turn's tokens (without its end token), up to the first of `stops`. Tool calls are parsed only with `tools`."""
        text = _before(self._tokenizer.decode(tokens), stops)
        if tools and self._calls is not None:
            # Some formats mark a call with special tokens, which `text` lacks.
            content, calls = self._calls(_before(self._tokenizer.decode(tokens, special=True), stops), tools)
            if calls:
                named = [ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=Function(name=name, arguments=args)) for name, args in calls]
                return ChatMessage(role="assistant", content=content or None, tool_calls=named)
        return ChatMessage(role="assistant", content=text)


def _before(text: str, stops: Sequence[str]) -> str:
    positions = [position for position in map(text.find, stops) if position >= 0]
    return text[: min(positions)] if positions else text


class Completion:
    """One response of the endpoint."""

    def __init__(self, model: str, answers: Sequence[Answer], tokenizer: Tokenizer, *, logprobs: bool, ids: bool = False) -> None:
        """`model`: its name; `logprobs`: include the log-prob of each token; `ids`: name these tokens `token_id:N`."""
        self._answers, self._tokenizer, self._logprobs, self._ids = answers, tokenizer, logprobs, ids
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, object]:
        """The body of a complete response."""
        choices = [
            {"index": index, "message": _message(each), "finish_reason": each.finish_reason, "logprobs": self._logprobs_of(each)}
            for index, each in enumerate(self._answers)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def stream(self, *, usage: bool) -> Iterator[str]:
        """The response as server-sent events: role, text, tool calls and finish reason of each choice."""
        for index, each in enumerate(self._answers):
            message = _message(each)
            calls = [{"index": position, **call} for position, call in enumerate(message.pop("tool_calls", []))]
            deltas = [
                {"role": "assistant", "content": ""},
                *([message] if message["content"] else []),
                *({"tool_calls": [c]} for c in calls),
            ]
            logprobs = self._logprobs_of(each)
            for position, delta in enumerate(deltas):
                yield self._event(
                    [{"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs if position == 1 else None}]
                )
            # An answer without text still has the log-prob of its end token.
            left = logprobs if len(deltas) == 1 else None
            yield self._event([{"index": index, "delta": {}, "finish_reason": each.finish_reason, "logprobs": left}])
        if usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: object) -> str:
        return f"data: {json.dumps({**self._head, 'object': 'chat.completion.chunk', 'choices': choices, **more})}\n\n"

    def _usage(self) -> dict[str, int]:
        prompt, answered = max(each.prompt for each in self._answers), sum(len(each.tokens) for each in self._answers)
        return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}

    def _logprobs_of(self, answer: Answer) -> dict[str, object] | None:
        if not self._logprobs:
            return None
        pieces = self._tokenizer.token_bytes(answer.tokens)
        names = [f"token_id:{token}" for token in answer.tokens] if self._ids else [piece.decode(errors="replace") for piece in pieces]
        rows = [
            {"token": name, "logprob": logprob, "bytes": list(piece), "top_logprobs": []}
            for name, piece, logprob in zip(names, pieces, answer.logprobs, strict=True)
        ]
        return {"content": rows, "refusal": None}


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content}
    if answer.message.tool_calls:
        message["tool_calls"] = [call.model_dump() for call in answer.message.tool_calls]
    return message
