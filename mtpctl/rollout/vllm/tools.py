"""Tool calls in an answer's text, read by vLLM's parsers, of which it has one for every form that a model is trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from mtpctl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ReadCalls = Callable[[str, Sequence[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
"""Given an answer's text and the tools, the text beside the calls, and the name and arguments (JSON) of each call."""

_FORMS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<tool_call>", "hermes"),
)
"""What a chat template has in it that tells the model to call tools in a form, and the parser of that form."""


def parser_for(template: str) -> str | None:
    """The name of the parser for the form that a chat template shows the model; None where it shows none of those known here."""
    return next((name for mark, name in _FORMS if mark in template), None)


def load_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ReadCalls:
    """The parser that vLLM knows by this name. Raises UserError where it knows none."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    # A call that makes no sense is something that the model wrote: parsers write a traceback of each, and training sees many.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        make = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise UserError(f"rollout.tool_parser: vLLM has no parser {name!r}; it has {known}") from error

    def read(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        given = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        request = ChatCompletionRequest(messages=[], model="", tools=given)
        found = make(cast(Any, tokenizer), [*given]).extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls] if found.tools_called else []
        return (found.content or "", calls) if calls else (text, [])

    return read
