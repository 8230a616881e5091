"""The schema as a tree of keys, and errors about keys and values: hints for unknown keys, pydantic's errors in plain words, and secrets.

Recognizable secrets are rejected, because a recipe is printed and written into the run directory. A value of `reward.args`,
`rollout.agent_args` and `rollout.environment_args` may be `env:NAME`: the environment variable is read when the function is loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mtpctl.errors import MtpctlError, UserError, with_notes
from mtpctl.recipe.schema import DEFAULT_VARIANTS, Recipe

FRAMEWORK_NAMES: Mapping[str, str] = {
    "train.rl.optimizer.lr train.sft.optimizer.lr": "lr learning_rate actor_lr actor_learning_rate",
    "train.rl.prompts_per_step train.sft.batch_size": (
        "batch_size train_batch_size rollout_batch_size global_batch_size num_prompts gen_batch_size"
    ),
    "train.rl.optimizer.clip_grad train.sft.optimizer.clip_grad": (
        "max_grad_norm grad_clip gradient_clipping clip_grad_norm grad_norm_clip"
    ),
    "train.rl.optimizer.warmup_steps train.sft.optimizer.warmup_steps": "warmup lr_warmup_steps num_warmup_steps warmup_ratio",
    "train.rl.steps train.sft.steps": (
        "max_steps num_steps total_steps total_training_steps num_rollout epochs num_epochs num_train_epochs total_epochs"
    ),
    "train.rl.group_size": "n n_samples num_samples num_generations n_samples_per_prompt samples_per_prompt rollout_n group_n",
    "train.rl.minibatches": "ppo_epochs num_minibatches mini_batch_size ppo_mini_batch_size",
    "train.tokens_per_microbatch": (
        "micro_batch_size per_device_train_batch_size ppo_micro_batch_size_per_gpu max_tokens_per_gpu ppo_max_token_len_per_gpu"
    ),
    "train.rl.kl_coef": "kl_beta beta kl_coeff kl_loss_coef kl_penalty init_kl_coef",
    "train.rl.entropy_coef": "entropy_coeff ent_coef entropy_bonus",
    "train.rl.clip_low": "clip_range cliprange clip_ratio clip_ratio_low epsilon eps_clip clip_eps",
    "train.rl.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "train.rl.advantage": "adv_estimator advantage_estimator",
    "train.rl.preset": "algorithm algo",
    "train.rl.aggregate": "loss_agg_mode loss_type",
    "rollout.max_tokens": "max_new_tokens max_response_length max_completion_length response_length generate_max_len",
    "rollout.context": "max_model_len max_seq_len max_length context_length max_position_embeddings",
    "train.parallel.tp rollout.tp logprob.parallel.tp": "tensor_parallel_size tensor_model_parallel_size tp_size",
    "train.parallel.pp logprob.parallel.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "train.parallel.cp": "context_parallel_size cp_size",
    "train.parallel.ep": "expert_parallel_size expert_model_parallel_size ep_size",
    "train.parallel.dp": "data_parallel_size dp_size",
    "rollout.gpu_memory": "gpu_memory_utilization mem_fraction_static",
    "rollout.max_in_flight": "max_num_seqs max_running_requests",
    "rollout.speculation.num_tokens": "num_speculative_tokens speculative_num_steps draft_tokens",
    "rollout.replicas": "num_engines num_rollout_engines vllm_num_engines",
    "rollout.stop_ids": "stop_token_ids",
    "rollout.end_ids": "eos_token_id eos_token_ids",
    "train.recompute": "gradient_checkpointing activation_checkpointing recompute_granularity",
    "train.precision": "bf16 fp16 mixed_precision",
    "train.lora.rank": "lora_rank lora_r",
    "train.lora.alpha": "lora_alpha",
    "train.lora.targets": "target_modules lora_target_modules",
    "model.path": "model_path model_name model_name_or_path pretrain hf_checkpoint",
    "data.path": "dataset dataset_name train_files train_data prompt_data",
    "data.eval_path": "val_files eval_data test_files eval_dataset",
    "reward.function": "reward_fn reward_func reward_funcs reward_function rm_type custom_rm_path",
    "train.eval_every": "test_freq eval_freq eval_interval eval_steps",
    "train.checkpoint_every": "save_freq save_interval save_steps",
    "train.keep_checkpoints": "save_total_limit max_ckpt_to_keep max_actor_ckpt_to_keep",
    "run_dir": "output_dir save_dir default_local_dir",
    "name": "experiment_name run_name exp_name",
    "telemetry.wandb": "project_name wandb_project",
    "cluster.gpus_per_node": "n_gpus_per_node num_gpus_per_node",
}
"""Names that other frameworks have for recipe keys, for hints about unknown keys. Of several recipe keys, the most common is first."""
ALIASES: Mapping[str, tuple[str, ...]] = {name: tuple(keys.split()) for keys, names in FRAMEWORK_NAMES.items() for name in names.split()}
"""Recipe keys by their names in other frameworks."""


def resolve_alias(path: tuple[str, ...]) -> str | None:
    """The recipe key for a name in another framework, or None. Of several keys, the one that shares the longest prefix with `path`."""

    def shared_prefix(key: str) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(key.split("."), path, strict=False))))

    return max(ALIASES.get(path[-1].lower(), ()), key=shared_prefix, default=None)


KeyPath = tuple[str, ...]
Origins = dict[KeyPath, str]
"""`FILE:LINE` or `--set`, by the path of a key."""
Tree = dict[str, object]
"""A recipe as parsed from YAML: scalars, lists and mappings."""
_SCALARS: dict[object, str] = {str: "text", int: "integer", float: "number", bool: "true | false"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the recipe.

    sections: those that it may contain: none for a value, several for a choice of variants. A key such as `rollout.replicas` may be a
    section or a value.
    """

    path: KeyPath
    field: FieldInfo
    sections: tuple[type[BaseModel], ...]

    @property
    def dotted(self) -> str:
        """The key as in `--set`: `train.rl.steps`."""
        return ".".join(self.path)

    @property
    def default(self) -> object:
        return self.field.get_default(call_default_factory=True)

    @property
    def accepts_value(self) -> bool:
        """Whether the key may have a value that is not a section."""
        parts = [part for part in _alternatives(self.field.annotation) if part is not type(None)]
        return len(parts) > len(self.sections)

    @property
    def tags(self) -> frozenset[str]:
        """The tags in pydantic's locations for a key that may be a section or a value; empty for other keys."""
        parts = get_args(self.field.annotation) if get_origin(self.field.annotation) in (Union, UnionType) else ()
        tags = [note for part in parts if get_origin(part) is Annotated for note in get_args(part)[1:] if isinstance(note, Tag)]
        return frozenset(tag.tag for tag in tags)

    @property
    def has_free_keys(self) -> bool:
        """Whether the value is a mapping with arbitrary keys (`model.config`, `rollout.engine_args`)."""
        return any((get_origin(part) or part) is dict for part in _alternatives(self.field.annotation))


def _alternatives(annotation: object) -> tuple[object, ...]:
    """The types of a union, or the single type, without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return tuple(part for arg in get_args(annotation) for part in _alternatives(arg))
    return (annotation,)


def element_section(key: Key) -> type[BaseModel] | None:
    """The section below each user-defined name in a mapping such as `evaluation.sets`; None for other keys."""
    for part in _alternatives(key.field.annotation):
        if get_origin(part) is dict and isinstance(section := get_args(part)[1], type) and issubclass(section, BaseModel):
            return section
    return None


def section_keys(model: type[BaseModel], path: KeyPath = ()) -> dict[str, Key]:
    """The keys of one section, by their names in YAML."""
    return {name: Key((*path, name), field, sections) for name, (field, sections) in _fields(model).items()}


@cache
def _fields(model: type[BaseModel]) -> dict[str, tuple[FieldInfo, tuple[type[BaseModel], ...]]]:
    """The fields of a section by their names in YAML, each with the sections in its type."""
    fields = {}
    for attribute, field in model.model_fields.items():
        sections = tuple(part for part in _alternatives(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel))
        fields[field.alias or attribute] = (field, sections)
    return fields


def walk_keys(model: type[BaseModel] = Recipe, path: KeyPath = ()) -> Iterator[Key]:
    """Every key, sections before their contents. A key that several variants share appears once."""
    visited: set[KeyPath] = set()
    for key in section_keys(model, path).values():
        yield key
        for section in key.sections:
            for nested_key in walk_keys(section, key.path):
                if nested_key.path not in visited:
                    visited.add(nested_key.path)
                    yield nested_key


@cache
def all_dotted_keys() -> tuple[str, ...]:
    return tuple(key.dotted for key in walk_keys())


def find_key(path: KeyPath) -> Key | None:
    """The key at `path`; None if there is none. Any path below a free mapping leads to the mapping's key."""
    sections: tuple[type[BaseModel], ...] = (Recipe,)
    key = None
    for depth, name in enumerate(path):
        if key is not None and key.has_free_keys:
            return key
        match = next((fields[name] for model in sections if name in (fields := _fields(model))), None)
        if match is None:
            return None
        field, sections = match
        key = Key(path[: depth + 1], field, sections)
    return key


def unknown_key_hint(path: KeyPath, siblings: tuple[str, ...] = ()) -> str:
    """The hint of an error about an unknown key, such as `; did you mean ...?`.

    Searches the siblings, then the names in other frameworks, then all keys. If nothing is similar, lists the siblings. Detects a missing
    space after the colon.
    """
    prefix = ".".join(path[:-1])
    name, colon, value = path[-1].partition(":")
    if colon and name in siblings:
        return f"; YAML needs a space after the colon: {name}: {value}"
    alias = resolve_alias(path)
    # A name of another framework is not a misspelling unless it differs by about one letter.
    matches = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.85 if alias else 0.7)
    if matches:
        return f"; did you mean {'.'.join((*path[:-1], matches[0]))}?"
    if alias:
        return f"; did you mean {alias}?"
    dotted = ".".join(path)
    similar = [key for key in all_dotted_keys() if difflib.SequenceMatcher(None, key.rsplit(".", 1)[-1], path[-1]).ratio() >= 0.7]
    equal = [key for key in similar if key.rsplit(".", 1)[-1] == path[-1]]
    matches = difflib.get_close_matches(dotted, equal, n=1, cutoff=0.0) or difflib.get_close_matches(dotted, similar, n=1, cutoff=0.6)
    if matches:
        return f"; did you mean {matches[0]}?"
    return f"; keys of {prefix or 'a recipe'}: {', '.join(siblings)}" if siblings else ""


def type_text(annotation: object) -> str:
    """A type in words, for authors of YAML."""
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


def to_user_error(error: ValidationError, origins: Origins, tree: Tree) -> MtpctlError:
    """The error for the first mistake, with its origin and key. Its notes report mistakes in other keys."""
    mistakes: dict[KeyPath, UserError] = {}
    for item in error.errors(include_url=False):
        path = _yaml_path(item["loc"])
        if item["type"] == "union_tag_invalid":
            path = (*path, DEFAULT_VARIANTS[path[-1]][0])
        elif item["type"] == "missing":  # a list is too short; keys are never missing, because all have defaults
            path = path[:-1]
        origin = origin_of(path, origins)
        prefix = f"{origin}: " if origin else ""
        mistakes.setdefault(path, UserError(mask_secrets(f"{prefix}{'.'.join(path)} {_sentence(item, path, tree)}")))
    return with_notes(list(mistakes.values()))


def origin_of(path: KeyPath, origins: Origins) -> str | None:
    """The origin of a key, or of the nearest section above it that has one."""
    return next((origins[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in origins), None)


def _yaml_path(location: Iterable[str | int]) -> KeyPath:
    """The path of a pydantic location, without the tags of variants."""
    path: KeyPath = ()
    key: Key | None = None
    sections: tuple[type[BaseModel], ...] = (Recipe,)
    below_free_key = False
    for step in map(str, location):
        if (len(sections) > 1 and not any(step in section_keys(m) for m in sections)) or (key is not None and step in key.tags):
            continue
        path = (*path, step)
        key = None if below_free_key else _key_in_sections(sections, path)
        below_free_key = key is None
        sections = key.sections if key else ()
    return path


def _key_in_sections(sections: Iterable[type[BaseModel]], path: KeyPath) -> Key | None:
    section_key_maps = (section_keys(section, path[:-1]) for section in sections)
    return next((keys[path[-1]] for keys in section_key_maps if path[-1] in keys), None)


def _sentence(item: ErrorDetails, path: KeyPath, tree: Tree) -> str:
    kind, value, limits = item["type"], item.get("input"), item.get("ctx", {})
    value_text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    match kind:
        case "extra_forbidden" if path[0] not in DEFAULT_VARIANTS:
            return f"is not a key of {'.'.join(path[:-1])}"
        case "extra_forbidden":
            tag, default = DEFAULT_VARIANTS[path[0]]
            section = tree[path[0]]
            return f"is not a key of {path[0]} with {tag}: {section.get(tag, default) if isinstance(section, dict) else default}"
        case "literal_error":
            return f"must be {limits['expected']}, got {value_text}{_nearest(value, limits['expected'])}"
        case "union_tag_invalid":
            return f"must be one of {limits['expected_tags']}, got {limits['tag']!r}{_nearest(limits['tag'], limits['expected_tags'])}"
        case "string_type":
            return f"must be text, got {value_text}" + (": put it in quotes" if isinstance(value, (int, float)) else "")
        case "int_type" | "int_parsing" | "int_from_float":
            return f"must be an integer, got {value_text}"
        case "float_type" | "float_parsing":
            return f"must be a number, got {value_text}"
        case "finite_number":
            return f"must be a finite number, got {value_text}"
        case "bool_type" | "bool_parsing":
            return f"must be true or false, got {value_text}"
        case "greater_than":
            return f"must be greater than {limits['gt']}, got {value_text}"
        case "greater_than_equal":
            return f"must be at least {limits['ge']}, got {value_text}"
        case "less_than_equal":
            return f"must be at most {limits['le']}, got {value_text}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"must be a mapping of keys to values, got {value_text}"
        case "list_type" | "tuple_type":
            return f"must be a list, got {value_text}; write [{value}]"
        case "missing" | "too_long" if (key := find_key(path)) is not None:
            return f"must be a list of {type_text(key.field.annotation)}, got {value_text}"
        case "less_than":
            return f"must be below {limits['lt']}, got {value_text}"
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch":
            return f"may contain only letters, digits, dots, dashes and underscores, got {value_text}"
    return f"{item['msg'].removeprefix('Value error, ').lower()}, got {value_text}" if kind != "value_error" else str(limits["error"])


def _nearest(value: object, expected: str) -> str:
    choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
    matches = difflib.get_close_matches(str(value), choices, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


_SECRET_KEY = re.compile(
    r"(?:(?:^|hf_|hub_|auth_|access_|api_|bearer_|refresh_|session_)token|secret|password|passwd|passphrase|(?:api|private|access|secret)_?key"
    r"|credentials?|authorization)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"^(?:(?:Bearer|Basic)\s+\S+|(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}|(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abprs])[-_][A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16})$"
)
_URL_SECRET = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=://)[^/\s:@]{20,}(?=@)"
    r"|(?<=[?&])((?:api_?key|(?:access_|auth_)?token|key|secret|password|sig(?:nature)?)=)[^&#\s'\"]+",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"(?P<key>[\w.]+)(?P<sign>\s*\+?[=:]\s*)(?P<value>\S.*)", re.DOTALL)
_FREE_MAPPING = re.compile(
    r"(?P<read>(?:evaluation\.sets\.[^.]+\.)?reward\.args|rollout\.(?:agent|environment|environment_eval)_args)\.(?P<key>.+)"
    r"|(?:rollout\.engine_args|model\.config)\.(?P<other>.+)"
)
"""Mappings with arbitrary keys; `read`: those in which `env:NAME` is replaced."""
_SECRET_PROBLEM = "secrets do not belong in a recipe, which is written into the run directory"


def find_secrets(tree: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The paths of secrets in a recipe, each with an error that does not contain the secret."""
    for path, text in _text_values(tree, ()):
        if text.startswith("env:"):
            continue
        match = _FREE_MAPPING.fullmatch(".".join(path))
        keys = (match["key"] or match["other"]).split(".") if match else []
        secret = any(map(_SECRET_KEY.search, keys)) or (match is not None and _SECRET_VALUE.match(text) is not None)
        hint = "write env:NAME, and export NAME" if match and match["read"] else "use the environment"
        if secret:
            yield path, f"{'.'.join(path)}: {_SECRET_PROBLEM}; {hint}"
        elif _URL_SECRET.search(text):
            yield path, f"{'.'.join(path)}: contains a password or key; {_SECRET_PROBLEM}; {hint}"


def mask_secrets(text: str) -> str:
    """The text with masked passwords in URLs and masked values of secret keys (`KEY=VALUE`)."""
    text = _URL_SECRET.sub(lambda match: f"{match[1] or ''}***", text)
    match = _ASSIGNMENT.match(text)
    if match is not None and _SECRET_KEY.search(match["key"].rpartition(".")[2]) and not match["value"].startswith("env:"):
        return f"{match['key']}{match['sign']}***"
    return text


def _text_values(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _text_values(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _text_values(item, (*path, str(number)))
