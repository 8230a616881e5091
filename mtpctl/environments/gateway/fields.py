"""The fields of a chat request: which are honored, accepted without effect, or rejected; and sampling settings.

No field that would change an answer is dropped silently. A field that is not honored, known or unknown, is an error that names it, unless
its value is the default behavior. With `rollout.gateway_fields: ignore` it is listed in a response header instead.

During training the recipe's sampling settings apply, because the objective is computed for that distribution. Without training, clients
set them, as far as the engine supports it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from mtpctl.errors import MtpctlError
from mtpctl.recipe.rollout import LOWEST_TEMPERATURE
from mtpctl.samples import GenerationRequest, Steering
from mtpctl.web.json_body import shown

OVER_BUDGET, OVER_CONTEXT = "budget_exceeded", "context_length_exceeded"
"""Error codes of requests that exceed the budget of a trajectory."""


class RequestInvalid(MtpctlError):
    """A rejected request. `code`: machine-readable reason; `status`: HTTP status."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


WITHOUT_EFFECT = frozenset(
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
"""Bookkeeping fields of a provider, which do not change an answer."""
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
"""Fields that are not honored, each with the values that request the default behavior. These and null are accepted."""


@dataclass(frozen=True)
class FieldRules:
    """`serving`: there is no training, so clients set sampling. `ignore`: fields that are not honored are listed instead of rejected."""

    serving: bool = False
    ignore: bool = False


def not_honored(others: Mapping[str, object], honored: Collection[str]) -> dict[str, str]:
    """The rejected fields of a request, each with the reason. `others`: its fields that are not in `honored`."""
    reasons: dict[str, str] = {}
    for name, value in others.items():
        if name in WITHOUT_EFFECT or (name in ACCEPTED_VALUES and (value is None or value in ACCEPTED_VALUES[name])):
            continue
        if name in ACCEPTED_VALUES:
            reasons[name] = "is not supported; leave it out"
            continue
        near = difflib.get_close_matches(name[:40], [*honored, *ACCEPTED_VALUES], 1)
        reasons[shown(name)[1:-1]] = f"is not a field of a chat request{f'; did you mean {near[0]}?' if near else ''}"
    return reasons


Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Whole = Annotated[int, Strict()]
TokenId = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
IDS, WORDS = 1024, 64
"""Maximum number of token ids and of words in a field."""
GRAMMAR_CHARACTERS = 1 << 16
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


class Structured(BaseModel):
    """vLLM's `structured_outputs`: one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None


class Sampling(BaseModel):
    """The fields that change the sampling distribution. During training the recipe sets them."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = Field(None, max_length=IDS)
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    min_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=IDS)
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(None, max_length=WORDS)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=1 << 17)


def apply(sampling: Sampling, request: GenerationRequest) -> GenerationRequest:
    """The request with the client's sampling settings. Raises RequestInvalid for unsupported values."""
    changes: dict[str, Any] = {name: value for name in ("temperature", "top_p", "seed") if (value := getattr(sampling, name)) is not None}
    if 0 < changes.get("temperature", 1) < LOWEST_TEMPERATURE:
        raise RequestInvalid(f"temperature: must be 0, or {LOWEST_TEMPERATURE:g} to 2; got {sampling.temperature:g}")
    if sampling.top_k is not None:
        changes["top_k"] = max(sampling.top_k, 0)
    if sampling.stop_token_ids:
        changes["stop_token_ids"] = [*request.stop_token_ids, *sampling.stop_token_ids]
    plain = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words", "allowed_token_ids")
    settings: dict[str, Any] = {name: value for name in plain if (value := getattr(sampling, name)) is not None}
    if sampling.logit_bias:
        settings["logit_bias"] = _biases(sampling.logit_bias)
    if grammar := _grammar(sampling):
        settings["grammar"] = grammar
    if settings:
        changes["steering"] = Steering(**settings)
    return replace(request, **changes)


def changes_of(sampling: Sampling, request: GenerationRequest) -> Iterator[str]:
    """The fields whose values differ from the settings of `request`, in the order of the schema."""
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


def _biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items() if _is_id(token)}
    except ValueError as error:
        raise RequestInvalid(f"logit_bias: {error}") from error


def _is_id(token: str) -> bool:
    if not token.isascii() or not token.isdigit() or len(token) > 10:
        raise ValueError(f"{shown(token)} is not a token id")
    return True


def _grammar(sampling: Sampling) -> dict[str, object]:
    """The constraint on the text, as arguments of vLLM's `StructuredOutputsParams`; empty for none."""
    form, structured = sampling.response_format, sampling.structured_outputs
    grammar: dict[str, object] = {}
    if structured is not None:
        grammar = structured.model_dump(by_alias=True, exclude_none=True)
        if len(grammar) != 1:
            raise RequestInvalid(f"structured_outputs: must have one constraint, got {len(grammar)}")
    if form is not None and form.type != "text":
        if grammar:
            raise RequestInvalid("structured_outputs: response_format constrains the text already; send one of the two")
        if form.type == "json_schema" and form.json_schema is None:
            raise RequestInvalid("response_format.json_schema: missing; send the schema")
        grammar = {"json_object": True} if form.json_schema is None or form.type == "json_object" else {"json": form.json_schema.schema_}
    if sum(map(len, (json.dumps(each) for each in grammar.values()))) > GRAMMAR_CHARACTERS:
        raise RequestInvalid(f"response_format: the grammar has more than {GRAMMAR_CHARACTERS} characters; send a smaller one")
    return grammar
