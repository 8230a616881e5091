"""Creates the files of `mtpctl init --template reasoning-gym`: rows, reward, and a recipe that fits a pretrained model and this machine.

The settings follow from the sizes of model and rows, and from the machine. Each has a reason, which is printed and written into the recipe.
docs/benchmarks/first-run.md shows the runs behind the rules.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mtpctl.data.messages import NotRendered
from mtpctl.data.tokenizers import Tokenizer, load_plain_tokenizer, load_tokenizer
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.families.drafters import add_drafter_config
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters
from mtpctl.recipe.model import ModelConfig, hf_config

LEARNING_RATES = ((2e6, 2e-4), (1.35e8, 3e-5), (7e9, 1e-6))
"""Learning rate by number of parameters.

The first two were the best of several: docs/benchmarks/quickstart.md (2M), docs/benchmarks/first-run.md (135M). The last is the usual rate
for 7B without an adapter, also in recipes/mimo7b_mtp.yaml.
"""
SMALL_PARAMETERS = 1_000_000_000
"""Number of parameters below which a model is small: the host rather than the GPU limits its rollout, so the trainer mostly waits."""
MINIBATCHES = 4
WARMUP_STEPS = 20
RESPONSE_TOKENS = {"small": 128, "large": 512}
"""Tokens for reasoning before the answer. SmolLM2-135M writes 39 on average; models of 1B and more reason longer."""
BYTES_PER_PARAMETER = (6, 12)
"""Trainer memory per parameter: (bf16 weights and fp32 gradients, fp32 weights and Adam's moments). DP ranks can shard the second."""
CORES_PER_ENGINE = 6
"""CPU cores per engine of a small model: three for the engine itself, and three for its part of controller, rewards and trainer."""
MAX_ENGINES = 2
"""Maximum engines of a small model on one GPU. More of them only help if the host has idle cores."""


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU cores, number of GPUs, and GiB of each GPU. Without GPUs the run uses the CPU."""

    cores: int
    gpus: int = 0
    gpu_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its rows.

    Attributes:
        parameters: number of parameters.
        active: number of parameters that one token uses; fewer with a mixture of experts.
        positions: maximum sequence length of the model.
        prompt_tokens, answer_tokens: of the longest prompt and answer.
        rows: number of training rows.
    """

    parameters: int
    active: int
    positions: int
    prompt_tokens: int
    answer_tokens: int
    rows: int

    @property
    def small(self) -> bool:
        return self.parameters < SMALL_PARAMETERS


@dataclass(frozen=True, slots=True)
class Setting:
    """A recipe key, its value, and the reason, which also applies to the settings directly after it that have no reason."""

    key: str
    value: object
    reason: str = ""


def learning_rate(parameters: float) -> float:
    """The learning rate for a model: log-log interpolation of `LEARNING_RATES`, constant outside, rounded to one digit."""
    logs = [(math.log(size), math.log(rate)) for size, rate in LEARNING_RATES]
    x = min(max(math.log(parameters), logs[0][0]), logs[-1][0])
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(logs) if x <= pair[1][0])
    rate = math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return float(f"{rate:.0e}")


def signal_probability(success: float, group: int) -> float:
    """Probability that a group has signal: neither all of its responses succeed nor none."""
    return 1 - success**group - (1 - success) ** group


def choose(work: Workload, machine: Machine) -> list[Setting]:
    """The settings, in the order of a recipe."""
    gpu = machine.gpus > 0
    group, prompts = 8, min(32 if gpu else 4, max(2, work.rows // 10))
    minibatches = min(MINIBATCHES if gpu else 2, prompts)
    rate, size = learning_rate(work.active), _size(work.active)
    response = RESPONSE_TOKENS["small" if work.small else "large"] + 4 * work.answer_tokens
    response = min(_round_up(response, 32), max(1, work.positions - work.prompt_tokens))
    context = min(_round_up(work.prompt_tokens + response, 64), work.positions)
    rate_note = "the best of the rates measured at 135M" if 1e8 <= work.active <= 2e8 else "smaller models need larger rates"
    signal_note = (
        f"with rewards of 0 or 1 and a success rate of 3%, {signal_probability(0.03, group):.0%} of the groups of {group} have signal"
    )
    return [
        Setting("train.rl.optimizer.lr", rate, f"{size} parameters: interpolated between 2M: 2e-4, 135M: 3e-5 and 7B: 1e-6 ({rate_note})"),
        Setting("train.rl.optimizer.warmup_steps", WARMUP_STEPS if gpu else 2),
        Setting("train.rl.minibatches", minibatches, "optimizer steps per update: they cost no time while the trainer waits for rollout"),
        Setting(
            "train.rl.group_size",
            group,
            f"{signal_note}, {signal_probability(0.03, 2 * group):.0%} of those of {2 * group}",
        ),
        Setting(
            "train.rl.prompts_per_step",
            prompts,
            f"{prompts * group} responses per update, {prompts * group // minibatches} per optimizer step",
        ),
        Setting(
            "train.rl.dynamic_sampling",
            gpu,
            "groups without signal are replaced" if gpu else "a fixed number of responses per update, some without signal",
        ),
        *([Setting("train.rl.signal_backoff", True, "prompts whose groups have no signal are skipped for some epochs")] if gpu else []),
        Setting("train.rl.steps", 500 if gpu else 4, _duration(work, machine)),
        Setting("rollout.max_tokens", response, f"room for reasoning, and 4 x the longest answer of {work.answer_tokens} tokens"),
        Setting("train.rl.overlong.buffer", max(1, response // 8), "only the last eighth of max_tokens is penalized"),
        Setting("rollout.context", context, f"the longest prompt has {work.prompt_tokens} tokens"),
        *_placement_settings(work, machine),
        Setting("async.staleness_threshold", 1.0, "the next batch is generated during an update"),
    ]


def _duration(work: Workload, machine: Machine) -> str:
    if not machine.gpus:
        return "a short demonstration: on two cores an update takes half a minute to a minute"
    return "about 15 minutes on one H200" if work.small else "watch the curve of held-out accuracy, and stop when it is flat"


def _placement_settings(work: Workload, machine: Machine) -> list[Setting]:
    """How trainer and engines share the GPUs; without GPUs, settings that suit a CPU."""
    if not machine.gpus:
        return [
            Setting("rollout.eager", True, "on a CPU compilation takes longer than this run"),
            Setting("rollout.max_in_flight", 32),
            Setting("train.tokens_per_microbatch", 2048),
        ]
    if work.small:
        engines = max(1, min(MAX_ENGINES, machine.cores // CORES_PER_ENGINE))
        reason = (
            f"{engines} engine(s) and the trainer share a GPU: an engine is limited by the three CPU cores that it uses, not by the GPU"
        )
        return [
            Setting("rollout.replicas", engines, reason),
            Setting("rollout.gpus", round(0.6 / engines, 2)),
            Setting("rollout.max_in_flight", 256),
            Setting("train.gpus", 0.4),
            Setting("sync.transport", "ipc", "trainer and engines are on the same GPU"),
            Setting("train.tokens_per_microbatch", 16384),
        ]
    if machine.gpus == 1:
        return [
            Setting("train.gpus", 0.5, "trainer and engine share the GPU"),
            Setting("rollout.gpus", 0.5),
            Setting("sync.transport", "ipc"),
        ]
    trainers = max(1, machine.gpus // 2)
    return [
        Setting("train.parallel.dp", trainers, f"{trainers} GPU(s) train, {machine.gpus - trainers} generate"),
        Setting("train.distributed_optimizer", trainers > 1),
        Setting("rollout.replicas", machine.gpus - trainers),
    ]


def cautions(work: Workload, machine: Machine) -> list[str]:
    """Warnings before the run, one line each."""
    lines = []
    if machine.gpus and not work.small:
        trainers = max(1, machine.gpus // 2)
        needed = work.parameters * (BYTES_PER_PARAMETER[0] + BYTES_PER_PARAMETER[1] / trainers) / 2**30
        available = machine.gpu_gib * (0.5 if machine.gpus == 1 else 0.9)
        if machine.gpu_gib and needed > available:
            lines.append(
                f"the trainer needs about {needed:.0f} GiB per GPU, but has {available:.0f}: use an adapter (train.lora), more GPUs, or "
                "train.offload; mtpctl train RECIPE --dry-run shows the memory"
            )
    if machine.gpus > 1 and work.small:
        lines.append(f"the run uses one of {machine.gpus} GPUs; a second run with another seed can use another (CUDA_VISIBLE_DEVICES)")
    return lines


def tree(settings: Sequence[Setting]) -> dict[str, object]:
    """The settings as nested mappings."""
    result: dict[str, Any] = {}
    for setting in settings:
        section = result
        *path, name = setting.key.split(".")
        for step in path:
            section = section.setdefault(step, {})
        section[name] = setting.value
    return result


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2g}B" if parameters >= 1e9 else f"{round(parameters / 1e6)}M"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


SETTINGS: dict[str, dict[str, object]] = {"chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 3}}
"""Settings that differ from reasoning-gym's defaults, by dataset. Some of these sums are easy enough for an untrained small model."""
CPU_SETTINGS: dict[str, dict[str, object]] = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
"""The same for a run on a CPU, which is too short for harder rows: SmolLM2-135M solves 9% of these sums, and 2% of those above."""
TRAINING_ROWS = {"chain_sum": 20_000}
"""Number of training rows by dataset; 5,000 for the others."""
CPU_TRAINING_ROWS = {"chain_sum": 100}
"""The same for a run on a CPU. `CPU_SETTINGS` allow only 200 different sums, and some are needed for the held-out rows."""
STEPS_REASON = "half of the reward is for the steps, so groups without a right answer have signal too"
TOKENIZED_ROWS = 2_000
"""Number of training rows whose tokens are counted."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FirstTask:
    """`texts`: contents of the files by name. `settings`: the chosen keys with their reasons. `cautions`: warnings before the run."""

    texts: dict[str, str]
    settings: Sequence[Setting]
    cautions: Sequence[str]


def first_task(name: str, model: str, task: str, machine: Machine, templates: Path) -> FirstTask:
    """The files of `mtpctl init NAME`, except README.md. model: a folder or hub id. task: a dataset of reasoning-gym.

    Raises UserError for an unknown task or an unreadable model, and PrerequisiteMissing if reasoning-gym is not installed or the hub does
    not respond.
    """
    _check_task(task)
    config = hf_config(ModelConfig(path=model), field="--model")
    assert config is not None, "the hub was contacted"
    shape = shape_of(config)
    texts = {file: (templates / file).read_text(encoding="utf-8") for file in ("make_rows.py", "reward.py", "test_mytask.py")}
    task_settings, training_rows = (SETTINGS, TRAINING_ROWS) if machine.gpus else (CPU_SETTINGS, CPU_TRAINING_ROWS)
    constants = {
        "TASK": f'"{task}"',
        "SETTINGS": json.dumps(task_settings.get(task, {})),
        "TRAINING": f"{training_rows.get(task, 5_000):_}",
        "HELD_OUT": str(512 if machine.gpus else 48),
    }
    for constant, value in constants.items():
        texts = {file: re.sub(rf"^{constant} = .*$", f"{constant} = {value}", text, flags=re.MULTILINE) for file, text in texts.items()}
    rows, held_out = _rows(texts["make_rows.py"], task)
    tokenizer = load_plain_tokenizer(Path(model)) if Path(model).is_dir() else load_tokenizer(model)
    templated = _has_template(tokenizer)
    work = workload(shape, tokenizer, [*rows[:TOKENIZED_ROWS], *held_out], len(rows), templated)
    settings = choose(work, machine)
    texts |= {"rows.jsonl": _lines(rows), "held_out.jsonl": _lines(held_out)}
    if shape.eagle3 is None and not shape.mtp_layers and _accepts_drafter(config):
        settings = [*settings, *drafter_settings(machine)]
    texts["recipe.yaml"] = recipe_text(name, model, task, work, settings, gpu=machine.gpus > 0, templated=templated)
    return FirstTask(texts, settings, cautions(work, machine))


def _check_task(task: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a package that reasoning_gym imports
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise PrerequisiteMissing(f"init: the template reasoning-gym needs mtpctl[tasks]; install it ({error})") from error
    if task not in DATASETS:
        matches = difflib.get_close_matches(task, DATASETS, 1)
        raise UserError(f"--task: reasoning-gym has no dataset {task}; " + (f"did you mean {matches[0]}?" if matches else "try chain_sum"))


def _rows(make_rows: str, task: str) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, generated by running `make_rows`, the text of make_rows.py."""
    module: dict[str, Any] = {"__name__": "make_rows"}
    exec(compile(make_rows, "make_rows.py", "exec"), module)
    training, held_out = (
        module["make_rows"](seed, count) for seed, count in zip(module["SEEDS"], (module["TRAINING"], module["HELD_OUT"]), strict=True)
    )
    for row in held_out:
        if not isinstance(row["answer"], str) or not row["answer"].strip():
            raise UserError(f"--task: {task} has rows without an answer as text, which mtpctl needs; choose another dataset")
    return training, held_out


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _has_template(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.chat([{"role": "user", "content": "a"}])
    except NotRendered:
        return False
    return True


def workload(shape: ModelShape, tokenizer: Tokenizer, rows: Sequence[Row], count: int, templated: bool) -> Workload:
    """The sizes of the model and of its rows. Token counts are those of `rows`; `count` is the number of training rows."""
    counts = count_parameters(shape)
    moe = shape.moe
    inactive = 0 if moe is None else round(counts["experts"] * (1 - moe.experts_per_token / moe.experts))
    prompts = (
        tokenizer.chat([{"role": "user", "content": row["question"]}]) if templated else tokenizer.encode(row["question"], special=True)
        for row in rows
    )
    return Workload(
        parameters=counts["total"],
        active=counts["total"] - inactive,
        positions=shape.max_positions,
        prompt_tokens=max(map(len, prompts)),
        answer_tokens=max(len(tokenizer.encode(row["answer"])) for row in rows),
        rows=count,
    )


def drafter_settings(machine: Machine) -> list[Setting]:
    """Settings for a model without a drafter, measured with SmolLM2-135M (docs/benchmarks/drafter.md)."""
    steps, samples, batch_size, drafts = (500, 12_288, 128, 3) if machine.gpus else (200, 48, 2, 1)
    duration = "under a minute on one H200" if machine.gpus else "about four minutes on two cores"
    return [
        Setting("train.stages", ["draft", "rl"], "first the drafter alone, on samples of the model"),
        Setting("model.drafter.layers", 1, "the model has no drafter: the run adds one"),
        Setting("train.draft.steps", steps, f"{duration}, with {samples:,} samples"),
        Setting("train.draft.samples", samples),
        Setting("train.draft.batch_size", batch_size),
        Setting("mtp.loss", "soft_ce", "the drafter learns the distribution that its drafts are verified against"),
        Setting("mtp.repeat", drafts, "as many depths as draft tokens"),
        Setting("rollout.speculation.num_tokens", drafts),
        Setting("train.rl.optimizer.mtp_lr", 3e-4, "the drafter has to follow a policy that changes fast"),
    ]


def _accepts_drafter(config: Mapping[str, object]) -> bool:
    """Whether a drafter can be added to the model."""
    try:
        add_drafter_config(config)
    except UserError:
        return False
    return True


def recipe_text(name: str, model: str, task: str, work: Workload, settings: Sequence[Setting], *, gpu: bool, templated: bool) -> str:
    """The recipe as YAML, with the reason of each setting as a comment above it."""
    base_settings = [
        Setting("name", name),
        Setting("model.path", model),
        Setting("data.path", "rows.jsonl"),
        Setting("data.eval_path", "held_out.jsonl"),
        Setting("data.columns", {"prompt": "question", "answer": "answer"}),
        *([Setting("data.chat_template", True)] if templated else []),
        Setting("reward.function", "reward.py:score"),
        *([Setting("reward.args.steps", 0.5, STEPS_REASON)] if task == "chain_sum" else []),
        Setting("train.stages", ["rl"]),
        Setting("train.eval_every", 20 if gpu else 0),
        Setting("train.rl.preset", "dapo", "no KL penalty against the initial policy, and a higher upper clip"),
        Setting("rollout.engine", "vllm"),
    ]
    all_settings = [*base_settings, *settings, *([] if gpu else [Setting("cluster.device", "cpu")])]
    reasons = {setting.key: setting.reason for setting in all_settings if setting.reason}
    size = f"{work.parameters / 1e6:.0f}M"
    head = f"# {task} of reasoning-gym with {model} ({size} parameters). docs/your-first-run.md explains the choices.\n"
    return head + "".join(f"{line}\n" for line in _yaml(tree(all_settings), reasons))


def _yaml(values: Mapping[str, object], reasons: Mapping[str, str], path: str = "", indent: str = "") -> list[str]:
    """Lines of a block mapping. Lists, and mappings of strings without reasons, are written in one line."""
    lines = []
    for key, value in values.items():
        name = f"{path}{key}"
        if reason := reasons.get(name):
            lines.append(f"{indent}# {reason}")
        has_reasons = any(key.startswith(f"{name}.") for key in reasons)
        if isinstance(value, Mapping) and (has_reasons or not all(isinstance(item, str) for item in value.values())):
            lines += [f"{indent}{key}:", *_yaml(value, reasons, f"{name}.", f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


def _scalar(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_scalar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value / 10 ** (exponent := math.floor(math.log10(value))):.3g}e{exponent}"
    # JSON is YAML; plain strings only need quotes if they have special characters.
    text = json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) and value.replace("/", "").replace(".", "").replace("_", "").replace("-", "").isalnum() else text
