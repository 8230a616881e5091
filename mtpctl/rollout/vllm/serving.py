"""vLLM's sampling settings for clients' requests, its reasons for rejecting a request, and its tool-call parsers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from mtpctl.errors import UserError
from mtpctl.rollout.protocol import ToolCallParser
from mtpctl.samples import ExtraSampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITHOUT_DRAFTS = ("min_p", "logit_bias")
"""Rejected by vLLM 0.32 while it speculates, because its rejection sampler does not apply them (`SamplingParams._validate_spec_decode`)."""


def sampling_args(extra_sampling: ExtraSampling, *, drafts: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`. `drafts`: whether the engine speculates.

    Raises UserError for settings that vLLM rejects while it speculates, and for a grammar that vLLM cannot parse.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams

    changed_names = extra_sampling.changed
    if drafts and (names := [name for name in WITHOUT_DRAFTS if name in changed_names]):
        raise UserError(f"{names[0]}: vLLM cannot apply it while it speculates; leave it out, or set rollout.speculation.num_tokens: 0")
    settings = {name: getattr(extra_sampling, name) for name in changed_names if name != "grammar"}
    if extra_sampling.grammar:
        try:
            settings["structured_outputs"] = StructuredOutputsParams(**extra_sampling.grammar)  # type: ignore[arg-type]
        except VLLMClientError as error:
            raise UserError(f"response_format: {format_rejection(error)}") from error
    return settings


def format_rejection(error: Exception) -> str:
    """Format vLLM's reason for rejecting a request as one line that begins with the field."""
    text = " ".join(str(error.args[0] if error.args else error).split())[:400]
    field = getattr(error, "parameter", None)
    return f"{field}: {text}" if field else text


_FORMATS = (("<function=", "qwen3_coder"), ("<arg_key>", "glm45"), ("<｜tool▁calls▁begin｜>", "deepseek_v3"), ("<tool_call>", "hermes"))
"""Markers of a tool-call format in chat templates, and vLLM's parser of the format."""


def find_parser_name(template: str) -> str | None:
    """The name of the parser for a chat template's format of tool calls; None for an unknown format."""
    return next((name for marker, name in _FORMATS if marker in template), None)


def load_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolCallParser:
    """vLLM's parser of this name. Raises UserError if there is none."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    # Parsers log a traceback for every malformed call, and malformed calls are frequent in training.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        parser = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known_parsers = ", ".join(sorted(ToolParserManager.list_registered()))
        raise UserError(f"rollout.tool_parser: vLLM has no parser {name!r}; it has {known_parsers}") from error

    def parse_calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        params = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        request = ChatCompletionRequest(messages=[], model="", tools=params)
        result = parser(cast(Any, tokenizer), [*params]).extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in result.tool_calls] if result.tools_called else []
        return (result.content or "", calls) if calls else (text, [])

    return parse_calls
