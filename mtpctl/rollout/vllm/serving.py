"""Converts the settings of served requests for vLLM, and vLLM's reasons for rejecting a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from mtpctl.errors import UserError
from mtpctl.samples import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITHOUT_DRAFTS = ("min_p", "logit_bias")
"""Rejected by vLLM 0.32 while it speculates, because its rejection sampler does not apply them (`SamplingParams._validate_spec_decode`)."""


def sampling_of(steering: Steering, *, drafts: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`. `drafts`: whether the engine speculates.

    Raises UserError for settings that vLLM rejects while it speculates, and for a grammar that vLLM cannot parse.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams

    changed = steering.changed
    if drafts and (names := [name for name in WITHOUT_DRAFTS if name in changed]):
        raise UserError(f"{names[0]}: vLLM cannot apply it while it speculates; leave it out, or set rollout.speculation.num_tokens: 0")
    settings = {name: getattr(steering, name) for name in changed if name != "grammar"}
    if steering.grammar:
        try:
            settings["structured_outputs"] = StructuredOutputsParams(**steering.grammar)  # type: ignore[arg-type]
        except VLLMClientError as error:
            raise UserError(f"response_format: {rejection(error)}") from error
    return settings


def rejection(error: Exception) -> str:
    """vLLM's reason for rejecting a request, as one line that begins with the field."""
    text = " ".join(str(error.args[0] if error.args else error).split())[:400]
    field = getattr(error, "parameter", None)
    return f"{field}: {text}" if field else text


# Tool calls in an answer's text, read by vLLM's parsers, of which it has one for every form that a model is trained on.

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
