"""The schema as a tree of keys with types and defaults: for lookups, for suggestions in messages, and for the reference page."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from mtpctl.recipe.schema import DEFAULT_VARIANTS, Recipe

# Names that other frameworks have for keys of the recipe, so that a message about an unknown key can point to ours.

_LR = ("train.rl.optimizer.lr", "train.sft.optimizer.lr")
_BATCH = ("train.rl.prompts_per_step", "train.sft.batch_size")
_CLIP_GRAD = ("train.rl.optimizer.clip_grad", "train.sft.optimizer.clip_grad")
_WARMUP = ("train.rl.optimizer.warmup_steps", "train.sft.optimizer.warmup_steps")
_STEPS = ("train.rl.steps", "train.sft.steps")
_TP = ("train.parallel.tp", "rollout.tp", "logprob.parallel.tp")

KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning_rate", "actor_lr", "actor_learning_rate"), _LR),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size", "num_prompts", "gen_batch_size"), _BATCH),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping", "clip_grad_norm", "grad_norm_clip"), _CLIP_GRAD),
    **dict.fromkeys(("warmup", "lr_warmup_steps", "num_warmup_steps", "warmup_ratio"), _WARMUP),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "total_training_steps", "num_rollout"), _STEPS),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), _STEPS),
    **dict.fromkeys(
        ("n", "n_samples", "num_samples", "num_generations", "n_samples_per_prompt", "samples_per_prompt", "rollout_n", "group_n"),
        ("train.rl.group_size",),
    ),
    **dict.fromkeys(("ppo_epochs", "num_minibatches", "mini_batch_size", "ppo_mini_batch_size"), ("train.rl.minibatches",)),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "per_device_train_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "max_tokens_per_gpu",
            "ppo_max_token_len_per_gpu",
        ),
        ("train.tokens_per_microbatch",),
    ),
    **dict.fromkeys(("kl_beta", "beta", "kl_coeff", "kl_loss_coef", "kl_penalty", "init_kl_coef"), ("train.rl.kl_coef",)),
    **dict.fromkeys(("entropy_coeff", "ent_coef", "entropy_bonus"), ("train.rl.entropy_coef",)),
    **dict.fromkeys(("clip_range", "cliprange", "clip_ratio", "clip_ratio_low", "epsilon", "eps_clip", "clip_eps"), ("train.rl.clip_low",)),
    **dict.fromkeys(("clip_ratio_high", "epsilon_high", "eps_clip_high"), ("train.rl.clip_high",)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), ("train.rl.advantage",)),
    **dict.fromkeys(("algorithm", "algo"), ("train.rl.preset",)),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), ("train.rl.aggregate",)),
    **dict.fromkeys(
        ("max_new_tokens", "max_response_length", "max_completion_length", "response_length", "generate_max_len"), ("rollout.max_tokens",)
    ),
    **dict.fromkeys(("max_model_len", "max_seq_len", "max_length", "context_length", "max_position_embeddings"), ("rollout.context",)),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), _TP),
    **dict.fromkeys(("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"), ("train.parallel.pp", "logprob.parallel.pp")),
    **dict.fromkeys(("context_parallel_size", "cp_size"), ("train.parallel.cp",)),
    **dict.fromkeys(("expert_parallel_size", "expert_model_parallel_size", "ep_size"), ("train.parallel.ep",)),
    **dict.fromkeys(("data_parallel_size", "dp_size"), ("train.parallel.dp",)),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), ("rollout.gpu_memory",)),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), ("rollout.max_in_flight",)),
    **dict.fromkeys(("num_speculative_tokens", "speculative_num_steps", "draft_tokens"), ("rollout.speculation.num_tokens",)),
    **dict.fromkeys(("num_engines", "num_rollout_engines", "vllm_num_engines"), ("rollout.replicas",)),
    "stop_token_ids": ("rollout.stop_ids",),
    "eos_token_id": ("rollout.end_ids",),
    "eos_token_ids": ("rollout.end_ids",),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"), ("train.recompute",)),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision"), ("train.precision",)),
    **dict.fromkeys(("lora_rank", "lora_r"), ("train.lora.rank",)),
    "lora_alpha": ("train.lora.alpha",),
    **dict.fromkeys(("target_modules", "lora_target_modules"), ("train.lora.targets",)),
    **dict.fromkeys(("model_path", "model_name", "model_name_or_path", "pretrain", "hf_checkpoint"), ("model.path",)),
    **dict.fromkeys(("dataset", "dataset_name", "train_files", "train_data", "prompt_data"), ("data.path",)),
    **dict.fromkeys(("val_files", "eval_data", "test_files", "eval_dataset"), ("data.eval_path",)),
    **dict.fromkeys(("reward_fn", "reward_func", "reward_funcs", "reward_function", "rm_type", "custom_rm_path"), ("reward.function",)),
    **dict.fromkeys(("test_freq", "eval_freq", "eval_interval", "eval_steps"), ("train.eval_every",)),
    **dict.fromkeys(("save_freq", "save_interval", "save_steps"), ("train.checkpoint_every",)),
    **dict.fromkeys(("save_total_limit", "max_ckpt_to_keep", "max_actor_ckpt_to_keep"), ("train.keep_checkpoints",)),
    **dict.fromkeys(("output_dir", "save_dir", "default_local_dir"), ("run_dir",)),
    **dict.fromkeys(("experiment_name", "run_name", "exp_name"), ("name",)),
    **dict.fromkeys(("project_name", "wandb_project"), ("telemetry.wandb",)),
    **dict.fromkeys(("n_gpus_per_node", "num_gpus_per_node"), ("cluster.gpus_per_node",)),
}
"""By a name elsewhere, the keys here that mean it, the most usual one first."""


def ours(path: tuple[str, ...]) -> str | None:
    """The key here for a name of another framework; of several, the one that has most of the path in common, or else the first."""
    keys = KEYS.get(path[-1].lower(), ())
    return max(keys, key=lambda key: _shared(tuple(key.split(".")), path), default=None)


def _shared(key: tuple[str, ...], path: tuple[str, ...]) -> int:
    """How many steps the two have in common from the top."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(key, path, strict=False))))


Keys = tuple[str, ...]
_SCALARS: dict[object, str] = {str: "text", int: "integer", float: "number", bool: "true | false"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the recipe. `models` are the sections below it: none for a value, several where a variant is chosen.

    A key such as `rollout.replicas` may have a section or a value.
    """

    path: Keys
    field: FieldInfo
    models: tuple[type[BaseModel], ...]

    @property
    def dotted(self) -> str:
        """The key as `--set` takes it: `train.rl.steps`."""
        return ".".join(self.path)

    @property
    def default(self) -> object:
        """The value of the key where no file and no `--set` gives one."""
        return self.field.get_default(call_default_factory=True)

    @property
    def valued(self) -> bool:
        """Whether the key may have a value that is no section."""
        parts = [part for part in _alternatives(self.field.annotation) if part is not type(None)]
        return len(parts) > len(self.models)

    @property
    def forms(self) -> frozenset[str]:
        """The names that pydantic's locations have for a section or a value at this key; empty where it can have one of them alone."""
        parts = get_args(self.field.annotation) if get_origin(self.field.annotation) in (Union, UnionType) else ()
        tags = [note for part in parts if get_origin(part) is Annotated for note in get_args(part)[1:] if isinstance(note, Tag)]
        return frozenset(tag.tag for tag in tags)

    @property
    def free(self) -> bool:
        """Whether the value is a mapping of any keys (`model.config`, `rollout.engine_args`)."""
        return any((get_origin(part) or part) is dict for part in _alternatives(self.field.annotation))


def _alternatives(annotation: object) -> tuple[object, ...]:
    """The types of a union, or the one type, without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for arg in get_args(annotation) for part in _alternatives(arg))
    return (annotation,)


def element(key: Key) -> type[BaseModel] | None:
    """The section that stands below each name of the user's own in a mapping such as `evaluation.sets`; None for any other key."""
    for part in _alternatives(key.field.annotation):
        if get_origin(part) is dict and isinstance(below := get_args(part)[1], type) and issubclass(below, BaseModel):
            return below
    return None


def children(model: type[BaseModel], path: Keys = ()) -> dict[str, Key]:
    """Keys of one section, by the name they have in YAML."""
    return {name: Key((*path, name), field, models) for name, (field, models) in _fields(model).items()}


@cache
def _fields(model: type[BaseModel]) -> dict[str, tuple[FieldInfo, tuple[type[BaseModel], ...]]]:
    """The fields of a section by their names in YAML, each with the sections that its type holds."""
    found = {}
    for attribute, field in model.model_fields.items():
        models = tuple(part for part in _alternatives(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel))
        found[field.alias or attribute] = (field, models)
    return found


def variant(key: Key, value: object) -> tuple[type[BaseModel], ...]:
    """The sections that may stand below `key` given the value it has: the one chosen, or all where the choice is not valid."""
    if len(key.models) < 2:
        return key.models
    tag, default = DEFAULT_VARIANTS[key.path[-1]]
    chosen = value.get(tag, default) if isinstance(value, Mapping) else default
    return tuple(m for m in key.models if m.model_fields[tag].default == chosen) or key.models


def walk(model: type[BaseModel] = Recipe, path: Keys = ()) -> Iterator[Key]:
    """Every key, sections before what they hold. A key that several variants share comes once."""
    seen: set[Keys] = set()
    for key in children(model, path).values():
        yield key
        for below in key.models:
            for deeper in walk(below, key.path):
                if deeper.path not in seen:
                    seen.add(deeper.path)
                    yield deeper


@cache
def dotted_keys() -> tuple[str, ...]:
    return tuple(key.dotted for key in walk())


def find(path: Keys) -> Key | None:
    """The key at `path`, None where there is none. Below a free mapping every path leads to that mapping's key."""
    models: tuple[type[BaseModel], ...] = (Recipe,)
    key = None
    for depth, name in enumerate(path):
        if key is not None and key.free:
            return key
        found = next((fields[name] for model in models if name in (fields := _fields(model))), None)
        if found is None:
            return None
        field, models = found
        key = Key(path[: depth + 1], field, models)
    return key


def suggest(path: Keys, siblings: tuple[str, ...] = ()) -> str:
    """What a message about an unknown key ends with: `; did you mean ...?`, searched first among its siblings, then
    among the names that other frameworks have, then among all keys.

    Where nothing is like it: the siblings' names, or an empty text without siblings. A key with its value stuck to it is told so.
    """
    prefix = ".".join(path[:-1])
    name, colon, value = path[-1].partition(":")
    if colon and name in siblings:
        return f"; YAML wants a space behind the colon: {name}: {value}"
    known = ours(path)
    # A name of another framework's is no misspelling, unless it is one by a letter.
    close = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.85 if known else 0.7)
    if close:
        return f"; did you mean {'.'.join((*path[:-1], close[0]))}?"
    if known:
        return f"; did you mean {known}?"
    dotted = ".".join(path)
    like = [key for key in dotted_keys() if difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], path[-1]).ratio() >= 0.7]
    same = [key for key in like if key.rsplit(".", 1)[-1] == path[-1]]
    close = difflib.get_close_matches(dotted, same, n=1, cutoff=0.0) or difflib.get_close_matches(dotted, like, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; keys of {prefix or 'a recipe'}: {', '.join(siblings)}" if siblings else ""


def type_text(annotation: object) -> str:
    """A type in words, for whoever writes YAML."""
    parts = []
    for part in _alternatives(annotation):
        origin = get_origin(part)
        if origin is Literal:
            parts += [str(choice) for choice in get_args(part)]
        elif origin is list:
            parts.append(f"list of {type_text(get_args(part)[0])}")
        elif origin is tuple:
            parts.append(f"{len(get_args(part))} × {type_text(get_args(part)[0])}")
        elif origin is dict:
            parts.append("mapping")
        elif part is type(None):
            parts.append("null")
        elif isinstance(part, type) and issubclass(part, BaseModel):
            parts.append("section")
        else:
            parts.append(_SCALARS[part])
    return " | ".join(dict.fromkeys(parts))
