"""The section `rollout`: the engines that generate, their sampling and speculation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from mtpctl.errors import UserError
from mtpctl.families.reading import missing_fields, unsupported_by_vllm_cpu
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.section import Complaints, Float, Fraction, HomePath, NonNegativeInt, PositiveFloat, PositiveInt, Section, check_divides
from mtpctl.recipe.train import EXPERT_TARGETS
from mtpctl.user_code import is_code_reference, missing_file

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

LOWEST_TEMPERATURE = 0.01
"""Minimum temperature of vLLM 0.32, which raises lower ones to it (`SamplingParams.__post_init__`)."""
VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM allocates memory for; other ranks use the next larger one."""

ENVIRONMENTS = {"calculator": "mtpctl.environments.built_in:Calculator", "python": "mtpctl.environments.built_in:Python"}
"""Built-in environments by name, as `MODULE:CLASS`, imported on first use. `single` has no class."""

VERIFIERS_PREFIX = "verifiers:"
"""Prefix of the name of an environment of the package verifiers."""


@dataclass(frozen=True)
class EngineTraits:
    """What an engine supports. Code outside the engine's package checks these traits instead of its name."""

    title: str
    """Name in messages."""
    cpu: bool
    """Runs on CPUs."""
    own_environment: bool
    """Runs in a separate Python environment, `rollout.python`."""
    adapters: bool
    """Loads LoRA adapters from weight syncs."""
    release_kv: bool
    """Can free its KV cache during a weight sync."""
    keep_kv: bool
    """Can keep the KV cache of running requests across a weight sync."""
    routes: bool
    """Returns the experts of each token."""
    mtp_by_depth: bool
    """Runs each MTP layer at its depth, only on GPUs and only once each."""
    unquantized_only: bool
    """Updates live weights only without quantization and pipeline stages."""
    other_drafters: bool
    """Can draft without an MTP head: by n-grams or suffixes, or with EAGLE-3 or DFlash."""
    block_verification: bool
    """Can verify the drafts of a step jointly (`rollout.speculation.verification: block`), on GPUs."""
    bitwise: bool
    """Can compute the trainer's log-probs to the last bit (`numerics: bitwise`)."""
    fp8_syncs: bool
    """Receives quantized weights (`rollout.quantization: fp8`)."""
    deterministic_arg: str | None = None
    """Name in `rollout.engine_args` that makes seeded sampling repeatable; None: it always is."""


class SpeculationConfig(Section):
    method: Literal["model", "ngram", "suffix"] = Field(
        "model",
        description="model: the model's own drafter (MTP layers, EAGLE-3 or DFlash); ngram: what followed the last tokens earlier in the "
        "sequence; suffix: the same over all responses of the engine (needs the package arctic-inference).",
    )
    num_tokens: NonNegativeInt = Field(1, description="Draft tokens per step (k); 0: no speculation.")
    draft_method: Literal["greedy", "probabilistic"] = Field(
        "greedy",
        description="greedy: drafts are the MTP head's most likely tokens; probabilistic: drafts are sampled from its distribution at the "
        "request's temperature. The output distribution is the same.",
    )
    verification: Literal["token", "block"] = Field(
        "token",
        description="token: drafts are verified one after another; block: the drafts of a step are verified jointly, which accepts more of "
        "them if they are probabilistic, and needs vLLM on a GPU. The output distribution is the same.",
    )
    quantization: Literal["none", "fp8"] | None = Field(
        None, description="Weights of the MTP layers in the engine; default: rollout.quantization. Drafters in drafter/ stay in bf16."
    )
    auto: bool = Field(False, description="Draft 0 to num_tokens tokens per step, whichever is fastest; measured during the run.")

    @property
    def model_tokens(self) -> int:
        """Draft tokens per step of the model's own drafter."""
        return self.num_tokens if self.method == "model" else 0


class ReplicaRange(Section):
    min: PositiveInt = Field(1, description="Rollout engines that the run is planned with; the run waits for hosts for them.")
    max: PositiveInt = Field(1, description="Maximum rollout engines: those beyond min join and leave with the hosts of the cluster.")

    def clip(self, replicas: int) -> int:
        """`replicas` clipped to these bounds."""
        return min(max(replicas, self.min), self.max)


def _replicas_tag(value: object) -> str:
    """The union tag of a value of `rollout.replicas`: a number or a range."""
    return "range" if isinstance(value, (dict, ReplicaRange)) else "number"


class RolloutBase(Section):
    traits: ClassVar[EngineTraits]
    replicas: Annotated[Annotated[PositiveInt, Tag("number")] | Annotated[ReplicaRange, Tag("range")], Discriminator(_replicas_tag)] = (
        Field(1, description="Rollout engines: a number, or {min, max} for a number that follows the hosts of the cluster.")
    )
    tp: PositiveInt = Field(1, description="Tensor-parallel ranks per engine.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling; below 1, training needs train.rl.correction.")
    top_k: NonNegativeInt = Field(0, description="Top-k sampling; 0: off; above 0, training needs train.rl.correction.")
    max_tokens: PositiveInt = Field(1024, description="Maximum response tokens.")
    context: PositiveInt | None = Field(None, description="Maximum prompt and response tokens; default: the model's.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="Strings that end a response.")
    stop_ids: list[NonNegativeInt] = Field([], description="Token ids that end a response, in addition to the model's end tokens.")
    end_ids: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = Field(
        None,
        description="The model's end tokens; default: the EOS token of the tokenizer, eos_token_id of generation_config.json and "
        "config.json, and the token that closes an assistant turn in the chat template.",
    )
    environment: str = Field(
        "single",
        description="The environment: your class, as FILE.py:NAME or MODULE:NAME; single: one turn; calculator: computes the expression in "
        "<calc>…</calc>; python: runs the model's code; verifiers:NAME: an environment of the package verifiers.",
    )
    environment_args: dict[str, object] = Field({}, description="Keyword arguments of the environment; for verifiers the block env.")
    environment_eval_args: dict[str, object] = Field({}, description="For verifiers: overrides of environment_args for held-out problems.")
    agent: str | None = Field(
        None,
        description="Agent that solves a problem with the model: your function, as FILE.py:NAME or MODULE:NAME, of the problem and the "
        "base URL of an OpenAI client.",
    )
    agent_args: dict[str, object] = Field({}, description="Further keyword arguments of the agent.")
    agents: PositiveInt = Field(128, description="Concurrent agents.")
    gateway: bool = Field(False, description="Agents connect over the network and request problems.")
    gateway_host: str = Field("127.0.0.1", min_length=1, description="Address of the gateway's model endpoint.")
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="Port of the gateway; 0: any free port.")
    gateway_fields: Literal["reject", "ignore"] = Field(
        "reject",
        description="Unsupported fields of an agent's request, such as a temperature in training. reject: status 400 names the field; "
        "ignore: the request is served, and the header mtpctl-ignored lists the fields.",
    )
    agents_per_client: PositiveInt | None = Field(
        None,
        description="Maximum number of open trajectories per client address, for agents that connect over the network; default: three "
        "quarters of agents.",
    )
    agent_idle_s: PositiveFloat = Field(300.0, description="Seconds without a request after which a remote agent's trajectory ends.")
    tool_parser: str | None = Field(None, description="vLLM's parser of tool calls in responses to an agent; default: by chat template.")
    max_turns: PositiveInt = Field(8, description="Maximum model turns per response with an environment; maximum answers to an agent.")
    dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: the trainer's precision.")
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="fp8: the engine computes attention, MLPs and experts with FP8 weights in blocks of 128 x 128, which the trainer "
        "quantizes at each sync. Embeddings, LM head, routers and norms stay in bf16. For vLLM.",
    )
    max_in_flight: PositiveInt = Field(256, description="Maximum concurrent requests per engine.")
    kv_cache_bytes: PositiveInt | None = Field(None, description="KV cache per engine in bytes; default: the rest of gpu_memory.")
    gpus: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        None, description="Share of a GPU per engine rank; default: the share that logprob.gpus leaves."
    )
    on_trainer_gpus: NonNegativeInt = Field(0, description="Number of engines on the trainer's GPUs, on the share that train.gpus leaves.")
    gpu_memory: Fraction | None = Field(
        None,
        description="Share of GPU memory for an engine; default: 0.85, at most 0.95 of its GPU share.",
    )
    deadline_s: PositiveFloat = Field(
        600.0,
        description="Seconds of engine time for a response, all turns together, after which it is truncated; waiting in a queue is "
        "excluded.",
    )
    max_restarts: NonNegativeInt = Field(3, description="Restarts of a replica within an hour before it is quarantined.")
    threads: NonNegativeInt = Field(0, description="CPU threads of an engine; 0: one on a GPU, else the engine's default.")
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    engine_args: dict[str, object] = Field({}, description="Further engine options, passed through; an unknown name is an error.")

    @property
    def drafter_quantization(self) -> str:
        """`speculation.quantization`, with its default resolved."""
        return self.speculation.quantization or self.quantization

    @property
    def elastic(self) -> bool:
        """Whether the number of engines may change during a run."""
        return isinstance(self.replicas, ReplicaRange)

    @property
    def replica_range(self) -> ReplicaRange:
        """The bounds of the number of engines, which are equal for a fixed number."""
        return self.replicas if isinstance(self.replicas, ReplicaRange) else ReplicaRange(min=self.replicas, max=self.replicas)

    @property
    def client_limit(self) -> int:
        """Maximum open trajectories per client address."""
        return self.agents_per_client if self.agents_per_client is not None else max(self.agents * 3 // 4, 1)

    @property
    def uses_agents(self) -> bool:
        """Whether responses are trajectories of an agent."""
        return self.agent is not None or self.gateway or self.verifiers is not None

    @property
    def verifiers(self) -> str | None:
        """The name of the verifiers environment; None for other environments."""
        return self.environment.removeprefix(VERIFIERS_PREFIX) if self.environment.startswith(VERIFIERS_PREFIX) else None

    @property
    def started_agent(self) -> tuple[str, dict[str, object]] | None:
        """The agent that the run starts in its own processes, and its keyword arguments; None if there is none."""
        if (name := self.verifiers) is not None:
            args = {"args": self.environment_args, "eval_args": self.environment_eval_args, "max_turns": self.max_turns}
            return "mtpctl.environments.verifiers:play", {"name": name, **args}
        return None if self.agent is None else (self.agent, self.agent_args)


class VllmConfig(RolloutBase):
    engine: Literal["vllm"] = Field("vllm", description="vLLM, on GPUs and CPUs.")
    traits: ClassVar[EngineTraits] = EngineTraits(
        "vLLM",
        cpu=True,
        own_environment=False,
        adapters=True,
        release_kv=True,
        keep_kv=True,
        routes=True,
        mtp_by_depth=True,
        unquantized_only=True,
        other_drafters=True,
        block_verification=True,
        bitwise=True,
        fp8_syncs=True,
    )
    eager: bool = Field(False, description="Disable compilation and CUDA graphs: faster to start, slower to run.")

    def check_engine(self) -> Complaints:
        """Report settings that vLLM would change silently."""
        if self.temperature < LOWEST_TEMPERATURE:
            yield f"rollout.temperature: the minimum of vLLM is {LOWEST_TEMPERATURE}, got {self.temperature}; raise it"


class SglangConfig(RolloutBase):
    engine: Literal["sglang"] = Field("sglang", description="SGLang, on GPUs.")
    traits: ClassVar[EngineTraits] = EngineTraits(
        "SGLang",
        cpu=False,
        own_environment=True,
        adapters=False,
        release_kv=False,
        keep_kv=False,
        routes=False,
        mtp_by_depth=False,
        unquantized_only=False,
        other_drafters=False,
        block_verification=False,
        bitwise=False,
        fp8_syncs=False,
        deterministic_arg="enable_deterministic_inference",
    )
    python: HomePath | None = Field(None, description="Python interpreter of SGLang's virtual environment.")
    draft_top_k: PositiveInt = Field(1, description="Branches per step of the draft tree; 1: a chain.")
    draft_steps: PositiveInt | None = Field(None, description="Depth of the draft tree, required if draft_top_k is above 1.")

    def check_engine(self) -> Complaints:
        """Report settings that SGLang does not support, and missing ones that it needs."""
        if self.python and not Path(self.python).is_file():
            yield f"rollout.python: there is no interpreter {self.python}"
        if self.top_p < 1 or self.top_k:
            name = "top_p" if self.top_p < 1 else "top_k"
            yield f"rollout.{name}: SGLang's log-probs are those of the unfiltered distribution; set rollout.engine: vllm"
        if self.end_ids is not None:
            yield "rollout.end_ids: SGLang also stops at the end tokens of the model's configs; leave it out, or set rollout.engine: vllm"
        if self.kv_cache_bytes is not None:
            yield "rollout.kv_cache_bytes: SGLang sizes its cache as a share of the GPU; set rollout.gpu_memory instead"
        if self.speculation.auto:
            yield "rollout.speculation.auto: works with rollout.engine: vllm; set it to false"
        if self.speculation.draft_method == "probabilistic":
            yield "rollout.speculation.draft_method: SGLang drafts greedily; set greedy, or rollout.engine: vllm"
        k, steps = self.speculation.num_tokens, self.draft_steps
        if k and self.draft_top_k == 1 and steps not in (None, k):
            yield f"rollout.draft_steps: a chain of {k} draft tokens takes {k} steps, got {steps}; leave it out or raise draft_top_k"
        if k and self.draft_top_k > 1 and steps is None:
            yield "rollout.draft_steps: a tree of draft tokens (draft_top_k above 1) needs its depth; set it"


RolloutConfig = Annotated[VllmConfig | SglangConfig, Field(discriminator="engine")]


def check_scale(rollout: RolloutBase, replicas: int) -> None:
    """Raise UserError if a run with this section cannot be scaled to this number of replicas."""
    bounds = rollout.replica_range
    if not rollout.elastic:
        low, high = sorted((bounds.min, replicas))
        raise UserError(
            f"rollout.replicas: {bounds.min} is a fixed number; stop the run, and resume it with "
            f"--set 'rollout.replicas={{min: {low}, max: {high}}}'"
        )
    if not bounds.min <= replicas <= bounds.max:
        raise UserError(f"--replicas: {replicas} is not within rollout.replicas: min {bounds.min}, max {bounds.max}")


def check_replicas(rollout: RolloutBase) -> Complaints:
    """Report a minimum above the maximum."""
    bounds = rollout.replica_range
    if bounds.min > bounds.max:
        yield f"rollout.replicas: min: {bounds.min} is more than max: {bounds.max}; raise max, or lower min"


def check_on_trainer_gpus(recipe: Recipe) -> Complaints:
    """Report engines on the trainer's GPUs for which `train.gpus` leaves no share, or that cannot share a GPU."""
    rollout, number = recipe.rollout, recipe.rollout.on_trainer_gpus
    if not number or "rl" not in recipe.train.stages:
        return
    field = "rollout.on_trainer_gpus"
    if recipe.device == "cpu":
        yield f"{field}: a run on CPUs has no GPUs; set it to 0"
    elif rollout.elastic:
        yield f"{field}: needs a fixed number of engines; write rollout.replicas as a number"
    elif number > rollout.replica_range.min:
        yield f"{field}: {number} is more than rollout.replicas: {rollout.replica_range.min}; raise replicas, or lower it"
    elif rollout.tp > 1:
        yield f"{field}: an engine on a share of a GPU has one rank, but rollout.tp is {rollout.tp}; set it to 0"
    elif recipe.train.gpus >= 1:
        yield f"{field}: train.gpus: {recipe.train.gpus:g} leaves nothing of the GPU; set train.gpus to the share that the trainer needs"


def check_speculation(rollout: RolloutBase) -> Complaints:
    """Report automatic speculation without draft tokens, and settings that the drafter or the engine does not support."""
    speculation = rollout.speculation
    if speculation.verification == "block":
        field = "rollout.speculation.verification"
        if not rollout.traits.block_verification:
            yield f"{field}: {rollout.traits.title} verifies token by token; set token, or rollout.engine: vllm"
        elif speculation.method != "model":
            yield f"{field}: drafts of {speculation.method} have no probabilities, so block accepts no more of them; set token"
        elif speculation.draft_method == "greedy":
            yield f"{field}: block accepts no more greedy drafts than token; set draft_method: probabilistic, or verification: token"
    if speculation.auto and not speculation.num_tokens:
        yield "rollout.speculation.auto: has no effect with num_tokens: 0; set num_tokens, or auto: false"
    if speculation.method == "model" or not speculation.num_tokens:
        return
    if not rollout.traits.other_drafters:
        yield f"rollout.speculation.method: {speculation.method} works with rollout.engine: vllm; set model"
    if speculation.auto:
        yield f"rollout.speculation.auto: works with method: model, not {speculation.method}; set it to false"
    if speculation.draft_method == "probabilistic":
        yield (
            f"rollout.speculation.draft_method: drafts of {speculation.method} have no probabilities, so they cannot be sampled; set greedy"
        )
    if speculation.method == "suffix" and find_spec("arctic_inference") is None:
        yield "rollout.speculation.method: suffix needs the package arctic-inference, which is not installed; install it, or set ngram"


def check_environment(rollout: RolloutBase) -> Complaints:
    """Report names that are neither built-in environments nor references to classes, and arguments without an environment."""
    names = ["single", *ENVIRONMENTS]
    if rollout.environment_eval_args and rollout.verifiers is None:
        yield "rollout.environment_eval_args: applies only to a verifiers environment; leave it out"
    if rollout.verifiers == "":
        yield "rollout.environment: verifiers: needs the name of an environment; write verifiers:NAME"
    if rollout.environment == "single" and rollout.environment_args:
        yield "rollout.environment_args: there is no environment to pass them to; set rollout.environment, or leave them out"
    elif rollout.environment not in names and not is_code_reference(rollout.environment):
        matches = difflib.get_close_matches(rollout.environment, names, 1)
        hint = f"did you mean {matches[0]}?" if matches else f"built in are {', '.join(names)}; name your own class as FILE.py:NAME"
        yield f"rollout.environment: mtpctl has no environment {rollout.environment!r}; {hint}"


def check_agents(rollout: RolloutBase) -> Complaints:
    """Report a missing agent, and keys of agents and environments that exclude each other."""
    if rollout.agent is not None:
        if not is_code_reference(rollout.agent):
            yield f"rollout.agent: {rollout.agent!r} is neither FILE.py:NAME nor MODULE:NAME"
        elif reason := missing_file(rollout.agent):
            yield f"rollout.agent: {reason}"
        if rollout.gateway:
            yield "rollout.gateway: the run starts its own agent (rollout.agent); set only one of the two"
    elif rollout.agent_args:
        yield "rollout.agent_args: there is no agent to pass them to; set rollout.agent, or leave them out"
    if (rollout.agent is not None or rollout.gateway) and rollout.environment != "single":
        yield f"rollout.environment: {rollout.environment}, but an agent has its own; set single, or leave the agent out"


def check_lengths(rollout: RolloutBase, shape: ModelShape) -> Complaints:
    """Report token ids and positions that the model does not have, and responses that leave no room for a prompt."""
    for name, tokens in (("stop_ids", rollout.stop_ids), ("end_ids", rollout.end_ids or [])):
        if invalid_ids := [token for token in tokens if token >= shape.vocab]:
            yield f"rollout.{name}: the model's vocabulary has {shape.vocab} tokens, got {invalid_ids[0]}"
    if rollout.context is not None and rollout.context > shape.max_positions:
        yield f"rollout.context: the model has {shape.max_positions} positions, got {rollout.context}; lower it, or raise model.context"
    context = min(rollout.context or shape.max_positions, shape.max_positions)
    if rollout.max_tokens >= context:
        limit = "rollout.context" if rollout.context else "the model's positions"
        yield f"rollout.max_tokens: must leave room for a prompt in {limit}: {context}, got {rollout.max_tokens}"


def check_tp(tp: int, shape: ModelShape) -> Complaints:
    """Report a tensor-parallel size that does not split the attention heads."""
    yield from check_divides(tp, {"attention heads": shape.heads}, "rollout.tp")
    for kv_heads in sorted({shape.kv_heads, shape.kv_heads_of("sliding_attention")}):
        if kv_heads % tp and tp % kv_heads:
            yield f"rollout.tp: {tp} neither divides {kv_heads} key-value heads nor is a multiple of them"


def check_engine_device(recipe: Recipe) -> Complaints:
    """Report an engine or block verification that needs a GPU in a run on CPUs."""
    if recipe.device == "cpu" and recipe.rollout.speculation.verification == "block" and recipe.rollout.traits.block_verification:
        yield "rollout.speculation.verification: vLLM on a CPU verifies token by token; set token, or cluster.device: cuda"
    if not recipe.rollout.traits.cpu and recipe.device == "cpu":
        yield f"rollout.engine: {recipe.rollout.engine} needs a GPU; set vllm, or cluster.device: cuda"


def check_served(recipe: Recipe, config: Mapping[str, object], shape: ModelShape) -> Complaints:
    """Report models that the engine would reject at run time, or compute differently from the trainer."""
    if not recipe.train.needs_rollout:
        return
    yield from missing_fields(config)
    if recipe.device != "cpu":
        return
    rollout, lora = recipe.rollout, recipe.train.lora
    if recipe.numerics == "default":  # otherwise these kernels are replaced
        yield from unsupported_by_vllm_cpu(shape, recipe.sent_precision)
    if rollout.engine_args.get("enable_prefix_caching"):
        # With drafts, the state of linear attention is copied by Triton kernels, which do not run on a CPU. The scan of Mamba-2 returns
        # only the last state of a prompt, but the cache needs the state at the end of every block.
        if "linear_attention" in shape.layer_kinds and rollout.speculation.num_tokens:
            yield (
                "rollout.engine_args: vLLM on a CPU has no prefix cache for linear attention with speculation; leave enable_prefix_caching "
                "out, or set rollout.speculation.num_tokens: 0"
            )
        if "mamba" in shape.layer_kinds:
            yield "rollout.engine_args: vLLM on a CPU has no prefix cache for Mamba-2; leave enable_prefix_caching out"
    if shape.moe and lora and "adapter" in recipe.sync.sections and EXPERT_TARGETS & set(lora.targets):
        yield (
            "train.lora.targets: vLLM on a CPU has no adapters for experts; leave out linear_fc1 and linear_fc2, "
            "or set sync.sections: [target, draft]"
        )
