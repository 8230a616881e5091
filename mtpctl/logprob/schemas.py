"""Bodies of the HTTP face: what clients send and what they get, as the OpenAPI page shows it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from mtpctl.logprob.protocol import RequestRefused

TokenId = Annotated[int, Strict()]
MaskBit = Annotated[int, Strict(), Field(ge=0, le=1)]
Version = Annotated[int, Strict(), Field(ge=0, le=1 << 53)]

SEQUENCES = 1024
"""Sequences of one HTTP request, at most."""
TOP_LOGPROBS = 32
WAIT_S = 600.0


class RoutesField(BaseModel):
    """The experts of a sequence's first tokens: [tokens, layers with experts, experts a token], in base64, little-endian, in C order."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["uint8", "uint16"] = Field(description="uint8 up to 256 experts, uint16 beyond.")
    shape: Annotated[list[Annotated[int, Strict(), Field(ge=0)]], Field(min_length=3, max_length=3)]
    data: str


class LogprobsRequest(BaseModel):
    """Sequences to score: token ids, or text that the served tokenizer encodes."""

    model_config = ConfigDict(extra="forbid")

    token_ids: list[TokenId] | list[list[TokenId]] | None = Field(None, description="One sequence, or several.")
    text: str | list[str] | None = Field(None, description="The same as text.")
    prompt_length: TokenId | list[TokenId] = Field(1, description="Tokens that come before the scored ones, for all or for each.")
    mask: list[MaskBit] | list[list[MaskBit]] | None = Field(None, description="1 or 0 for each scored token; 0: null in the answer.")
    temperature: float = Field(1.0, gt=0, description="Temperature of the distribution.")
    top_logprobs: int = Field(0, ge=0, le=TOP_LOGPROBS, description="Likeliest tokens to name at each place.")
    mtp: bool = Field(False, description="Log-probs and greedy hits of every MTP depth as well.")
    routes: RoutesField | list[RoutesField | None] | None = Field(
        None, description="Experts to send tokens to; those of tokens without any are chosen by the served model."
    )
    record_routes: bool = Field(False, description="The experts that tokens were sent to as well.")
    version: Version | None = Field(None, description="Only these weights.")
    at_least: Version | None = Field(None, description="These weights or newer ones; waits for them.")
    timeout_s: float = Field(60.0, gt=0, le=WAIT_S, description="Seconds to wait for an answer.")
    stream: bool = Field(False, description="One JSON line a sequence, as they are done.")
    user: str = Field("", max_length=128, description="Whose request it is: users get equal shares of a full server.")


class TopLogprob(BaseModel):
    id: int
    logprob: float


class DepthScores(BaseModel):
    depth: int
    logprobs: list[float | None] = Field(description="Null for the first tokens, which no draft can name, and outside the mask.")
    hits: list[bool | None] = Field(description="Whether this depth's likeliest token is the one that came.")


class SequenceScores(BaseModel):
    """Of one sequence, over its tokens from `prompt_length` on; null outside the mask."""

    index: int
    version: int = Field(description="The weights that made these numbers.")
    token_ids: list[int] = Field(description="The scored tokens.")
    logprobs: list[float | None]
    entropy: list[float | None]
    top_logprobs: list[list[TopLogprob]] | None = None
    mtp: list[DepthScores] | None = None
    routes: RoutesField | None = None


class LogprobsResponse(BaseModel):
    object: Literal["logprobs"] = "logprobs"
    model: str
    data: list[SequenceScores]
    usage: dict[str, int]


class CompletionRequest(BaseModel):
    """OpenAI's completions for scoring only: `echo` with `max_tokens: 0`.

    Sampling fields are accepted, because clients send them with every request, and have no effect.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = False
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    n: int | None = 1
    best_of: int | None = 1
    stream: bool | None = False
    suffix: str | None = None
    return_tokens_as_token_ids: bool | None = Field(False, description="Tokens by their ids, as token_id:N.")
    user: str = Field("", max_length=128)

    # Sampling fields, which have no effect.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: dict[str, bool] | None = None

    def check(self) -> None:
        """Raise RequestRefused for a request that would generate, or that the server does not support."""
        if not self.echo or self.max_tokens != 0:
            raise RequestRefused("echo, max_tokens: this server scores and does not generate; send echo: true and max_tokens: 0")
        if (self.n or 1) != 1 or (self.best_of or 1) != 1 or self.stream:
            raise RequestRefused("n, best_of, stream: not supported, the server sends one whole answer; leave them out")
        if self.suffix:
            raise RequestRefused("suffix: this server does not insert text; leave it out")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int] = Field(description="Where each token begins in the text, in characters.")
    bytes: list[list[int]] | None = Field(description="The bytes of each token, which may be a part of a character.")


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["length"] = "length"


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: dict[str, int]
