"""Checks of a recipe: calls each section's own, which lie in its module, and holds those that concern several sections.

Every check yields complaints, one line each, which begin with the recipe field and end with what to set instead. No check
starts a process, asks the network or looks for a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mtpctl.errors import UserError, first_of
from mtpctl.families.reading import missing_fields, shape_of, unsupported_by_vllm_cpu
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.cluster import address_fits
from mtpctl.recipe.data import data_fits
from mtpctl.recipe.evaluation import evaluation_fits
from mtpctl.recipe.model import BYTE_VOCAB_SIZE, ModelConfig, has_mtp_head, hf_config, model_fits, model_folder, tensor_names
from mtpctl.recipe.parallel import parallel_fits
from mtpctl.recipe.presets import PRESETS
from mtpctl.recipe.reward import FROM_ENVIRONMENT, VERIFIERS, reward_fits
from mtpctl.recipe.rl import POLICY, RlConfig, clips_fit, correction_fits, loss_fits, teacher_fits
from mtpctl.recipe.rollout import (
    VLLM_ADAPTER_RANKS,
    SglangConfig,
    agents_fit,
    environment_fits,
    heads_split,
    lengths_fit,
    replicas_fit,
    sglang_fits,
    speculation_fits,
    vllm_fits,
)
from mtpctl.recipe.schema import Recipe, copy_fits, run_dir_fits
from mtpctl.recipe.secrets import secrets_in
from mtpctl.recipe.section import Complaints
from mtpctl.recipe.sync import TRANSPORTS, sections_fit
from mtpctl.recipe.train import EXPERT_TARGETS, lora_fits, moe_fits, stages_fit

PACKED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


def validate(recipe: Recipe) -> None:
    """Raise UserError for the first thing that does not fit; its notes say what is wrong with other fields."""
    complaints: dict[str, str] = {}
    for text in complaints_of(recipe):
        complaints.setdefault(text.split(":", 1)[0], text)
    if complaints:
        raise first_of([UserError(text) for text in complaints.values()])


def complaints_of(recipe: Recipe) -> Complaints:
    """Everything that does not fit, one line each. Raises UserError where the model cannot be read at all."""
    yield from (text for _, text in secrets_in(recipe.model_dump(mode="json", by_alias=True)))
    config = hf_config(recipe.model, fetch=False)
    shape = shape_of(config) if config is not None else None
    yield from _sections(recipe, shape)
    yield from _bytes_tokenizer(recipe, shape)
    yield from _mtp(recipe, shape)
    yield from _answers(recipe)
    yield from _objective(recipe)
    yield from _sync(recipe)
    yield from _adapter_sync(recipe, shape)
    yield from _updated_in_place(recipe, config or {})
    yield from _replay(recipe)
    yield from _kernels(recipe)
    yield from _devices(recipe)
    yield from _deterministic(recipe)
    if shape is not None:
        yield from _served(recipe, config or {}, shape)


def _sections(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    """Each section by itself, and with the sizes of the model where they are known."""
    rollout, train = recipe.rollout, recipe.train
    yield from model_fits(recipe.model)
    yield from stages_fit(train)
    yield from correction_fits(train.rl.correction)
    yield from clips_fit(train.rl)
    yield from teacher_fits(train.rl)
    yield from _teacher(recipe)
    if "rl" in train.stages:
        yield from loss_fits(train.rl)
    yield from replicas_fit(rollout)
    yield from speculation_fits(rollout)
    yield from environment_fits(rollout)
    yield from agents_fit(rollout)
    yield from sglang_fits(rollout) if isinstance(rollout, SglangConfig) else vllm_fits(rollout)
    yield from sections_fit(recipe.sync)
    yield from data_fits(recipe.data, environment_has_tasks=rollout.verifiers is not None)
    yield from evaluation_fits(recipe.evaluation, recipe.data, recipe.rollout)
    yield from reward_fits(recipe.reward, recipe.data.checker)
    yield from address_fits(recipe.cluster)
    yield from run_dir_fits(recipe)
    yield from copy_fits(recipe)
    if shape is None:
        return
    yield from lengths_fit(rollout, shape)
    yield from heads_split(rollout.tp, shape)
    yield from parallel_fits(train.parallel, shape, "train.parallel")
    if recipe.logprob.standalone:
        yield from parallel_fits(recipe.logprob.parallel, shape, "logprob.parallel")
    yield from moe_fits(train, shape)
    if train.lora is not None:
        yield from lora_fits(train.lora, shape)


def _teacher(recipe: Recipe) -> Complaints:
    """A teacher that the rest of the recipe has no place for."""
    teacher = recipe.train.rl.teacher
    if teacher is None:
        return
    if teacher.path == POLICY and not recipe.logprob.standalone:
        yield "train.rl.teacher.path: policy needs the run's log-prob server; set logprob.standalone: true"
    if teacher.served and "rl" in recipe.train.stages:
        field = "train.rl.teacher.path"
        config = hf_config(ModelConfig.model_validate({"path": teacher.path}), fetch=False, field=field)
        if config is not None:
            yield from parallel_fits(teacher.parallel, shape_of(config), "train.rl.teacher.parallel")
    if teacher.topk and recipe.train.parallel.cp > 1:
        yield "train.rl.teacher.topk: candidates are compared where a response is whole; set train.parallel.cp: 1, or topk: 0"
    if teacher.hint is not None and recipe.rollout.agents_play:
        yield "train.rl.teacher.hint: prompts are what the agent makes of a problem, and no hint gets into them; leave it out"


def _bytes_tokenizer(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    if recipe.model.tokenizer != "bytes":
        return
    if shape is not None and shape.vocab < BYTE_VOCAB_SIZE:
        yield f"model.config.vocab_size: {shape.vocab} is too small for the byte tokenizer's {BYTE_VOCAB_SIZE} ids"


def _mtp(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    headless = shape is not None and not has_mtp_head(recipe.model, shape)
    k = recipe.rollout.speculation.num_tokens
    if headless and recipe.mtp.mode != "off":
        yield f"mtp.mode: {recipe.mtp.mode} needs an MTP head, but the model has none; leave mtp.mode out, or set it to off"
    if headless and k:
        yield f"rollout.speculation.num_tokens: {k} needs an MTP head, but the model has none; leave it out, or set it to 0"
    elif recipe.mtp.mode == "off" and k:
        yield f"rollout.speculation.num_tokens: {k} needs the MTP layers that mtp.mode: off leaves out; set it to 0, or mtp.mode: load"
    if shape is not None and recipe.mtp.repeat > 1 and shape.mtp_layers > 1:
        yield f"mtp.repeat: {recipe.mtp.repeat} depths share one MTP layer, and the model has {shape.mtp_layers} of its own; set it to 1"
    if shape is not None and shape.mtp_layers > 1 and recipe.rollout.engine == "vllm":
        yield from _several_layers(recipe, shape.mtp_layers)


def _several_layers(recipe: Recipe, layers: int) -> Complaints:
    """Numbers of draft tokens for which vLLM uses MTP layers otherwise than each at the depth at which it is trained."""
    k = recipe.rollout.speculation.num_tokens
    if k > 1 and recipe.device == "cpu":
        yield (
            f"rollout.speculation.num_tokens: {k}, but vLLM on a CPU drafts every token with the first of the model's {layers} MTP layers; "
            "set it to 1"
        )
    elif k > layers:
        yield (
            f"rollout.speculation.num_tokens: {k}, but beyond the model's {layers} MTP layers vLLM begins again with the first, which is "
            f"not trained for that; set it to {layers} or less"
        )


def _answers(recipe: Recipe) -> Complaints:
    """Rows without answers, for rewards that compare a response with one: an empty response would be right."""
    data, function = recipe.data, recipe.reward.function
    nobody = recipe.rollout.environment == "single" and not recipe.rollout.agents_play
    if function == FROM_ENVIRONMENT and nobody and "rl" in recipe.train.stages:
        yield "reward.function: environment takes what an environment's reward() returns, and rollout.environment is single; name one"
    if recipe.rollout.verifiers is not None and data.path is None and data.task is None:
        named = recipe.rollout.environment
        if function in VERIFIERS and "rl" in recipe.train.stages:
            yield f"reward.function: {function} has no answer to compare with, and {named} rewards its tasks itself; set environment"
        if "sft" in recipe.train.stages and data.sft_path is None and data.sft_task is None:
            yield f"data.sft_path: tasks of {named} have no worked solutions; name rows for the supervised stage, or set stages: [rl]"
    if data.columns.answer is None and function in VERIFIERS and "rl" in recipe.train.stages:
        yield f"data.columns.answer: null leaves the reward {function} nothing to compare a response with; name the column"
    for name, each in recipe.evaluation.sets.items():
        columns, own = each.columns or data.columns, each.reward.function if each.reward else function
        if columns.answer is None and own in VERIFIERS:
            yield (
                f"evaluation.sets.{name}.columns.answer: null leaves the reward {own} nothing to compare a response with; name the column, "
                f"or set evaluation.sets.{name}.reward.function"
            )


def _objective(recipe: Recipe) -> Complaints:
    rl, rollout = recipe.train.rl, recipe.rollout
    correction = rl.correction
    if (rollout.top_p < 1 or rollout.top_k) and correction.mode == "off" and "rl" in recipe.train.stages:
        field, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("top_k", rollout.top_k)
        yield (
            f"rollout.{field}: {value} renormalises what is sampled from, so no trainer can match its log-probs; "
            f"set it to {1 if field == 'top_p' else 0}, or train.rl.correction.mode: truncate"
        )
    if rl.old_logprobs == "behaviour":
        if recipe.logprob.standalone:
            yield "train.rl.old_logprobs: behaviour leaves the log-prob servers without work; set auto, or logprob.standalone: false"
        if correction.mode != "off":
            yield "train.rl.correction.mode: behaviour log-probs taken as old ones leave nothing to correct; leave old_logprobs at auto"
        if rl.loss == "decoupled":
            yield "train.rl.loss: decoupled needs a proximal policy apart from the behaviour; leave train.rl.old_logprobs at auto"
    if rl.overlong.enabled and rl.overlong.buffer >= rollout.max_tokens:
        yield f"train.rl.overlong.buffer: must be below rollout.max_tokens: {rollout.max_tokens}, got {rl.overlong.buffer}"


def _sync(recipe: Recipe) -> Complaints:
    """Transports that the devices do not have, and engines that cannot free their KV cache."""
    device, transport, rollout = recipe.cluster.device, recipe.sync.transport, recipe.rollout
    if device == "cpu" and TRANSPORTS[transport].cuda:
        yield f"sync.transport: {transport} needs CUDA; set shm for cluster.device: cpu, or leave it out"
    if TRANSPORTS[transport].one_process_a_card and "rl" in recipe.train.stages:
        scores = recipe.logprob.gpus if recipe.logprob.standalone else 1
        shares = {"train.gpus": recipe.train.gpus, "rollout.gpus": rollout.gpus, "logprob.gpus": scores}
        for field in [field for field, share in shares.items() if share and share < 1][-1:]:
            yield f"sync.transport: {transport} joins one process of a card, and with {field}: {shares[field]:g} two share one; set ipc"
    if recipe.sync.release_kv:
        if isinstance(rollout, SglangConfig):
            yield "sync.release_kv: works with rollout.engine: vllm; set it to false"
        elif recipe.device == "cpu":
            yield "sync.release_kv: a CPU engine cannot give its KV cache back; set it to false"
        elif rollout.engine_args.get("enable_sleep_mode", True) is False:
            yield "sync.release_kv: needs vLLM's sleep mode; take rollout.engine_args.enable_sleep_mode: false out"


def _adapter_sync(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    """Adapters that engines cannot take as they are."""
    rollout, lora = recipe.rollout, recipe.train.lora
    if "adapter" not in recipe.sync.sections:
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
    if "linear_kv_up_proj" in lora.targets:
        yield (
            "train.lora.targets: linear_kv_up_proj: vLLM folds its weight into attention at the start, where an adapter does not reach; "
            "leave it out, or sync target in place of adapter"
        )
    packed = [target for target in ("linear_fc1", "linear_fc2") if target in lora.targets]
    folder = model_folder(recipe.model)
    if shape is not None and shape.moe and packed and folder is not None and any(map(PACKED_EXPERTS.search, tensor_names(folder))):
        yield (
            f"train.lora.targets: {folder} packs a layer's experts in one tensor, of which PEFT names no adapter; "
            f"leave {' and '.join(packed)} out, or sync target in place of adapter"
        )


def _updated_in_place(recipe: Recipe, config: Mapping[str, object]) -> Complaints:
    """Engines whose live weights a sync of RL cannot write to."""
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


def _replay(recipe: Recipe) -> Complaints:
    """Routes that nobody would record."""
    replay, rollout = recipe.train.moe.replay, recipe.rollout
    if replay == "recompute" and recipe.old_logprobs == "behaviour":
        yield "train.moe.replay: recompute has no pass to record routes in, as old log-probs are the engine's; set rollout, or off"
    if replay != "rollout":
        return
    if isinstance(rollout, SglangConfig):
        yield "train.moe.replay: rollout takes the routes of rollout.engine: vllm; set recompute, or off"
    elif not recipe.engine_gives_routes:
        mend = "leave enable_prefix_caching out, or set train.moe.replay: off"
        yield f"rollout.engine_args: vLLM gives routes with its prefix cache alone; {mend}"


def _kernels(recipe: Recipe) -> Complaints:
    """Kernels that the recipe names and that would refuse the first update."""
    if recipe.kernels.linear_logprob != "triton":
        return
    if recipe.device == "cpu":
        yield "kernels.linear_logprob: triton needs a GPU; set auto"
    elif recipe.train.precision != "bf16":
        yield "kernels.linear_logprob: triton needs train.precision: bf16; set auto"


def _devices(recipe: Recipe) -> Complaints:
    if isinstance(recipe.rollout, SglangConfig) and recipe.device == "cpu":
        yield "rollout.engine: sglang needs a GPU; set vllm, or cluster.device: cuda"


def _deterministic(recipe: Recipe) -> Complaints:
    """Engines whose answers a run with `async.deterministic` could not repeat."""
    if not recipe.async_.deterministic:
        return
    if recipe.rollout.elastic:
        yield "rollout.replicas: replicas that come and go rule out async.deterministic; give a number in place of min and max"
    if recipe.rollout.speculation.auto:
        yield "rollout.speculation.auto: switches by measured speed, which async.deterministic rules out; set auto: false"
    if recipe.rollout.speculation.num_tokens and recipe.rollout.speculation.draft_method == "probabilistic":
        yield "rollout.speculation.draft_method: probabilistic draws from no request's seed, which async.deterministic needs; set greedy"
    if isinstance(recipe.rollout, SglangConfig) and not recipe.rollout.engine_args.get("enable_deterministic_inference"):
        yield "async.deterministic: SGLang repeats its draws with rollout.engine_args: {enable_deterministic_inference: true} alone; set it"


def _served(recipe: Recipe, config: Mapping[str, object], shape: ModelShape) -> Complaints:
    """Models that the engine would refuse once it runs, or would compute otherwise than the trainer."""
    if "rl" not in recipe.train.stages:
        return
    yield from missing_fields(config)
    if recipe.device == "cpu":
        dtype = recipe.train.precision if recipe.rollout.dtype == "auto" else recipe.rollout.dtype
        yield from unsupported_by_vllm_cpu(shape, dtype)
        cached, drafts = recipe.rollout.engine_args.get("enable_prefix_caching"), recipe.rollout.speculation.num_tokens
        if "linear_attention" in shape.layer_kinds and cached and drafts:
            yield (
                "rollout.engine_args: vLLM on a CPU has no prefix cache for linear attention with drafts; leave enable_prefix_caching out, "
                "or set rollout.speculation.num_tokens: 0"
            )
        lora = recipe.train.lora
        if shape.moe and lora and "adapter" in recipe.sync.sections and EXPERT_TARGETS & set(lora.targets):
            yield (
                "train.lora.targets: vLLM on a CPU has no adapters of experts; leave out linear_fc1 and linear_fc2, "
                "or set sync.sections: [target, draft]"
            )


# Settings that a recipe may have and that are known to learn badly: a run warns of them before it starts.
#
# Each caution begins with the recipe field and ends with what to set instead. docs/async-tuning.md has the measurements behind them.

WIDEST_SEQUENCE_CLIP = 0.05
"""A response's mean ratio hardly ever leaves such a band: GSPO's paper clips at 3e-4 and 4e-4."""


def cautions_of(recipe: Recipe) -> Iterator[str]:
    """Yield the cautions about a recipe, one line each; a recipe without RL has none."""
    if "rl" not in recipe.train.stages:
        return
    rl, correction = recipe.train.rl, recipe.train.rl.correction
    uncorrected = correction.mode == "off" and rl.loss != "decoupled"
    if recipe.off_policy and recipe.old_logprobs == "recompute" and not recipe.logprob.standalone and uncorrected:
        yield (
            "train.rl.old_logprobs: recompute, with correction.mode: off, trains on stale samples as if they were new, and the reward "
            "oscillates; leave it at auto, or set train.rl.correction.mode: truncate"
        )
    if recipe.off_policy and rl.loss == "decoupled" and correction.mode == "off":
        yield (
            "train.rl.correction.mode: off leaves the importance weights of loss: decoupled without a bound, and one stale token can "
            "outweigh a batch; set it to truncate"
        )
    yield from _objective_cautions(rl)


def _objective_cautions(rl: RlConfig) -> Iterator[str]:
    """Losses and advantages in settings that defeat them."""
    if rl.loss == "gspo" and rl.clip_high > WIDEST_SEQUENCE_CLIP:
        yield (
            f"train.rl.clip_high: {rl.clip_high:g} clips next to nothing with loss: gspo, whose ratio is a mean over the response; "
            "set 4e-4 and clip_low: 3e-4, or preset: gspo"
        )
    if rl.advantage == "reinforce_pp" and rl.dynamic_sampling:
        yield (
            "train.rl.dynamic_sampling: drops groups of equal rewards, from which advantage: reinforce_pp learns, and shifts its baseline; "
            "set it to false"
        )
    for name in ("loss", "advantage", "aggregate"):
        if rl.preset is not None and (said := PRESETS[rl.preset][name]) != (given := getattr(rl, name)):
            yield f"train.rl.{name}: {given} overrides {said} of preset: {rl.preset}; leave one of them out"
