"""Settings for the first RL run of a pretrained model, from the model's size, the rows and the machine.

Each setting has a reason, which `mtpctl init` prints and writes into the recipe. docs/your-first-run.md shows the curves behind the rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEARNING_RATES = ((2e6, 2e-4), (1.35e8, 3e-5), (7e9, 1e-6))
"""Learning rate by number of parameters.

The first two were the best of several in the runs of docs/your-first-run.md. The last is the usual rate for 7B without an adapter, also in
recipes/mimo7b_mtp.yaml.
"""
SMALL = 1_000_000_000
"""Number of parameters below which a model is small: the host rather than the GPU limits its rollout, so the trainer mostly waits."""
MINIBATCHES = 4
OPTIMIZER_STEPS_OF_WARMUP = 20
RESPONSE_TOKENS = {"small": 128, "large": 512}
"""Tokens for reasoning before the answer. SmolLM2-135M writes 39 on average; models of 1B and more reason longer."""
BYTES_PER_PARAMETER = (6, 12)
"""Trainer memory per parameter: (bf16 weights and fp32 gradients, fp32 weights and Adam's moments). DP ranks can shard the second."""
CORES_PER_ENGINE = 6
"""CPU cores per engine of a small model: three for the engine itself, and three for its part of controller, rewards and trainer."""
MAX_ENGINES = 2
"""Maximum engines of a small model on one GPU. A third one is faster if the host has idle cores for it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU cores, and number and memory (GiB) of the GPUs. Without GPUs the run uses the CPU."""

    cores: int
    gpus: int = 0
    gpu_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its rows.

    Attributes:
        parameters: number of parameters.
        active: number of parameters that one token uses; fewer with a mixture of experts.
        positions: maximum tokens of the model.
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
        return self.parameters < SMALL


@dataclass(frozen=True, slots=True)
class Setting:
    """A recipe key, its value, and the reason. The reason also applies to the settings without one that follow."""

    key: str
    value: object
    why: str = ""


def learning_rate(parameters: float) -> float:
    """The learning rate for a model: interpolated between `LEARNING_RATES` in logarithms, constant beyond them, with one digit."""
    logs = [(math.log(size), math.log(rate)) for size, rate in LEARNING_RATES]
    x = min(max(math.log(parameters), logs[0][0]), logs[-1][0])
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(logs) if x <= pair[1][0])
    rate = math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return float(f"{rate:.0e}")


def signal(success: float, group: int) -> float:
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
    measured = "the best of the rates measured at 135M" if 1e8 <= work.active <= 2e8 else "smaller models need larger rates"
    chance = f"at a success rate of 3%, {signal(0.03, group):.0%} of the groups of {group} have signal"
    return [
        Setting("train.rl.optimizer.lr", rate, f"{size} parameters: interpolated between 2M: 2e-4, 135M: 3e-5 and 7B: 1e-6 ({measured})"),
        Setting("train.rl.optimizer.warmup_steps", OPTIMIZER_STEPS_OF_WARMUP if gpu else 2),
        Setting("train.rl.minibatches", minibatches, "optimizer steps per update: they cost no time while the trainer waits for rollout"),
        Setting("train.rl.group_size", group, f"{chance}, {signal(0.03, 2 * group):.0%} of those of {2 * group}; others are replaced"),
        Setting(
            "train.rl.prompts_per_step",
            prompts,
            f"{prompts * group} responses per update, {prompts * group // minibatches} per optimizer step",
        ),
        Setting("train.rl.steps", 500 if gpu else 4, _duration(work, machine)),
        Setting("rollout.max_tokens", response, f"room for reasoning, and 4 x the longest answer of {work.answer_tokens} tokens"),
        Setting("train.rl.overlong.buffer", max(1, response // 8), "only the last eighth of max_tokens is penalized"),
        Setting("rollout.context", context, f"the longest prompt has {work.prompt_tokens} tokens"),
        *_placement(work, machine),
        _ahead(work, machine),
    ]


def _duration(work: Workload, machine: Machine) -> str:
    if not machine.gpus:
        return "a short demonstration: on two cores an update takes one to two minutes"
    return "about 15 minutes on one H100" if work.small else "watch the curve of held-out accuracy, and stop when it is flat"


def _ahead(work: Workload, machine: Machine) -> Setting:
    key = "async.staleness_threshold"
    if machine.gpus and work.small:
        return Setting(key, 2.0, "responses of two batches are in flight during an update, as many as the engines have slots")
    return Setting(key, 1.0, "the next batch is generated during an update")


def _placement(work: Workload, machine: Machine) -> list[Setting]:
    """Processes on GPUs, or the settings of a CPU."""
    if not machine.gpus:
        return [
            Setting("rollout.eager", True, "on a CPU compilation takes longer than this run"),
            Setting("rollout.max_in_flight", 32),
            Setting("train.tokens_per_microbatch", 2048),
        ]
    if work.small:
        engines = max(1, min(MAX_ENGINES, machine.cores // CORES_PER_ENGINE))
        reason = (
            f"{engines} engine(s) and the trainer share a GPU: an engine keeps up to three CPU cores busy, which limit it before the GPU"
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
                "train.offload; mtpctl train --dry-run shows the memory"
            )
    if machine.gpus > 1 and work.small:
        lines.append(f"the run uses one of {machine.gpus} GPUs; a second run with another seed can use another (CUDA_VISIBLE_DEVICES)")
    return lines


def tree(settings: Sequence[Setting]) -> dict[str, object]:
    """The settings as nested mappings."""
    result: dict[str, object] = {}
    for setting in settings:
        at = result
        *path, last = setting.key.split(".")
        for step in path:
            child = at.setdefault(step, {})
            assert isinstance(child, dict)
            at = child
        at[last] = setting.value
    return result


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2g}B" if parameters >= 1e9 else f"{round(parameters / 1e6)}M"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
