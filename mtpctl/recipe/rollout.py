"""The section `rollout`: the engines that generate, how they sample and speculate."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.parallel import divides
from mtpctl.recipe.section import Complaints, Float, Fraction, HomePath, NonNegativeInt, PositiveFloat, PositiveInt, Section
from mtpctl.user_code import is_reference, missing_file

VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM reserves memory for; an adapter of a rank in between takes the next larger one."""


ENVIRONMENTS = {
    "calculator": "mtpctl.environments.built_in:Calculator",
    "python": "mtpctl.sandbox.environment:Python",
}
"""The class behind each name that comes with mtpctl; `single` is none. It is imported when it is used."""

VERIFIERS_PREFIX = "verifiers:"
"""What stands before the name of an environment of the package verifiers."""


class SpeculationConfig(Section):
    num_tokens: NonNegativeInt = Field(1, description="Draft tokens of a step (k); 0: no speculation.")
    draft_method: Literal["greedy", "probabilistic"] = Field(
        "greedy",
        description="What is drafted. greedy: the MTP head's first choice; probabilistic: a token sampled from its distribution at the "
        "request's temperature. What is generated follows the same distribution with both.",
    )
    auto: bool = Field(
        False, description="Draft 0 to num_tokens a step, whichever is fastest on the live load; measured again as load and weights change."
    )


class ReplicaRange(Section):
    min: PositiveInt = Field(1, description="Rollout engines that a run is planned with; it waits for room for them.")
    max: PositiveInt = Field(
        1, description="Rollout engines, at most: those beyond min join while the run goes on, where hosts have room, and leave with them."
    )

    def clipped(self, replicas: int) -> int:
        """The number within these bounds that is next to `replicas`."""
        return min(max(replicas, self.min), self.max)


def _kind_of_replicas(value: object) -> str:
    """Which form of `rollout.replicas` a value has: the tag of its type in the annotation of the key."""
    return "range" if isinstance(value, (dict, ReplicaRange)) else "number"


class RolloutBase(Section):
    replicas: Annotated[Annotated[PositiveInt, Tag("number")] | Annotated[ReplicaRange, Tag("range")], Discriminator(_kind_of_replicas)] = (
        Field(1, description="Rollout engines: a number, or {min, max} for a number that follows the hosts of the cluster.")
    )
    tp: PositiveInt = Field(1, description="Tensor-parallel ranks of each engine.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling; below 1, training needs train.rl.correction.")
    top_k: NonNegativeInt = Field(0, description="Top-k sampling; 0: off; above 0, training needs train.rl.correction.")
    max_tokens: PositiveInt = Field(1024, description="Response tokens, at most.")
    context: PositiveInt | None = Field(None, description="Prompt and response tokens, at most; default: the model's.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="Strings that end a response.")
    stop_ids: list[NonNegativeInt] = Field([], description="Tokens that end a response, in addition to the model's end tokens.")
    end_ids: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = Field(
        None,
        description="The model's end tokens; default: the EOS token of the tokenizer, eos_token_id of generation_config.json and "
        "config.json, and the token that closes an assistant turn in the chat template.",
    )
    environment: str = Field(
        "single",
        description="What replies to the model: a class of yours, as FILE.py:NAME or MODULE:NAME; single: nothing; "
        "calculator: computes the expression inside <calc>…</calc>; verifiers:NAME: an environment of the package verifiers.",
    )
    environment_args: dict[str, object] = Field(
        {}, description="Keyword arguments with which the environment is made; of verifiers: its configuration, the block env."
    )
    environment_eval_args: dict[str, object] = Field(
        {}, description="Of verifiers: what is merged into environment_args for held-out problems, such as another split."
    )
    agent: str | None = Field(
        None,
        description="What works on a problem by asking the model: a function of yours, as FILE.py:NAME or MODULE:NAME, of the problem and "
        "the base URL for an OpenAI client.",
    )
    agent_args: dict[str, object] = Field({}, description="Further arguments of the agent, by name.")
    agents: PositiveInt = Field(128, description="Agents at work at once.")
    gateway: bool = Field(False, description="Problems are worked on by agents that come over the network and ask for them.")
    gateway_host: str = Field("127.0.0.1", min_length=1, description="Address at which agents ask the model.")
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="Its port; 0: any that is free.")
    gateway_fields: Literal["reject", "ignore"] = Field(
        "reject",
        description="What happens to fields of an agent's request that are not honored, such as a temperature in training. reject: status "
        "400 names the field; ignore: the request is answered, and the header mtpctl-ignored lists the fields.",
    )
    agents_per_client: PositiveInt | None = Field(
        None,
        description="Maximum number of open trajectories per client address, for agents that connect over the network; default: three "
        "quarters of agents.",
    )
    agent_idle_s: PositiveFloat = Field(
        300.0, description="Seconds without a request after which the trajectory of an agent that connects over the network ends."
    )
    tool_parser: str | None = Field(
        None, description="vLLM's parser for the tool calls in an answer to an agent; default: by the chat template."
    )
    max_turns: PositiveInt = Field(8, description="Turns of the model in one response with an environment, answers in one of an agent.")
    dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: the trainer's precision.")
    max_in_flight: PositiveInt = Field(256, description="Requests that an engine works on at once.")
    kv_cache_bytes: PositiveInt | None = Field(None, description="Bytes of each engine's KV cache; default: what gpu_memory leaves for it.")
    gpus: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        None, description="Share of a card that each engine rank takes, beside others on it; default: what logprob.gpus leaves."
    )
    gpu_memory: Fraction = Field(0.85, description="Share of the card that the engine may fill.")
    deadline_s: PositiveFloat = Field(
        600.0,
        description="Seconds that an engine may work on a response, all turns together, before it is cut; time in a queue does not count.",
    )
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a replica within an hour before it is quarantined.")
    threads: NonNegativeInt = Field(0, description="CPU threads of an engine; 0: one with a card, else the engine's own choice.")
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    engine_args: dict[str, object] = Field(
        {}, description="Further options of the engine, passed on as they are; an unknown name is an error."
    )

    @property
    def elastic(self) -> bool:
        """Whether the number of engines may change while a run goes on."""
        return isinstance(self.replicas, ReplicaRange)

    @property
    def replica_range(self) -> ReplicaRange:
        """The least and the most engines; both are the number where the recipe has one."""
        return self.replicas if isinstance(self.replicas, ReplicaRange) else ReplicaRange(min=self.replicas, max=self.replicas)

    @property
    def client_limit(self) -> int:
        """Trajectories that one address may have open over the network."""
        return self.agents_per_client if self.agents_per_client is not None else max(self.agents * 3 // 4, 1)

    @property
    def agents_play(self) -> bool:
        """Whether responses are an agent's trajectories, and not answers to a prompt."""
        return self.agent is not None or self.gateway or self.verifiers is not None

    @property
    def verifiers(self) -> str | None:
        """The name of the environment of the package verifiers that plays; None for any other."""
        return self.environment.removeprefix(VERIFIERS_PREFIX) if self.environment.startswith(VERIFIERS_PREFIX) else None

    @property
    def started_agent(self) -> tuple[str, dict[str, object]] | None:
        """The function that works on each problem in processes of the run, and its arguments by name; None where there is none."""
        if (name := self.verifiers) is not None:
            args = {"args": self.environment_args, "eval_args": self.environment_eval_args, "max_turns": self.max_turns}
            return "mtpctl.environments.verifiers:play", {"name": name, **args}
        return None if self.agent is None else (self.agent, self.agent_args)


class VllmConfig(RolloutBase):
    engine: Literal["vllm"] = Field("vllm", description="vLLM, on cards and on CPUs.")
    eager: bool = Field(False, description="No compilation and no CUDA graphs: faster to start, slower to run.")


class SglangConfig(RolloutBase):
    engine: Literal["sglang"] = Field("sglang", description="SGLang, on cards.")
    python: HomePath | None = Field(None, description="Interpreter of the environment that holds SGLang.")
    draft_top_k: PositiveInt = Field(1, description="Branches that each step of the draft tree grows; 1: a chain.")
    draft_steps: PositiveInt | None = Field(
        None, description="Depth of the draft tree, needed with draft_top_k above 1; a chain is num_tokens deep."
    )


RolloutConfig = Annotated[VllmConfig | SglangConfig, Field(discriminator="engine")]


LOWEST_TEMPERATURE = 0.01
"""vLLM 0.32 raises lower temperatures to this one (`SamplingParams.__post_init__`)."""


def check_scale(rollout: RolloutBase, replicas: int) -> None:
    """Check that a run with this section may be scaled to so many replicas. Raises UserError where it may not."""
    bounds = rollout.replica_range
    if not rollout.elastic:
        least, most = sorted((bounds.min, replicas))
        raise UserError(
            f"rollout.replicas: {bounds.min} is a number, which stays as it is; stop the run, and resume it with "
            f"--set 'rollout.replicas={{min: {least}, max: {most}}}'"
        )
    if not bounds.min <= replicas <= bounds.max:
        raise UserError(f"--replicas: {replicas} is not within rollout.replicas: min {bounds.min}, max {bounds.max}")


def replicas_fit(rollout: RolloutBase) -> Complaints:
    """Refuse a `rollout.replicas` whose min is above its max."""
    given = rollout.replica_range
    if given.min > given.max:
        yield f"rollout.replicas: min: {given.min} is more than max: {given.max}; raise max, or lower min"


def speculation_fits(rollout: RolloutBase) -> Complaints:
    """Refuse an automatic choice among no drafts."""
    if rollout.speculation.auto and not rollout.speculation.num_tokens:
        yield "rollout.speculation.auto: there is nothing to switch with num_tokens: 0; set num_tokens, or auto: false"


def environment_fits(rollout: RolloutBase) -> Complaints:
    """Refuse names that are neither an environment of mtpctl's nor a class of the user's own."""
    names = ["single", *ENVIRONMENTS]
    if rollout.environment_eval_args and rollout.verifiers is None:
        yield "rollout.environment_eval_args: only an environment of verifiers has other arguments for held-out problems; leave them out"
    if rollout.verifiers == "":
        yield "rollout.environment: verifiers: stands before the name of an environment; write verifiers:NAME"
    if rollout.environment == "single" and rollout.environment_args:
        yield "rollout.environment_args: there is no environment to be made with them; set rollout.environment, or leave them out"
    elif rollout.environment not in names and not is_reference(rollout.environment):
        near = difflib.get_close_matches(rollout.environment, names, 1)
        known = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}; name a class of your own as FILE.py:NAME"
        yield f"rollout.environment: mtpctl has no environment {rollout.environment!r}; {known}"


def agents_fit(rollout: RolloutBase) -> Complaints:
    """Refuse an agent that is not there, and keys of agents and environments that exclude each other."""
    if rollout.agent is not None:
        if not is_reference(rollout.agent):
            yield f"rollout.agent: {rollout.agent!r} is neither FILE.py:NAME nor MODULE:NAME"
        elif told := missing_file(rollout.agent):
            yield f"rollout.agent: {told}"
        if rollout.gateway:
            yield "rollout.gateway: the run starts its own agent (rollout.agent); set one of the two"
    elif rollout.agent_args:
        yield "rollout.agent_args: there is no agent to be called with them; set rollout.agent, or leave them out"
    if (rollout.agent is not None or rollout.gateway) and rollout.environment != "single":
        yield f"rollout.environment: {rollout.environment}, but an agent has its own; set single, or leave the agent out"


def vllm_fits(rollout: VllmConfig) -> Complaints:
    """Refuse settings that vLLM would change silently."""
    if rollout.temperature < LOWEST_TEMPERATURE:
        yield f"rollout.temperature: vLLM samples at {LOWEST_TEMPERATURE} where less is asked for; got {rollout.temperature}"


def sglang_fits(rollout: SglangConfig) -> Complaints:
    """Refuse what SGLang cannot do, and what it needs and does not have."""
    if rollout.python and not Path(rollout.python).is_file():
        yield f"rollout.python: there is no interpreter {rollout.python}"
    if rollout.top_p < 1 or rollout.top_k:
        name = "top_p" if rollout.top_p < 1 else "top_k"
        yield f"rollout.{name}: SGLang's log-probs are of the whole distribution, not of what is kept; set rollout.engine: vllm"
    if rollout.end_ids is not None:
        yield "rollout.end_ids: SGLang always stops at the end tokens of the model's configs too; leave it out, or set rollout.engine: vllm"
    if rollout.kv_cache_bytes is not None:
        yield "rollout.kv_cache_bytes: SGLang sizes its cache by a share of the card; set rollout.gpu_memory instead"
    if rollout.speculation.auto:
        yield "rollout.speculation.auto: works with rollout.engine: vllm; set it to false"
    if rollout.speculation.draft_method == "probabilistic":
        yield "rollout.speculation.draft_method: SGLang drafts greedily; set greedy, or rollout.engine: vllm"
    k, steps = rollout.speculation.num_tokens, rollout.draft_steps
    if k and rollout.draft_top_k == 1 and steps not in (None, k):
        yield f"rollout.draft_steps: a chain of {k} draft tokens takes {k} steps, got {steps}; leave it out or raise draft_top_k"
    if k and rollout.draft_top_k > 1 and steps is None:
        yield "rollout.draft_steps: a tree of draft tokens (draft_top_k above 1) needs its depth; set it"


def lengths_fit(rollout: RolloutBase, shape: ModelShape) -> Complaints:
    """Refuse token ids and positions that the model does not have."""
    for name, tokens in (("stop_ids", rollout.stop_ids), ("end_ids", rollout.end_ids or [])):
        if beyond := [token for token in tokens if token >= shape.vocab]:
            yield f"rollout.{name}: the model's vocabulary has {shape.vocab} tokens, got {beyond[0]}"
    if rollout.context is not None and rollout.context > shape.max_positions:
        yield f"rollout.context: the model has {shape.max_positions} positions, got {rollout.context}"
    context = min(rollout.context or shape.max_positions, shape.max_positions)
    if rollout.max_tokens >= context:
        limit = "rollout.context" if rollout.context else "the model's positions"
        yield f"rollout.max_tokens: must leave room for a prompt in {limit}: {context}, got {rollout.max_tokens}"


def heads_split(tp: int, shape: ModelShape) -> Complaints:
    """Refuse a tensor-parallel size over which attention heads cannot be split."""
    yield from divides(tp, {"attention heads": shape.heads}, "rollout.tp")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        yield f"rollout.tp: {tp} neither divides {shape.kv_heads} key-value heads nor is a multiple of them"
