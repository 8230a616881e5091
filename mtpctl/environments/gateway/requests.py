"""Chat requests in OpenAI's format: messages, sampling settings, and which fields are honored, accepted without effect, or rejected.

A request with a field that is not honored is rejected, unless the field's value is the default behavior. With
`rollout.gateway_fields: ignore`, such fields are listed in a response header instead.

During training the recipe's sampling settings apply, because the objective is computed for that distribution. Without training,
clients set them, as far as the engine supports them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, Strict, TypeAdapter, ValidationError

from mtpctl.errors import MtpctlError
from mtpctl.recipe.rollout import LOWEST_TEMPERATURE
from mtpctl.samples import ExtraSampling, GenerationRequest
from mtpctl.web.guard import quote_value

OVER_BUDGET, OVER_CONTEXT = "budget_exceeded", "context_length_exceeded"
"""Error codes of requests that exceed the budget of a trajectory."""


class RequestInvalid(MtpctlError):
    """A rejected request. `code`: machine-readable reason; `status`: HTTP status."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


BOOKKEEPING_FIELDS = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "request_id",
        "session_id",
    }
)
"""Fields for a provider's bookkeeping. They do not change an answer."""
ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "ec_transfer_params": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields that are not honored. For each, the values that request the default behavior; these values and null are accepted."""


@dataclass(frozen=True)
class FieldRules:
    """`client_sampling`: clients set sampling; there is no training. `ignore`: unsupported fields are listed instead of rejected."""

    client_sampling: bool = False
    ignore: bool = False


def find_unsupported_fields(fields: Mapping[str, object], honored: Collection[str]) -> dict[str, str]:
    """The names of the unsupported fields, each with the reason. `honored`: the supported names, for suggestions."""
    reasons: dict[str, str] = {}
    for name, value in fields.items():
        if name in BOOKKEEPING_FIELDS or (name in ACCEPTED_VALUES and (value is None or value in ACCEPTED_VALUES[name])):
            continue
        if name in ACCEPTED_VALUES:
            reasons[name] = "is not supported; leave it out"
            continue
        matches = difflib.get_close_matches(name[:40], [*honored, *ACCEPTED_VALUES], 1)
        reasons[quote_value(name)[1:-1]] = f"is not a field of a chat request{f'; did you mean {matches[0]}?' if matches else ''}"
    return reasons


Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Integer = Annotated[int, Strict()]
TokenId = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
MAX_IDS, MAX_WORDS = 1024, 64
"""Maximum number of token ids and of words in a field."""
MAX_GRAMMAR_LENGTH = 1 << 16
"""Maximum length of a grammar in characters; a schema counts as its JSON."""


class JsonSchema(BaseModel):
    """OpenAI's `response_format.json_schema`. It is always enforced, whatever the value of `strict`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None


class Sampling(BaseModel):
    """The fields that change the sampling distribution. During training, the recipe sets them instead."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Integer, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_IDS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: Annotated[Integer, Field(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_IDS)
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(None, max_length=MAX_WORDS)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=1 << 17)


def apply_sampling(sampling: Sampling, request: GenerationRequest) -> GenerationRequest:
    """The request with the client's sampling settings. Raises RequestInvalid for unsupported values."""
    changes: dict[str, Any] = {name: value for name in ("temperature", "top_p", "seed") if (value := getattr(sampling, name)) is not None}
    if 0 < changes.get("temperature", 1) < LOWEST_TEMPERATURE:
        raise RequestInvalid(f"temperature: must be 0, or {LOWEST_TEMPERATURE:g} to 2; got {sampling.temperature:g}")
    if sampling.top_k is not None:
        changes["top_k"] = max(sampling.top_k, 0)
    if sampling.stop_token_ids:
        changes["stop_token_ids"] = [*request.stop_token_ids, *sampling.stop_token_ids]
    direct_fields = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words", "allowed_token_ids")
    settings: dict[str, Any] = {name: value for name in direct_fields if (value := getattr(sampling, name)) is not None}
    if sampling.logit_bias:
        settings["logit_bias"] = _parse_biases(sampling.logit_bias)
    if grammar := _parse_grammar(sampling):
        settings["grammar"] = grammar
    if settings:
        changes["extra_sampling"] = ExtraSampling(**settings)
    return replace(request, **changes)


def changed_fields(sampling: Sampling, request: GenerationRequest) -> Iterator[str]:
    """The names of the fields in `sampling` whose values differ from the settings of `request`, in the order of the schema."""
    default = {"temperature": request.temperature, "top_p": request.top_p, "min_p": 0, "repetition_penalty": 1}
    for name in Sampling.model_fields:
        value = getattr(sampling, name)
        if value is None or value == default.get(name):
            continue
        if name == "top_k":
            changed = max(value, 0) != request.top_k
        elif name == "stop_token_ids":
            changed = not set(value) <= set(request.stop_token_ids)
        elif name == "response_format":
            changed = value.type != "text"
        elif name in ("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "bad_words"):
            changed = bool(value)
        else:
            changed = True
        if changed:
            yield name


def _parse_biases(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not re.fullmatch("[0-9]{1,10}", token):
            raise RequestInvalid(f"logit_bias: {quote_value(token)} is not a token id")
    return {int(token): bias for token, bias in biases.items()}


def _parse_grammar(sampling: Sampling) -> dict[str, object]:
    """The constraint on the text, as arguments of vLLM's `StructuredOutputsParams`; empty for none."""
    response_format, structured = sampling.response_format, sampling.structured_outputs
    grammar: dict[str, object] = {}
    if structured is not None:
        grammar = structured.model_dump(by_alias=True, exclude_none=True)
        if len(grammar) != 1:
            raise RequestInvalid(f"structured_outputs: must have one constraint, got {len(grammar)}")
    if response_format is not None and response_format.type != "text":
        if grammar:
            raise RequestInvalid("structured_outputs: response_format constrains the text already; send one of the two")
        if response_format.type == "json_schema" and response_format.json_schema is None:
            raise RequestInvalid("response_format.json_schema: missing; send the schema")
        grammar = (
            {"json_object": True}
            if response_format.json_schema is None or response_format.type == "json_object"
            else {"json": response_format.json_schema.schema_}
        )
    if sum(map(len, (json.dumps(constraint) for constraint in grammar.values()))) > MAX_GRAMMAR_LENGTH:
        key = "response_format" if structured is None else "structured_outputs"
        raise RequestInvalid(f"{key}: the grammar has more than {MAX_GRAMMAR_LENGTH} characters; send a smaller one")
    return grammar


MAX_CHOICES = 64
"""Maximum number of choices per request."""
_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)
"""Arguments of chat templates, or of transformers' rendering function, that clients must not set."""


class Function(BaseModel):
    """The function of a tool call. `arguments` is JSON, as text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(BaseModel):
    """One call of a tool by the model."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """One message of a conversation. Other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class ToolFunction(BaseModel):
    """Name and parameters of a tool."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


_TOOLS = TypeAdapter(list[Tool])


class ChatRequest(Sampling):
    """The body of `POST /v1/chat/completions`. For other fields, see `find_unsupported_fields`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The strings that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stops if text]

    @property
    def token_limit(self) -> int | None:
        """Maximum tokens of an answer; None if the request sets no limit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return self.chat_template_kwargs or {}

    @property
    def ignored(self) -> list[str]:
        """The fields that `check` ignored."""
        return self._ignored

    def check(self, request: GenerationRequest, template: str, rules: FieldRules) -> None:
        """Raise RequestInvalid for anything that the gateway does not support.

        `request`: the sampling settings of the trajectory; `template`: the chat template. With `rules.ignore`, fields that are not honored
        are listed in `ignored` instead, and only invalid requests are rejected.
        """
        self._check_tools()
        for message in self.messages:
            if isinstance(message.content, list) and any(part.get("type") != "text" for part in message.content):
                raise RequestInvalid("messages: only text is supported; send parts of the type text")
        reasons = self._unsupported_fields(template)
        if not rules.client_sampling:
            recipe_settings = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
            for name in changed_fields(self, request):
                setting = f"rollout.{name}: {recipe_settings[name]:g}" if name in recipe_settings else "the recipe's settings"
                reasons[name] = f"tokens are sampled with {setting}, because they are trained on; leave it out"
        if reasons and not rules.ignore:
            name, reason = next(iter(reasons.items()))
            hint = "" if rules.client_sampling else ", or set rollout.gateway_fields: ignore"
            raise RequestInvalid(f"{name}: {reason}{hint}")
        self._ignored = list(reasons)

    def _unsupported_fields(self, template: str) -> dict[str, str]:
        """The fields of this request that are never honored, each with the reason."""
        reasons = find_unsupported_fields(self.model_extra or {}, type(self).model_fields)
        if self.top_logprobs:
            reasons["top_logprobs"] = "only the log-prob of the sampled token is available; leave it out"
        if self.tool_choice not in (None, "auto", "none"):
            reasons["tool_choice"] = "forced tool calls are not supported; send auto or none"
        if any(tool["function"].get("strict") for tool in self.tools or ()):
            reasons["tools.function.strict"] = "calls are not constrained to the schema; leave it out"
        for name in self.variables:
            if name in _RESERVED_TEMPLATE_ARGUMENTS:
                raise RequestInvalid(f"chat_template_kwargs.{name}: is set by the gateway; leave it out")
            if not re.search(rf"\b{re.escape(name)}\b", template):
                reasons[f"chat_template_kwargs.{quote_value(name)[1:-1]}"] = "the chat template has no such variable; leave it out"
        return reasons

    def _check_tools(self) -> None:
        try:
            _TOOLS.validate_python(self.tools or [])
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestInvalid(f"{'.'.join(map(str, ('tools', *first['loc'])))}: {first['msg']}") from error


def to_template_message(message: ChatMessage) -> dict[str, object]:
    """A message for the chat template: content as one text, arguments of tool calls parsed if they are JSON."""
    other_fields = {key: value for key, value in message.model_dump(exclude_none=True).items() if key not in ("content", "tool_calls")}
    template_message: dict[str, object] = {"content": text_of(message.content), **other_fields}
    if message.tool_calls:
        template_message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _parse_arguments(call.function)}}
            for call in message.tool_calls
        ]
    return template_message


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())


def message_key(message: ChatMessage) -> str:
    """A key that is equal for equivalent messages: role, text, and the names and arguments of tool calls.

    Clients may send back an answer with different whitespace in the arguments of a call, without ids, or with additional fields.
    """
    calls = [[call.function.name, _parse_arguments(call.function)] for call in message.tool_calls or ()]
    tool_call_id = (message.model_extra or {}).get("tool_call_id") if message.role == "tool" else None
    return json.dumps([message.role, text_of(message.content), calls, tool_call_id], sort_keys=True)


def _parse_arguments(function: Function) -> object:
    if not isinstance(function.arguments, str):
        return function.arguments
    try:
        return json.loads(function.arguments)
    except (ValueError, RecursionError):
        return function.arguments
