"""Request and response bodies of the HTTP routes, as in the OpenAPI page."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from mtpctl.logprob.protocol import RequestRefused

TokenId = Annotated[int, Strict()]
MaskBit = Annotated[int, Strict(), Field(ge=0, le=1)]
Version = Annotated[int, Strict(), Field(ge=0, le=1 << 53)]

MAX_SEQUENCES = 1024
"""Maximum sequences per HTTP request."""
MAX_TOP_LOGPROBS = 32
MAX_WAIT_S = 600.0


class RoutesField(BaseModel):
    """The experts of a sequence's first tokens: [tokens, MoE layers, experts per token], in base64, little-endian, in C order."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["uint8", "uint16"] = Field(description="uint8 for up to 256 experts, else uint16.")
    shape: Annotated[list[Annotated[int, Strict(), Field(ge=0)]], Field(min_length=3, max_length=3)]
    data: str


class LogprobsRequest(BaseModel):
    """Sequences to score: token ids, or text that the served tokenizer encodes."""

    model_config = ConfigDict(extra="forbid")

    token_ids: list[TokenId] | list[list[TokenId]] | None = Field(None, description="One sequence, or several.")
    text: str | list[str] | None = Field(None, description="Text to encode and score: one, or several.")
    prompt_length: TokenId | list[TokenId] = Field(1, description="Tokens before the scored ones, for all sequences or for each.")
    mask: list[MaskBit] | list[list[MaskBit]] | None = Field(None, description="1 or 0 per scored token; 0: null in the response.")
    temperature: float = Field(1.0, gt=0, description="Temperature of the distribution.")
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description="Most likely tokens to return per position.")
    mtp: bool = Field(False, description="Also return log-probs and greedy hits of every MTP depth.")
    routes: RoutesField | list[RoutesField | None] | None = Field(
        None, description="Experts of the first tokens; the model chooses those of the other tokens."
    )
    record_routes: bool = Field(False, description="Also return the experts of the tokens.")
    version: Version | None = Field(None, description="Only this weight version.")
    at_least: Version | None = Field(None, description="This weight version or a newer one; waits for it.")
    timeout_s: float = Field(60.0, gt=0, le=MAX_WAIT_S, description="Seconds to wait for the response.")
    stream: bool = Field(False, description="One JSON line per sequence, in the order in which they finish.")
    user: str = Field("", max_length=128, description="Users get equal shares of a full server.")


class TopLogprob(BaseModel):
    id: int
    logprob: float


class DepthScores(BaseModel):
    depth: int
    logprobs: list[float | None] = Field(description="Null for the first tokens, which cannot be drafted, and outside the mask.")
    hits: list[bool | None] = Field(description="Whether this depth's most likely token is the actual one.")


class SequenceScores(BaseModel):
    """Scores of one sequence, for its tokens from `prompt_length` on. Outside the mask, values are null, and `top_logprobs` are empty."""

    index: int
    version: int = Field(description="The weight version.")
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

    Sampling fields are accepted without effect, because clients send them with every request.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = False
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int | None = 1
    best_of: int | None = 1
    stream: bool | None = False
    suffix: str | None = None
    return_tokens_as_token_ids: bool | None = Field(False, description="Tokens as their ids, token_id:N.")
    user: str = Field("", max_length=128)

    # Sampling fields.
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
        """Raise RequestRefused for a request to generate, or for unsupported fields."""
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
    text_offset: list[int] = Field(description="Start of each token in the text, in characters.")
    bytes: list[list[int]] | None = Field(description="The bytes of each token, which may be part of a character.")


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
