"""Estimates the memory of a trainer rank, a rollout engine and a log-prob rank.

The estimates include weights, gradients, optimizer state, activations, the log-prob workspace, the key-value cache and the recurrent state
of linear attention. They do not include the CUDA context (except that of an engine on a shared GPU, `engine_reserve`), NCCL's buffers and
fragmentation: leave a tenth of the GPU for these.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtpctl.families.quantization import FP8_BLOCK
from mtpctl.families.shape import LayerKind, ModelShape
from mtpctl.families.tensors import tensor_shapes
from mtpctl.plan.buckets import adapted_weights
from mtpctl.plan.placement import engine_memory_share, shares_gpu
from mtpctl.plan.sharding import (
    Stage,
    attention_width,
    drafter_width,
    expert_tp,
    ffn_width,
    head_widths,
    layer_widths,
    optimizer_ranks,
    peak_transient,
    peak_width,
    stages,
)
from mtpctl.recipe.numerics import BLOCK_BYTES, sent_in_fp8
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import Replay
from mtpctl.routes import RouteShape

GIB = 1 << 30
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a weight, by its precision."""
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Bytes per parameter: fp32 masters of bf16 weights, Adam's two moments, and the fp32 gradient buffer."""
SCALE_BYTES = 4 / FP8_BLOCK**2
"""Bytes of scales per FP8 weight."""
KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2}
"""Bytes of an element of the KV cache, by vLLM's `kv_cache_dtype`; otherwise as the weights."""
CPU_KV_CACHE_BYTES = 256 << 20
"""Default KV cache of an engine on a CPU, unless one sample of full length needs more."""
ENGINE_CONTEXT_BYTES = 3 << 28
"""CUDA context and libraries of an engine's process."""
ENGINE_GRAPH_BYTES = 1 << 30
"""CUDA graphs of an engine."""
ENGINE_STEP_TOKENS = 16384
"""Maximum tokens of vLLM's step, unless `rollout.engine_args.max_num_batched_tokens` sets it."""
SAMPLER_COPIES = 4
"""fp32 copies of a step's logits during sampling: logits, scaled logits, log-probs and probabilities."""
OPTIMIZER_SLICE = 1 << 30
"""Bytes of fp32 parameters that Adam updates at once."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on the fullest trainer rank. Offloaded parameters and gradients are included, because they are on the device at peak usage.

    reference: the reference policy's copy of the trained parameters. step: temporaries of an optimizer step, which runs when activations
    and workspace are free. host: host memory for offloading.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    workspace: int
    step: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        # While the reference policy scores, the trained parameters that it replaces are in a copy of the same size.
        phases = self.activations + self.workspace, self.step, self.reference + self.workspace
        return self.weights + self.gradients + self.optimizer + self.reference + max(phases)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one rank of a rollout engine.

    Attributes:
        kv_token: key-value cache of one token.
        kv_cache: the whole cache, None if the size of the GPU is unknown.
        sequence_state: the part of the cache that one sequence needs at any length: linear attention's state, and sliding windows.
        states: `sequence_state` of all sequences in flight.
        reserve: everything else (`engine_reserve`), if the engine shares its GPU; otherwise vLLM measures it, and this is 0.
    """

    weights: int
    kv_token: int
    kv_cache: int | None
    sequence_state: int = 0
    states: int = 0
    reserve: int = 0

    @property
    def kv_tokens(self) -> int | None:
        """Number of tokens that fit the cache in addition to the states of all sequences in flight."""
        return None if self.kv_cache is None or not self.kv_token else max(0, self.kv_cache - self.states) // self.kv_token


@dataclass(frozen=True, slots=True)
class LogprobMemory:
    """Bytes of one rank of a log-prob server. base_weights: the unmerged copy of the weights that a synced adapter is merged into."""

    weights: int
    base_weights: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.base_weights + self.activations + self.workspace


def max_sample_tokens(recipe: Recipe, shape: ModelShape) -> int:
    """Maximum tokens of a prompt with its response."""
    return min(recipe.rollout.context or shape.max_positions, shape.max_positions)


def trainer_memory(recipe: Recipe, shape: ModelShape) -> TrainerMemory:
    """Memory of the recipe's fullest trainer rank, over all training stages."""
    pipeline = list(enumerate(_recipe_stages(recipe, shape, recipe.train.parallel)))
    ranks = [_trainer_stage(recipe, shape, index, stage, training) for training in recipe.train.stages for index, stage in pipeline]
    return max(ranks, key=lambda memory: memory.total)


def engine_memory(recipe: Recipe, shape: ModelShape, index: int | None = None) -> EngineMemory:
    """Memory of one rank of a rollout engine. `kv_cache` is negative if weights and reserve exceed the engine's share of the GPU.

    index: number of the engine, as in `engine_share`.
    """
    rollout = recipe.rollout
    width = WEIGHT_BYTES[recipe.train.precision if rollout.dtype == "auto" else rollout.dtype]
    drafting = rollout.speculation.model_tokens > 0 and recipe.mtp.mode != "off"
    stage = stages(shape, ParallelConfig(tp=rollout.tp), depths=shape.mtp_layers if drafting else 0)[0]
    weights = stage.parameters * width
    if names := sent_in_fp8(recipe, shape):
        quantized = {name: size for name, size in tensor_shapes(shape).items() if name in names}
        values = stages(shape, ParallelConfig(tp=rollout.tp), depths=shape.mtp_layers if drafting else 0, only=quantized)[0].parameters
        weights -= int(values * (width - 1 - SCALE_BYTES))
    kv_width = KV_BYTES.get(str(rollout.engine_args.get("kv_cache_dtype")), width)
    per_token = kv_bytes_per_token(shape, rollout.tp, kv_width, drafting=drafting)
    cache, gpu_gib = rollout.kv_cache_bytes, recipe.cluster.gpu_gib
    state = _sequence_state_bytes(recipe, shape, width) + _window_cache_bytes(shape, rollout.tp, kv_width, drafting=drafting)
    if cache is None and recipe.device == "cpu":
        cache = max(CPU_KV_CACHE_BYTES, max_sample_tokens(recipe, shape) * per_token + state)
    reserve = engine_reserve(recipe, shape) if shares_gpu(recipe, index) else 0
    if cache is None and recipe.device == "cuda" and gpu_gib is not None:
        cache = int(gpu_gib * GIB * engine_memory_share(recipe, index)) - weights - reserve
    return EngineMemory(weights, per_token, cache, state, state * rollout.max_in_flight, reserve)


def engine_reserve(recipe: Recipe, shape: ModelShape) -> int:
    """Memory of an engine on a shared GPU in addition to its weights and its cache: CUDA context, graphs, activations and sampling.

    vLLM's profiling cannot be used, because it counts allocations of other processes on the GPU. Activations are those of one unfused
    layer.
    """
    rollout = recipe.rollout
    width = WEIGHT_BYTES[recipe.train.precision if rollout.dtype == "auto" else rollout.dtype]
    max_batched_tokens = rollout.engine_args.get("max_num_batched_tokens")
    tokens = max_batched_tokens if isinstance(max_batched_tokens, int) else ENGINE_STEP_TOKENS
    activations = int(tokens * (4 * shape.hidden + attention_width(shape) + 3 * ffn_width(shape)) * width)
    sampled_rows = rollout.max_in_flight * (1 + rollout.speculation.num_tokens)
    sampling = sampled_rows * shape.vocab * 4 * SAMPLER_COPIES
    graphs = 0 if getattr(rollout, "eager", False) else ENGINE_GRAPH_BYTES
    return ENGINE_CONTEXT_BYTES + graphs + activations + sampling


def logprob_memory(recipe: Recipe, shape: ModelShape) -> LogprobMemory:
    """Memory of a log-prob server's fullest rank: weights without gradients, and one layer's activations at a time."""
    server, lora = recipe.logprob, recipe.train.lora
    width = WEIGHT_BYTES[recipe.train.precision]
    adapted = adapted_weights(shape, lora.targets) if lora is not None and "adapter" in recipe.sync.sections else {}
    base_stages = stages(shape, server.parallel, depths=_depths(recipe, shape), only=adapted)
    copies = 2 if server.keep_previous else 1
    ranks = zip(_recipe_stages(recipe, shape, server.parallel), base_stages, strict=True)
    parameters, base_parameters = max(((stage.parameters * copies, base_stage.parameters) for stage, base_stage in ranks), key=sum)
    elements = peak_width(shape, server.parallel, range(shape.layers), drafter=_depths(recipe, shape) > 0)
    activations = int(server.tokens_per_batch // server.parallel.cp * elements * width) + _exact_sum_bytes(
        recipe, shape, server.tokens_per_batch
    )
    return LogprobMemory(
        parameters * width, base_parameters * width, activations, _workspace_bytes(recipe, shape, server.tokens_per_batch, server.parallel)
    )


def teacher_memory(recipe: Recipe, shape: ModelShape) -> LogprobMemory:
    """Memory of the fullest rank of the server of `served_teacher`. shape: the teacher's."""
    return logprob_memory(recipe.for_teacher_server(), shape)


def kv_bytes_per_token(shape: ModelShape, tp: int, width: int, *, drafting: bool) -> int:
    """Bytes of one token's key-value cache on one rank. Latent attention's cache is replicated on all ranks."""
    layers = _count_layers(shape, "full_attention", drafting=drafting)
    if shape.latent:
        return layers * (shape.latent.kv_rank + shape.latent.rope_dim) * width
    return layers * max(1, shape.kv_heads // tp) * (shape.head_dim + shape.value_dim) * width


def _window_cache_bytes(shape: ModelShape, tp: int, width: int, *, drafting: bool) -> int:
    """Bytes of the key-value cache of one sequence's windows on one rank, in all layers that have one."""
    if (window := shape.window) is None:
        return 0
    token = max(1, window.kv_heads // tp) * (shape.head_dim + shape.value_dim) * width
    return _count_layers(shape, "sliding_attention", drafting=drafting) * window.size * token


def _count_layers(shape: ModelShape, kind: LayerKind, *, drafting: bool) -> int:
    """Number of layers of this kind of attention, with those of the drafter if the engine drafts."""
    return shape.layer_kinds.count(kind) + (shape.drafter_layers if drafting and shape.mtp_kind == kind else 0)


def _sequence_state_bytes(recipe: Recipe, shape: ModelShape, width: int) -> int:
    """Bytes of one sequence's linear-attention or Mamba-2 state on one engine rank: convolution inputs and recurrent states of all layers.

    vLLM stores one copy for the sequence, one for each draft (which may be rejected) and, with prefix caching, one at the last block
    boundary.
    """
    delta, mamba, rollout = shape.delta, shape.mamba, recipe.rollout
    if delta is None and mamba is None:
        return 0
    drafts = rollout.speculation.num_tokens if rollout.speculation.method != "model" or recipe.mtp.mode != "off" else 0
    dtype = rollout.engine_args.get("mamba_ssm_cache_dtype", "auto")
    if mamba is not None:
        channels, conv, state, fp32_state = mamba.channels, mamba.conv, mamba.inner * mamba.state, mamba.fp32_state
        layers = shape.layer_kinds.count("mamba")
    else:
        assert delta is not None
        channels, conv = 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim, delta.conv
        state, fp32_state = delta.value_heads * delta.value_dim * delta.key_dim, delta.fp32_state
        layers = shape.layer_kinds.count("linear_attention")
    fp32 = recipe.numerics == "bitwise" or dtype == "float32" or (dtype == "auto" and fp32_state)
    conv_elements = channels * (conv - 1 + drafts)
    copies = 1 + drafts + bool(rollout.engine_args.get("enable_prefix_caching", recipe.device == "cuda"))
    return copies * layers * (conv_elements * width + state * (4 if fp32 else width)) // rollout.tp


def _recipe_stages(recipe: Recipe, shape: ModelShape, parallel: ParallelConfig) -> list[Stage]:
    return stages(shape, parallel, depths=_depths(recipe, shape))


def _depths(recipe: Recipe, shape: ModelShape) -> int:
    """Number of MTP depths of the trainer and the log-prob server."""
    return shape.mtp_layers * recipe.mtp.repeat if recipe.mtp.mode != "off" else 0


def _trainer_stage(recipe: Recipe, shape: ModelShape, index: int, stage: Stage, training: str) -> TrainerMemory:
    train, parallel = recipe.train, recipe.train.parallel
    width = WEIGHT_BYTES[train.precision]
    weights = stage.parameters * width
    trained_params, expert_params = stage.trunk, stage.trunk_experts
    if train.stages == ["draft"]:
        trained_params = expert_params = 0  # The trunk has neither gradients nor optimizer state.
    elif train.lora:
        trained_params, expert_params = _adapter_parameters(recipe, shape, stage)
        weights += trained_params * width
    has_mtp_gradients = recipe.mtp.trains
    trains_mtp = has_mtp_gradients and (training != "rl" or train.rl.train_mtp)
    gradients = (trained_params + (stage.mtp if has_mtp_gradients else 0)) * GRADIENT_BYTES
    if training == "draft":
        trained_params = expert_params = 0
    if trains_mtp or (has_mtp_gradients and train.distributed_optimizer):
        # A distributed optimizer has state for all gradient buffers, including those of frozen MTP layers.
        trained_params, expert_params = trained_params + stage.mtp, expert_params + stage.mtp_experts
    shards, expert_shards = optimizer_ranks(parallel) if train.distributed_optimizer else (1, 1)
    sharded_params = (trained_params - expert_params) // shards + expert_params // expert_shards
    master_bytes = sharded_params * (MASTER_BYTES if train.precision == "bf16" else 0)
    state_bytes, slice_bytes = sharded_params * MOMENT_BYTES + master_bytes, min(OPTIMIZER_SLICE, sharded_params * MASTER_BYTES)
    # Adam's temporaries have the size of a slice. Offloaded moments are loaded by slices, masters for the whole step.
    step_bytes = slice_bytes + (slice_bytes * MOMENT_BYTES // MASTER_BYTES + master_bytes if train.offload.optimizer else 0)
    return TrainerMemory(
        weights=weights,
        gradients=gradients,
        optimizer=0 if train.offload.optimizer else state_bytes,
        reference=trained_params * width if training == "rl" and train.rl.kl_coef else 0,
        activations=_activation_bytes(recipe, shape, index, stage, _depths(recipe, shape) if trains_mtp else 0, training),
        workspace=_workspace_bytes(recipe, shape, train.tokens_per_microbatch, parallel) if stage.has_head else 0,
        step=step_bytes,
        host=(state_bytes if train.offload.optimizer else 0) + (weights if train.offload.params else 0),
    )


def _activation_bytes(recipe: Recipe, shape: ModelShape, index: int, stage: Stage, depths: int, training: str) -> int:
    train, parallel = recipe.train, recipe.train.parallel
    depths = depths if stage.has_head else 0
    # Passes through a layer of the drafter, per token. A block has one more input than drafts.
    passes = shape.dflash.layers * (depths + 1) if shape.dflash is not None and depths else depths
    input_width = shape.hidden / (parallel.tp if parallel.sequence_parallel else 1)
    widths = layer_widths(shape, parallel, range(0) if training == "draft" else stage.layers)
    draft_widths = [drafter_width(shape, parallel)] * passes if passes else []
    if recipe.numerics == "bitwise" and parallel.sequence_parallel:
        # The two normed inputs of each layer, which default numerics recompute.
        widths, draft_widths = ([width + 2 * input_width for width in layers] for layers in (widths, draft_widths))
    recomputes_drafts = train.recompute == "full" and _recomputes_drafter(recipe, shape)
    if train.recompute == "full":
        widths = [input_width] * len(widths)
    if recomputes_drafts:
        draft_widths = [input_width] * len(draft_widths)
    # A frozen trunk saves nothing, but its layers have temporaries.
    peak = peak_transient if train.recompute != "full" else peak_width
    transient_width = peak(shape, parallel, stage.layers, drafter=passes > 0)
    if stage.has_head:
        teacher = train.rl.teacher if training == "rl" else None
        in_loss, in_backward = head_widths(
            shape, parallel, depths, recomputes_drafts=recomputes_drafts, has_candidates=teacher is not None and teacher.topk > 0
        )
        transient_width = max(in_loss, in_backward + transient_width)
    microbatches_in_flight = parallel.pp - index  # 1F1B schedule: microbatches in flight at this stage.
    elements = train.tokens_per_microbatch / parallel.cp * (sum(widths + draft_widths) * microbatches_in_flight + transient_width)
    return int(elements * WEIGHT_BYTES[train.precision]) + _exact_sum_bytes(recipe, shape, train.tokens_per_microbatch)


def _recomputes_drafter(recipe: Recipe, shape: ModelShape) -> bool:
    """Whether `recompute: full` applies to the drafter's layers. It does not if depths share a layer and attend to each other's keys."""
    return shape.dflash is not None or recipe.mtp.repeat == 1


def _exact_sum_bytes(recipe: Recipe, shape: ModelShape, tokens: int) -> int:
    """Bytes of float64 temporaries with `numerics: bitwise` on a CPU: the widest layer's input, and up to eight blocks."""
    sums_exactly = recipe.numerics == "bitwise" and recipe.device == "cpu"
    return 8 * tokens * max(2 * shape.hidden, shape.ffn) + 8 * BLOCK_BYTES if sums_exactly else 0


def _workspace_bytes(recipe: Recipe, shape: ModelShape, tokens: int, parallel: ParallelConfig) -> int:
    all_logits = tokens // parallel.cp * shape.vocab // parallel.tp * 8  # fp32 logits and their gradient
    return all_logits if recipe.kernels.linear_logprob == "reference" else min(recipe.kernels.workspace_bytes, all_logits)


def _adapter_parameters(recipe: Recipe, shape: ModelShape, stage: Stage) -> tuple[int, int]:
    """Number of LoRA parameters on one rank, and the routed experts' part of it: LoRA rank × (inputs + outputs) of each target."""
    lora, parallel = recipe.train.lora, recipe.train.parallel
    assert lora is not None
    modules = [(shape, layer, target, parallel) for layer in stage.layers for target in lora.targets]
    routed = sum(_routed_adapted_width(*module) for module in modules)
    return int(lora.rank * (routed + sum(_adapted_width(*module) for module in modules))), int(lora.rank * routed)


def _routed_adapted_width(shape: ModelShape, layer: int, target: str, parallel: ParallelConfig) -> float:
    """Inputs plus outputs of a decoder layer's routed experts that match this target, on one rank."""
    moe = shape.moe
    if moe is None or shape.mlp_of(layer) != "sparse" or target not in ("linear_fc1", "linear_fc2"):
        return 0
    return moe.experts / parallel.ep * (shape.hidden + _inner_width(shape, target, moe.ffn) / expert_tp(parallel))


def _adapted_width(shape: ModelShape, layer: int, target: str, parallel: ParallelConfig) -> float:
    """Inputs plus outputs of a decoder layer's other modules that match this target, on one rank."""
    if target in ("linear_fc1", "linear_fc2"):
        moe = shape.moe
        ffn = {"none": 0, "dense": shape.ffn, "sparse": moe.shared_ffn if moe else 0}[shape.mlp_of(layer)]
        return shape.hidden + _inner_width(shape, target, ffn) / parallel.tp if ffn else 0
    replicated, split = _mixer_widths(shape, layer).get(target, (0, 0))
    return replicated + split / parallel.tp


def _inner_width(shape: ModelShape, target: str, ffn: int) -> int:
    return (shape.mlp_matrices - 1) * ffn if target == "linear_fc1" else ffn


def _mixer_widths(shape: ModelShape, layer: int) -> dict[str, tuple[int, int]]:
    """For each linear layer of attention, the sides (input, output) that are replicated, and those that tp splits, in elements."""
    hidden, kind = shape.hidden, shape.layer_kinds[layer]
    if kind in ("none", "mamba"):  # Mamba-2 has no adapters
        return {}
    if kind == "linear_attention":
        delta = shape.delta
        assert delta is not None
        keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        return {"in_proj": (hidden, 2 * keys + 2 * values + 2 * delta.value_heads), "out_proj": (hidden, values)}
    if latent := shape.latent:
        query, kv = shape.heads * (latent.nope_dim + latent.rope_dim), shape.heads * (latent.nope_dim + latent.value_dim)
        return {
            "linear_q_proj": (hidden, query),
            "linear_q_down_proj": (hidden + (latent.q_rank or 0), 0),
            "linear_q_up_proj": (latent.q_rank or 0, query),
            "linear_kv_down_proj": (hidden + latent.kv_rank + latent.rope_dim, 0),
            "linear_kv_up_proj": (latent.kv_rank, kv),
            "linear_proj": (hidden, shape.heads * latent.value_dim),
        }
    kv = shape.kv_heads_of(kind) * (shape.head_dim + shape.value_dim)
    queries = shape.heads * shape.head_dim * (2 if shape.gated_attention else 1)
    return {"linear_qkv": (hidden, queries + kv), "linear_proj": (hidden, shape.heads * shape.value_dim)}


@dataclass(frozen=True, slots=True)
class RouteBytes:
    """Bytes of routes: of a token, of the longest sample, and of a batch of longest samples."""

    replay: Replay
    token: int
    sample: int
    batch: int


def route_bytes(recipe: Recipe, shape: ModelShape) -> RouteBytes | None:
    """The size of the routes that samples contain, or None if they contain none."""
    replay, routes, rl = recipe.replay(shape), RouteShape.of(shape), recipe.train.rl
    if replay == "off" or routes is None:
        return None
    sample = max_sample_tokens(recipe, shape) * routes.token_bytes
    return RouteBytes(replay, routes.token_bytes, sample, rl.prompts_per_step * rl.group_size * sample)
