"""What must fit together in a recipe, beyond each value by itself.

Every check yields complaints that begin with the field and end with the mend. Nothing here starts a process, asks the
network or looks for a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtpctl.families.reading import shape_of
from mtpctl.families.serving import beyond_vllm_on_a_cpu, left_to_engines
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.errors import UserError
from mtpctl.recipe.model_source import has_weights, hf_config, model_folder, tensor_names
from mtpctl.recipe.schema import BYTE_VOCAB_SIZE, VLLM_ADAPTER_RANKS, ParallelConfig, Recipe, SglangConfig

Complaints = Iterator[str]

SECRET = re.compile(r"(?:(?:^|hf_|hub_|auth_|access_|api_|bearer_)token|secret|password|passwd|api_?key|credentials?)$", re.IGNORECASE)
PACKED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
ADDRESS = re.compile(r"auto|local|(?:\w+://)?\S+:[0-9]+\S*")
TOKENIZER_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
KV_HEADS = "key-value heads"
URL_PASSWORD = re.compile(r"://[^/\s:@]+:[^/\s@]+@")


COLDEST = 0.01
"""vLLM 0.32 raises lower temperatures to this one (`SamplingParams.__post_init__`)."""


def validate(recipe: Recipe) -> None:
    """Raise UserError for the first thing that does not fit, naming the fields of the others."""
    complaints = list(complaints_of(recipe))
    if not complaints:
        return
    others = ", ".join(dict.fromkeys(text.split(":", 1)[0] for text in complaints[1:]))
    raise UserError(complaints[0] + (f" (also wrong: {others})" if others else ""))


def complaints_of(recipe: Recipe) -> Complaints:
    """Everything that does not fit, one line each. Raises UserError where the model cannot be read at all."""
    yield from _secrets(recipe)
    config = hf_config(recipe.model, fetch=False)
    shape = shape_of(config) if config is not None else None
    yield from _model(recipe, shape)
    yield from _stages(recipe)
    yield from _objective(recipe)
    yield from _sync(recipe)
    yield from _updated_in_place(recipe, config or {})
    yield from _data(recipe)
    yield from _kernels(recipe)
    yield from _devices(recipe)
    yield from _paths(recipe)
    if shape is not None:
        yield from _lengths(recipe, shape)
        yield from parallel_fits(recipe.train.parallel, shape, "train.parallel")
        yield from _adapters(recipe, shape)
        if recipe.logprob.standalone:
            yield from parallel_fits(recipe.logprob.parallel, shape, "logprob.parallel")
        yield from _rollout_tp(recipe, shape)
        yield from _served(recipe, config or {}, shape)


def _secrets(recipe: Recipe) -> Complaints:
    for field, free in (("rollout.engine_args", recipe.rollout.engine_args), ("model.config", recipe.model.config or {})):
        for key, value in free.items():
            if SECRET.search(key) and isinstance(value, str):
                yield f"{field}.{key}: secrets do not belong in a recipe, which is written into the run directory; use the environment"
    for field, text in (("model.path", recipe.model.path), ("cluster.address", recipe.cluster.address), ("data.path", recipe.data.path)):
        if text and URL_PASSWORD.search(text):
            yield f"{field}: carries a password; secrets do not belong in a recipe, use the environment"


def _model(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    folder = model_folder(recipe.model)
    if folder is not None and recipe.model.init == "weights" and not has_weights(folder):
        yield f"model.path: {folder} holds no weights (*.safetensors); give a folder that does, or set model.init: random"
    if recipe.model.config is not None and recipe.model.tokenizer is None:
        yield "model.tokenizer: a model made from model.config has none beside it; write `bytes`, or a tokenizer folder"
    if recipe.model.tokenizer == "bytes":
        if shape is not None and shape.vocab < BYTE_VOCAB_SIZE:
            yield f"model.config.vocab_size: {shape.vocab} is too small for the byte tokenizer's {BYTE_VOCAB_SIZE} ids"
        if recipe.data.chat_template:
            yield "data.chat_template: the byte tokenizer has no chat template; set it to false"
    elif (named := recipe.model.tokenizer) and not Path(named).is_dir() and not TOKENIZER_ID.fullmatch(named):
        yield f"model.tokenizer: there is no folder {named}; give a folder with a tokenizer, a hub id, or `bytes`"
    if shape is not None and recipe.mtp.mode != "off" and shape.mtp_layers == 0:
        yield f"mtp.mode: {recipe.mtp.mode}, but the model has no MTP layers; set mtp.mode: off and rollout.speculation.num_tokens: 0"
    elif recipe.mtp.mode == "off" and recipe.rollout.speculation.num_tokens:
        k = recipe.rollout.speculation.num_tokens
        yield f"rollout.speculation.num_tokens: {k} needs the MTP layers that mtp.mode: off leaves out; set it to 0, or mtp.mode: load"
    if shape is not None and recipe.mtp.repeat > 1 and shape.mtp_layers > 1:
        yield f"mtp.repeat: {recipe.mtp.repeat} depths share one MTP layer, and the model has {shape.mtp_layers} of its own; set it to 1"
    if recipe.rollout.speculation.auto and not recipe.rollout.speculation.num_tokens:
        yield "rollout.speculation.auto: there is nothing to switch with num_tokens: 0; set num_tokens, or auto: false"


def _stages(recipe: Recipe) -> Complaints:
    train = recipe.train
    if not train.stages or len(set(train.stages)) != len(train.stages):
        yield f"train.stages: must name sft, rl or both, each once, got [{', '.join(train.stages)}]"
    for stage, steps in (("sft", train.sft.steps), ("rl", train.rl.steps)):
        if stage in train.stages and steps == 0:
            yield f"train.{stage}.steps: is 0; say how many updates, or leave {stage} out of train.stages"
    if train.rl.prompts_per_step % train.rl.minibatches:
        yield (
            f"train.rl.minibatches: {train.rl.minibatches} does not divide train.rl.prompts_per_step: {train.rl.prompts_per_step}; "
            f"{_fitting(train.rl.prompts_per_step)} fit"
        )
    if train.rl.group_size < 2 and "rl" in train.stages:
        yield f"train.rl.group_size: the {train.rl.advantage} baseline needs at least 2 responses a prompt, got {train.rl.group_size}"
    if train.checkpoint_every and not train.keep_checkpoints:
        yield f"train.checkpoint_every: {train.checkpoint_every}, but train.keep_checkpoints is 0; set one of them otherwise"
    for name, optimizer in (("sft", train.sft.optimizer), ("rl", train.rl.optimizer)):
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"train.{name}.optimizer.betas: must lie in [0, 1), got {list(optimizer.betas)}"
    if recipe.async_.deterministic and recipe.rollout.speculation.auto:
        yield "rollout.speculation.auto: switches by measured speed, which async.deterministic rules out; set auto: false"


def _objective(recipe: Recipe) -> Complaints:
    rl, rollout = recipe.train.rl, recipe.rollout
    correction = rl.correction
    if (rollout.top_p < 1 or rollout.top_k) and correction.mode == "off" and "rl" in recipe.train.stages:
        field, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("top_k", rollout.top_k)
        yield (
            f"rollout.{field}: {value} renormalises what is sampled from, so no trainer can match its log-probs; "
            f"set it to {1 if field == 'top_p' else 0}, or train.rl.correction.mode: truncate"
        )
    if correction.mode in ("clip", "mask") and correction.low >= correction.high:
        yield f"train.rl.correction.low: must be below high: {correction.high}, got {correction.low}"
    if rl.old_logprobs == "behaviour":
        if recipe.logprob.standalone:
            yield "train.rl.old_logprobs: behaviour leaves the log-prob servers without work; set auto, or logprob.standalone: false"
        if correction.mode != "off":
            yield "train.rl.correction.mode: behaviour log-probs taken as old ones leave nothing to correct; leave old_logprobs at auto"
        if rl.loss == "decoupled":
            yield "train.rl.loss: decoupled needs a proximal policy apart from the behaviour; leave train.rl.old_logprobs at auto"
    if rl.clip_low >= 1:
        yield f"train.rl.clip_low: must be below 1, got {rl.clip_low}"
    if 0 < rl.clip_dual <= 1:
        yield f"train.rl.clip_dual: must be above 1, or 0 for none, got {rl.clip_dual}"
    if rl.overlong.enabled and rl.overlong.buffer >= rollout.max_tokens:
        yield f"train.rl.overlong.buffer: must be below rollout.max_tokens: {rollout.max_tokens}, got {rl.overlong.buffer}"


def _sync(recipe: Recipe) -> Complaints:
    """What moves at a sync, and what engines do meanwhile."""
    sync, rollout, lora = recipe.sync, recipe.rollout, recipe.train.lora
    if len(set(sync.sections)) != len(sync.sections) or ("target" in sync.sections) == ("adapter" in sync.sections):
        yield f"sync.sections: must hold target or adapter, and draft or not, each once, got [{', '.join(sync.sections)}]"
    if sync.bucket_bytes < 1024:
        yield f"sync.bucket_bytes: must be at least 1024, got {sync.bucket_bytes}"
    if sync.release_kv:
        if isinstance(rollout, SglangConfig):
            yield "sync.release_kv: works with rollout.engine: vllm; set it to false"
        elif recipe.device == "cpu":
            yield "sync.release_kv: a CPU engine cannot give its KV cache back; set it to false"
        elif rollout.engine_args.get("enable_sleep_mode", True) is False:
            yield "sync.release_kv: needs vLLM's sleep mode; take rollout.engine_args.enable_sleep_mode: false out"
    if "adapter" not in sync.sections:
        return
    if lora is None:
        yield "sync.sections: there is no adapter without train.lora; write target in its place, or set train.lora"
        return
    if isinstance(rollout, SglangConfig):
        yield "sync.sections: adapter works with rollout.engine: vllm; write target in its place, which sends merged weights"
    room = rollout.engine_args.get("max_lora_rank", VLLM_ADAPTER_RANKS[-1])
    if isinstance(room, int) and lora.rank > room:
        field = "vLLM takes" if "max_lora_rank" not in rollout.engine_args else "rollout.engine_args.max_lora_rank lets in"
        yield f"train.lora.rank: {lora.rank} is more than the {room} that {field}; lower it, or sync target in place of adapter"
    if rollout.engine_args.get("enable_lora", True) is False:
        yield "sync.sections: adapter needs an engine that takes adapters; take rollout.engine_args.enable_lora: false out"


def _updated_in_place(recipe: Recipe, config: Mapping[str, Any]) -> Complaints:
    """Engines whose live weights a sync cannot write to. Without RL nobody needs to."""
    rollout = recipe.rollout
    if "rl" not in recipe.train.stages or isinstance(rollout, SglangConfig):
        return
    if method := rollout.engine_args.get("quantization"):
        yield f"rollout.engine_args.quantization: weights of an engine that quantises ({method}) cannot be synced; leave it out"
    elif config.get("quantization_config"):
        yield (
            "model.path: its weights are quantised, and engines that generate with them cannot be synced; take it through "
            "mtpctl convert-hf to a checkpoint and back, and name that folder"
        )
    if rollout.engine_args.get("pipeline_parallel_size", 1) != 1:
        yield "rollout.engine_args.pipeline_parallel_size: an engine with pipeline stages cannot be synced; set rollout.tp instead"


def _data(recipe: Recipe) -> Complaints:
    data = recipe.data
    if (data.path is None) == (data.task is None):
        said = "both path and task are given" if data.path else "there is nothing to train on"
        yield f"data: {said}; set data.path to a JSONL or Parquet file, or data.task.name to a generated task"
    if data.system_prompt is not None and not data.chat_template:
        yield "data.system_prompt: goes with a chat template; set data.chat_template: true, or leave it out"
    if data.eval_path and not data.path:
        yield "data.eval_path: goes with data.path; a generated task makes its own held-out problems"
    if data.sft_path and data.sft_task:
        yield "data: both sft_path and sft_task are given; keep one"
    for field, path in (("path", data.path), ("eval_path", data.eval_path), ("sft_path", data.sft_path)):
        if path and not Path(path).is_file():
            yield f"data.{field}: there is no file {path}"
    if data.path and data.eval_path and Path(data.path).resolve() == Path(data.eval_path).resolve():
        yield "data.eval_path: is data.path, which is trained on; name held-out problems, or leave it out"
    for field, task in (("task", data.task), ("sft_task", data.sft_task)):
        if task and task.min_digits > task.max_digits:
            yield f"data.{field}.min_digits: must be at most max_digits: {task.max_digits}, got {task.min_digits}"


def _kernels(recipe: Recipe) -> Complaints:
    """What a kernel that is taken at its word would refuse at the first update."""
    name = recipe.kernels.linear_logprob
    if name not in ("triton", "liger"):
        return
    field = "kernels.linear_logprob"
    if recipe.device == "cpu":
        yield f"{field}: {name} needs a GPU; set auto"
    elif recipe.train.precision != "bf16":
        yield f"{field}: {name} needs train.precision: bf16; set auto"
    elif name == "liger":
        if recipe.mtp.trains:
            yield f"{field}: liger tells no greedy hits, which mtp.mode: {recipe.mtp.mode} counts; set auto"
        if recipe.train.parallel.tp > 1:
            yield f"{field}: liger takes no vocabulary that train.parallel.tp: {recipe.train.parallel.tp} splits; set auto"
        if recipe.logprob.standalone:
            yield f"{field}: liger takes no temperature a token, as log-prob servers give it; set auto"


def _devices(recipe: Recipe) -> Complaints:
    device, transport, address = recipe.cluster.device, recipe.sync.transport, recipe.cluster.address
    if address is not None and not ADDRESS.fullmatch(address):
        yield f"cluster.address: {address} is no address of a Ray cluster; write HOST:PORT, ray://HOST:PORT, or auto"
    if device == "cpu" and transport != "shm":
        yield f"sync.transport: {transport} needs CUDA; set shm for cluster.device: cpu"
    if transport == "nccl" and "rl" in recipe.train.stages:
        scores = recipe.logprob.gpus if recipe.logprob.standalone else 1
        shares = {"train.gpus": recipe.train.gpus, "rollout.gpus": recipe.rollout.gpus, "logprob.gpus": scores}
        for field in [field for field, share in shares.items() if share and share < 1][-1:]:
            yield f"sync.transport: nccl joins one process of a card, and with {field}: {shares[field]:g} two share one; set ipc"
    if isinstance(recipe.rollout, SglangConfig):
        yield from _sglang(recipe, recipe.rollout)
    elif recipe.rollout.temperature < COLDEST:
        yield f"rollout.temperature: vLLM samples at {COLDEST} where less is asked for; got {recipe.rollout.temperature}"


def _sglang(recipe: Recipe, rollout: SglangConfig) -> Complaints:
    """What SGLang needs, and what it cannot do."""
    if recipe.device == "cpu":
        yield "rollout.engine: sglang needs a GPU; set vllm, or cluster.device: cuda"
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
    if recipe.async_.deterministic and not rollout.engine_args.get("enable_deterministic_inference"):
        yield "async.deterministic: SGLang repeats its draws with rollout.engine_args: {enable_deterministic_inference: true} alone; set it"


def _paths(recipe: Recipe) -> Complaints:
    unknown = re.findall(r"\{(?!name\}|seed\})[^}]*\}?", recipe.run_dir)
    if unknown:
        yield f"run_dir: {unknown[0]} is not known; {{name}} and {{seed}} are filled in"
    elif recipe.run_path.exists() and not recipe.run_path.is_dir():
        yield f"run_dir: {recipe.run_path} is a file; name a folder"


def _lengths(recipe: Recipe, shape: ModelShape) -> Complaints:
    rollout = recipe.rollout
    if beyond := [token for token in rollout.stop_ids if token >= shape.vocab]:
        yield f"rollout.stop_ids: the model's vocabulary has {shape.vocab} tokens, got {beyond[0]}"
    if rollout.context is not None and rollout.context > shape.max_positions:
        yield f"rollout.context: the model has {shape.max_positions} positions, got {rollout.context}"
    context = min(rollout.context or shape.max_positions, shape.max_positions)
    if rollout.max_tokens >= context:
        limit = "rollout.context" if rollout.context else "the model's positions"
        yield f"rollout.max_tokens: must leave room for a prompt in {limit}: {context}, got {rollout.max_tokens}"


def _adapters(recipe: Recipe, shape: ModelShape) -> Complaints:
    lora = recipe.train.lora
    if lora is None:
        return
    known = adapter_targets(shape)
    if not lora.targets or len(set(lora.targets)) != len(lora.targets):
        yield f"train.lora.targets: must name layers, each once, got [{', '.join(lora.targets)}]; {shape.family} has {', '.join(known)}"
    elif unknown := [target for target in lora.targets if target not in known]:
        yield f"train.lora.targets: no layer of {shape.family} is a {unknown[0]}; it has {', '.join(known)}"
    elif "adapter" in recipe.sync.sections and "linear_kv_up_proj" in lora.targets:
        yield (
            "train.lora.targets: linear_kv_up_proj: vLLM folds its weight into attention at the start, where an adapter does not reach; "
            "leave it out, or sync target in place of adapter"
        )
    elif "adapter" in recipe.sync.sections and shape.moe and (folder := model_folder(recipe.model)) is not None:
        packed = [target for target in ("linear_fc1", "linear_fc2") if target in lora.targets]
        if packed and any(map(PACKED_EXPERTS.search, tensor_names(folder))):
            yield (
                f"train.lora.targets: {folder} packs a layer's experts in one tensor, of which PEFT names no adapter; "
                f"leave {' and '.join(packed)} out, or sync target in place of adapter"
            )


def adapter_targets(shape: ModelShape) -> list[str]:
    """Megatron's names of the linear layers of this model's decoder."""
    names = ["linear_proj"] if "full_attention" in shape.layer_kinds else []
    if shape.latent:
        query = ["linear_q_proj"] if shape.latent.q_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
        names = [*query, "linear_kv_down_proj", "linear_kv_up_proj", *names]
    elif names:
        names = ["linear_qkv", *names]
    delta = ["in_proj", "out_proj"] if "linear_attention" in shape.layer_kinds else []
    return [*names, *delta, "linear_fc1", "linear_fc2"]


def parallel_fits(parallel: ParallelConfig, shape: ModelShape, field: str) -> Complaints:
    """What Megatron refuses about a split of this model. `field` is the section's name in messages.

    A vocabulary that tp does not divide is padded, and where there are fewer key-value heads than ranks, neighbours share one.
    """
    counts = {"attention heads": shape.heads, KV_HEADS: shape.kv_heads}
    if shape.delta:
        counts |= {"linear key heads": shape.delta.key_heads, "linear value heads": shape.delta.value_heads}
    counts |= {"ffn width": shape.ffn} if shape.ffn else {}
    if shape.moe and parallel.ep == 1:  # else each is whole
        counts |= {"expert ffn width": shape.moe.ffn}
    yield from _divides(parallel.tp, counts, f"{field}.tp")
    if parallel.sequence_parallel and parallel.tp == 1:
        yield f"{field}.sequence_parallel: splits over tensor-parallel ranks; set tp above 1, or false"
    if parallel.pp_layout is not None:
        if len(parallel.pp_layout) != parallel.pp or sum(parallel.pp_layout) != shape.layers:
            yield f"{field}.pp_layout: must name {parallel.pp} stages with {shape.layers} layers in all, got {list(parallel.pp_layout)}"
    elif parallel.pp > shape.layers:
        yield f"{field}.pp: {parallel.pp} stages for {shape.layers} layers; take at most {shape.layers}"
    if parallel.cp > 1 and shape.delta is not None:
        yield f"{field}.cp: {parallel.cp} ranks would cut the linear attention of {shape.family}; set it to 1"
    if parallel.ep > 1:
        if shape.moe is None:
            yield f"{field}.ep: the model has no experts; set it to 1"
        else:
            yield from _divides(
                parallel.ep, {"experts": shape.moe.experts, "data- and context-parallel ranks": parallel.dp * parallel.cp}, f"{field}.ep"
            )
    if shape.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        yield f"{field}.sequence_parallel: experts with tp: {parallel.tp} need it; set it to true"


def _served(recipe: Recipe, config: dict[str, Any], shape: ModelShape) -> Complaints:
    """What the engine would refuse once it runs, or compute otherwise."""
    if "rl" not in recipe.train.stages:
        return
    yield from left_to_engines(config)
    if recipe.device == "cpu":
        dtype = recipe.train.precision if recipe.rollout.dtype == "auto" else recipe.rollout.dtype
        yield from beyond_vllm_on_a_cpu(shape, dtype)


def _rollout_tp(recipe: Recipe, shape: ModelShape) -> Complaints:
    tp = recipe.rollout.tp
    yield from _divides(tp, {"attention heads": shape.heads}, "rollout.tp")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        yield f"rollout.tp: {tp} neither divides {shape.kv_heads} key-value heads nor is a multiple of them"


def _divides(number: int, counts: dict[str, int], field: str) -> Complaints:
    def fits(n: int, what: str) -> bool:
        return counts[what] % n == 0 or (what == KV_HEADS and n % counts[what] == 0)

    for what, count in counts.items():
        if not fits(number, what):
            fitting = [n for n in range(1, max(counts.values()) + 1) if all(fits(n, each) for each in counts)]
            yield f"{field}: {number} does not divide {count} {what}; {_listed(fitting)} fit"
            return


def _fitting(count: int) -> str:
    return _listed([n for n in range(1, count + 1) if count % n == 0])


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
