"""The section `rollout`: what generates, how it samples and speculates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mtpctl.families.shape import ModelShape
from mtpctl.recipe.parallel import divides
from mtpctl.recipe.section import Complaints, Float, Fraction, HomePath, NonNegativeInt, PositiveFloat, PositiveInt, Section

VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves room for; an adapter of another rank takes the next one."""


class SpeculationConfig(Section):
    num_tokens: NonNegativeInt = Field(1, description="Draft tokens a step (k); 0: no speculation.")
    auto: bool = Field(
        False, description="From 0 to num_tokens a step, as measured to pay on live load; looked at again as load and weights change."
    )


class RolloutBase(Section):
    replicas: PositiveInt = Field(1, description="Engines.")
    tp: PositiveInt = Field(1, description="Tensor-parallel ranks of each engine.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling; below 1 needs a correction to train on.")
    top_k: NonNegativeInt = Field(0, description="Top-k sampling; 0: off; else needs a correction to train on.")
    max_tokens: PositiveInt = Field(1024, description="Response tokens, at most.")
    context: PositiveInt | None = Field(None, description="Prompt and response tokens, at most; default: the model's.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="Strings that end a response.")
    stop_ids: list[NonNegativeInt] = Field([], description="Tokens that end a response, beside the tokenizer's end token.")
    environment: Literal["single", "calculator"] = Field(
        "single", description="What answers the model's turns. single: nothing; calculator: computes what stands in <calc>…</calc>."
    )
    max_turns: PositiveInt = Field(8, description="Turns of the model in one response, with an environment.")
    dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: the trainer's precision.")
    max_in_flight: PositiveInt = Field(256, description="Requests an engine works on at once.")
    kv_cache_bytes: PositiveInt | None = Field(None, description="KV cache of each engine; default: by gpu_memory.")
    gpus: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        None, description="Share of a card that each engine rank takes, beside others on it; default: what logprob.gpus leaves."
    )
    gpu_memory: Fraction = Field(0.85, description="Share of the card that the engine may fill.")
    deadline_s: PositiveFloat = Field(
        600.0,
        description="Seconds that an engine may work on a response, all its turns together, before it is cut; waiting does not count.",
    )
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a replica within an hour before it is quarantined.")
    threads: NonNegativeInt = Field(0, description="CPU threads of an engine; 0: one beside a card, else its own choice.")
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    engine_args: dict[str, Any] = Field({}, description="Passed to the engine as they are, checked against its option names.")


class VllmConfig(RolloutBase):
    engine: Literal["vllm"] = Field("vllm", description="What generates.")
    eager: bool = Field(False, description="No compilation and no CUDA graphs: faster to start, slower to run.")


class SglangConfig(RolloutBase):
    engine: Literal["sglang"] = Field("sglang", description="What generates.")
    python: HomePath | None = Field(None, description="Interpreter of the environment that holds SGLang.")
    draft_top_k: PositiveInt = Field(1, description="Branches that each step of the draft tree grows; 1: a chain.")
    draft_steps: PositiveInt | None = Field(None, description="Steps of the draft tree; default, and a must for a chain: num_tokens.")


RolloutConfig = Annotated[VllmConfig | SglangConfig, Field(discriminator="engine")]


COLDEST = 0.01
"""vLLM 0.32 raises lower temperatures to this one (`SamplingParams.__post_init__`)."""


def vllm_fits(rollout: VllmConfig) -> Complaints:
    """What vLLM would change without a word."""
    if rollout.temperature < COLDEST:
        yield f"rollout.temperature: vLLM samples at {COLDEST} where less is asked for; got {rollout.temperature}"


def sglang_fits(rollout: SglangConfig) -> Complaints:
    """What SGLang needs, and what it cannot do."""
    if rollout.python and not Path(rollout.python).is_file():
        yield f"rollout.python: there is no interpreter {rollout.python}"
    if rollout.top_p < 1 or rollout.top_k:
        name = "top_p" if rollout.top_p < 1 else "top_k"
        yield f"rollout.{name}: SGLang's log-probs are of the whole distribution, not of what is kept; set rollout.engine: vllm"
    if rollout.kv_cache_bytes is not None:
        yield "rollout.kv_cache_bytes: SGLang sizes its cache by a share of the card; set rollout.gpu_memory instead"
    if rollout.speculation.auto:
        yield "rollout.speculation.auto: works with rollout.engine: vllm; set it to false"
    k, steps = rollout.speculation.num_tokens, rollout.draft_steps
    if k and rollout.draft_top_k == 1 and steps not in (None, k):
        yield f"rollout.draft_steps: a chain of {k} draft tokens takes {k} steps, got {steps}; leave it out or raise draft_top_k"
    if k and rollout.draft_top_k > 1 and steps is None:
        yield "rollout.draft_steps: a tree of draft tokens (draft_top_k above 1) needs its depth; set it"


def lengths_fit(rollout: RolloutBase, shape: ModelShape) -> Complaints:
    """Tokens and positions that the model does not have."""
    if beyond := [token for token in rollout.stop_ids if token >= shape.vocab]:
        yield f"rollout.stop_ids: the model's vocabulary has {shape.vocab} tokens, got {beyond[0]}"
    if rollout.context is not None and rollout.context > shape.max_positions:
        yield f"rollout.context: the model has {shape.max_positions} positions, got {rollout.context}"
    context = min(rollout.context or shape.max_positions, shape.max_positions)
    if rollout.max_tokens >= context:
        limit = "rollout.context" if rollout.context else "the model's positions"
        yield f"rollout.max_tokens: must leave room for a prompt in {limit}: {context}, got {rollout.max_tokens}"


def heads_split(tp: int, shape: ModelShape) -> Complaints:
    """Engines that cannot cut the attention heads over `tp` ranks."""
    yield from divides(tp, {"attention heads": shape.heads}, "rollout.tp")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        yield f"rollout.tp: {tp} neither divides {shape.kv_heads} key-value heads nor is a multiple of them"
