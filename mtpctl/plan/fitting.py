"""Checks whether each rank of a run fits its share of a GPU, suggests settings that make it fit, and describes shared GPUs.

A rank's shortfall is the memory it needs minus the memory it has, in bytes. The gain of a setting is its reduction of the shortfall. Both
are estimated with `mtpctl.plan.memory`.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pydantic import BaseModel

from mtpctl.cluster.hosts import Host
from mtpctl.errors import ClusterResources, MtpctlError, UserError
from mtpctl.families.shape import ModelShape
from mtpctl.plan.memory import GIB, EngineMemory, engine_memory, logprob_memory, max_sample_tokens, teacher_memory, trainer_memory
from mtpctl.plan.placement import Actor, Placement, core_shortage, engine_memory_share, engine_share
from mtpctl.recipe.rollout import check_tp
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.section import ParallelConfig, check_parallel
from mtpctl.telemetry.versions import gpu_memory_gib, mps_state

Rank = Literal["trainer_rank", "rollout_rank", "rollout_rank_on_trainer_gpu", "logprob_rank", "teacher_rank", "shared_card"]
Change = Mapping[str, object]
"""Values by dotted key, as for `--set`."""
Shortfall = Callable[[Recipe], int]
MAX_MEMORY_SHARE = 0.95
"""Maximum `rollout.gpu_memory` to suggest. CUDA graphs and the CUDA context take the rest."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the recipe and the bytes it gains. fits: whether the rank then fits. more_gpus: whether the change needs more GPUs."""

    change: Change
    gain: int
    fits: bool
    more_gpus: bool

    def __str__(self) -> str:
        return " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.change.items())


@dataclass(frozen=True, slots=True)
class Misfit:
    """A rank that does not fit: its error, the missing bytes, and remedies in descending order of their gain.

    combination: remedies that suffice together, if possible without more GPUs. Empty if a single remedy suffices, or if all of them
    together do not.
    """

    rank: Rank
    error: MtpctlError
    shortfall: int
    remedies: tuple[Remedy, ...]
    combination: tuple[Remedy, ...]


def find_misfits(recipe: Recipe, shape: ModelShape, teacher: ModelShape | None = None) -> Iterator[Misfit]:
    """Yield every rank that does not fit a GPU of `cluster.gpu_gib`. If that is not set, only `rollout.kv_cache_bytes` is checked.

    teacher: shape of the teacher that the run serves; None without one, or if its config is not on this machine.
    """
    gpu_gib = recipe.cluster.gpu_gib
    if gpu_gib is not None and (missing := _trainer_shortfall(recipe, shape)) > 0:
        available = gpu_gib * recipe.train.gpus
        shortfall = partial(_trainer_shortfall, shape=shape)
        remedies = _remedies(recipe, shortfall, _trainer_changes(recipe, shape))
        # Prefer a remedy that suffices, and one without more GPUs.
        best = max(remedies, key=lambda remedy: (remedy.fits and not remedy.more_gpus, remedy.fits, remedy.gain), default=None)
        fix = f"set {best}, which gains {best.gain / GIB:.1f} GiB" if best else "use larger GPUs"
        text = f"train.parallel: a trainer rank needs {missing / GIB + available:.0f} GiB, but has {available:g} GiB of a GPU; {fix}"
        yield _misfit("trainer_rank", ClusterResources(text), recipe, shortfall, remedies)
    if not recipe.train.needs_rollout:
        return
    if gpu_gib is not None and recipe.runs_logprob_server and (missing := _logprob_shortfall(recipe, shape)) > 0:
        shortfall = partial(_logprob_shortfall, shape=shape)
        remedies = _remedies(recipe, shortfall, _server_changes(recipe, shape, "logprob"))
        yield _misfit("logprob_rank", _server_error(recipe, missing, "logprob"), recipe, shortfall, remedies)
    if gpu_gib is not None and teacher is not None and (missing := _teacher_shortfall(recipe, teacher)) > 0:
        server, field = recipe.for_teacher_server(), "train.rl.teacher"
        shortfall = partial(_teacher_shortfall, shape=teacher)
        remedies = _remedies(recipe, shortfall, _server_changes(server, teacher, field))
        yield _misfit("teacher_rank", _server_error(server, missing, field), recipe, shortfall, remedies)
    if gpu_gib is not None and (excess := _shared_gpu_excess(recipe)) > 0:
        _, engines, shares = _fullest_shared_gpu(recipe)
        memory = engine_memory_share(recipe)
        others = "".join(f" and {field}: {share:g}" for field, share in shares.items())
        times = f" of {engines} engines" if engines > 1 else ""
        text = f"rollout.gpu_memory: {memory:g}{times}{others} share a GPU and exceed it; lower one of them"
        lower = math.floor(100 * (memory - excess / GIB / gpu_gib / engines) + 1e-6) / 100
        remedies = _remedies(recipe, _shared_gpu_excess, [{"rollout.gpu_memory": lower}] if lower > 0 else [])
        yield _misfit("shared_card", ClusterResources(text), recipe, _shared_gpu_excess, remedies)
    for index in engine_kinds(recipe):
        if (engine_error := _engine_error(recipe, shape, index)) is not None:
            shortfall = partial(_engine_shortfall, shape=shape, index=index)
            on_trainer = index is not None
            changes = _on_trainer_changes(recipe, shape) if on_trainer else _engine_changes(recipe, shape)
            rank: Rank = "rollout_rank_on_trainer_gpu" if on_trainer else "rollout_rank"
            yield _misfit(rank, engine_error, recipe, shortfall, _remedies(recipe, shortfall, changes))


def engine_kinds(recipe: Recipe) -> list[int | None]:
    """The recipe's kinds of engines, as values of `index` in `engine_memory`: 0 for those on the trainer's GPUs, None for others."""
    on_trainer = recipe.rollout.on_trainer_gpus
    return ([0] if on_trainer else []) + ([None] if recipe.rollout.replica_range.max > on_trainer else [])


def gpu_gib_needed(recipe: Recipe, shape: ModelShape, teacher: ModelShape | None = None) -> float:
    """Minimum size of a GPU in GiB for the recipe's fullest rank. Each engine's cache must fit at least one sample.

    teacher: as in `find_misfits`.
    """
    sizes = [trainer_memory(recipe, shape).total / recipe.train.gpus]
    if recipe.train.needs_rollout:
        for index in engine_kinds(recipe):
            share = engine_share(recipe, index) if recipe.rollout.kv_cache_bytes else engine_memory_share(recipe, index)
            sizes.append(_engine_minimum(recipe, shape, index) / max(share, 1e-9))
        if recipe.runs_logprob_server:
            sizes.append(logprob_memory(recipe, shape).total / (min(1.0, recipe.logprob.gpus) or 1.0))
        if teacher is not None:
            sizes.append(teacher_memory(recipe, teacher).total / min(1.0, recipe.for_teacher_server().logprob.gpus))
    return max(sizes) / GIB


def apply_change(recipe: Recipe, change: Change) -> Recipe:
    """Return the recipe with these values, without the checks that span several sections."""
    for key, value in change.items():
        recipe = _set_value(recipe, key.split("."), value)
    return recipe


def _set_value[T: BaseModel](section: T, path: Sequence[str], value: object) -> T:
    head, *rest = path
    return section.model_copy(update={head: _set_value(getattr(section, head), rest, value) if rest else value})


def _trainer_shortfall(recipe: Recipe, shape: ModelShape) -> int:
    return trainer_memory(recipe, shape).total - int(_gpu_bytes(recipe) * recipe.train.gpus)


def _logprob_shortfall(recipe: Recipe, shape: ModelShape) -> int:
    return logprob_memory(recipe, shape).total - int(_gpu_bytes(recipe) * min(1.0, recipe.logprob.gpus))


def _teacher_shortfall(recipe: Recipe, shape: ModelShape) -> int:
    return _logprob_shortfall(recipe.for_teacher_server(), shape)


def _server_error(recipe: Recipe, missing: int, field: str) -> ClusterResources:
    """The error of a rank of the log-prob server whose share of a GPU is too small by `missing` bytes. field: its section of the recipe."""
    share = _gpu_bytes(recipe) * min(1.0, recipe.logprob.gpus)
    return ClusterResources(
        f"{field}.gpus: a rank needs {(missing + share) / GIB:.0f} GiB, but its share is {share / GIB:.0f} GiB; raise it"
    )


def _engine_shortfall(recipe: Recipe, shape: ModelShape, index: int | None) -> int:
    rollout, memory = recipe.rollout, engine_memory(recipe, shape, index)
    if index is not None and not rollout.on_trainer_gpus:
        return 0  # The remedy that is evaluated moves the engine to another GPU.
    if rollout.kv_cache_bytes is None:
        return _engine_minimum(recipe, shape, index) - int(_gpu_bytes(recipe) * engine_memory_share(recipe, index))
    cache_shortfall = _sample_cache_bytes(recipe, shape, memory) - rollout.kv_cache_bytes
    available = int(_gpu_bytes(recipe) * engine_share(recipe, index))
    gpu_shortfall = 0 if recipe.cluster.gpu_gib is None else memory.weights + memory.reserve + rollout.kv_cache_bytes - available
    return max(cache_shortfall, gpu_shortfall)


def _shared_gpu_excess(recipe: Recipe) -> int:
    """Bytes by which an engine and the ranks on the same GPU exceed the GPU."""
    return int((_fullest_shared_gpu(recipe)[0] - 1) * _gpu_bytes(recipe) + 0.5)


def _fullest_shared_gpu(recipe: Recipe) -> tuple[float, int, dict[str, float]]:
    """Of the fullest GPU with an engine: its used share, its number of engines, and the shares of other ranks by recipe field.

    Excludes engines of `rollout.on_trainer_gpus`: their memory follows from the trainer's share.
    """
    shares = {"train.gpus": recipe.train.gpus}
    if recipe.runs_logprob_server:
        shares["logprob.gpus"] = recipe.logprob.gpus
    if recipe.served_teacher is not None:
        shares["train.rl.teacher.gpus"] = recipe.served_teacher.gpus
    engine = engine_share(recipe)
    others = {field: share for field, share in shares.items() if share + engine <= 1 + 1e-9}
    # The engine's GPU may be shared with all of them, or with one of them.
    groups = [others] if sum(others.values()) + engine <= 1 + 1e-9 else [{field: share} for field, share in others.items()]
    memory, replicas = engine_memory_share(recipe), recipe.rollout.replica_range.max - recipe.rollout.on_trainer_gpus
    used: list[tuple[float, int, dict[str, float]]] = []
    for group in [*groups, {}] if replicas > 0 else []:
        engines = min(replicas, int((1 - sum(group.values()) + 1e-9) / engine))
        if group or engines > 1:
            used.append((sum(group.values()) + engines * memory, engines, group))
    return max(used, key=lambda gpu: gpu[0], default=(0.0, 1, {}))


def _gpu_bytes(recipe: Recipe) -> float:
    return (recipe.cluster.gpu_gib or 0.0) * GIB


def _engine_minimum(recipe: Recipe, shape: ModelShape, index: int | None = None) -> int:
    """Minimum bytes of an engine: its weights, its reserve, and a cache for one sample of full length."""
    memory = engine_memory(recipe, shape, index)
    return memory.weights + memory.reserve + (recipe.rollout.kv_cache_bytes or _sample_cache_bytes(recipe, shape, memory))


def _sample_cache_bytes(recipe: Recipe, shape: ModelShape, memory: EngineMemory) -> int:
    return max_sample_tokens(recipe, shape) * memory.kv_token + memory.sequence_state


def _engine_error(recipe: Recipe, shape: ModelShape, index: int | None) -> MtpctlError | None:
    rollout, gpu_gib, memory = recipe.rollout, recipe.cluster.gpu_gib, engine_memory(recipe, shape, index)
    cache, share = memory.kv_cache, engine_share(recipe, index)
    fixed = memory.weights + memory.reserve
    contents = f"{fixed / GIB:.1f} GiB of weights" + (", activations and CUDA graphs" if memory.reserve else "")
    if rollout.kv_cache_bytes is not None and gpu_gib is not None and fixed + rollout.kv_cache_bytes > gpu_gib * share * GIB:
        available = f"the GPU's {gpu_gib:g} GiB" if share == 1 else f"the engine's {gpu_gib * share:.1f} GiB of a GPU"
        return ClusterResources(
            f"rollout.kv_cache_bytes: {rollout.kv_cache_bytes / GIB:.1f} GiB and {contents} exceed {available}; "
            + ("lower it" if index is None else "lower it, or train.gpus")
        )
    field, fix = "rollout.gpu_memory", "raise it, or rollout.tp" if share == 1 else "raise it, or rollout.gpus"
    if index is not None:
        field, fix = "rollout.on_trainer_gpus", "lower train.gpus, or set on_trainer_gpus: 0"
    if cache is not None and cache <= 0:
        return ClusterResources(f"{field}: {(fixed + cache) / GIB:.1f} GiB of the GPU are too small for {contents}; {fix}")
    tokens = replace(memory, states=memory.sequence_state).kv_tokens
    if tokens is not None and tokens < max_sample_tokens(recipe, shape):
        start = f"{field}: {engine_memory_share(recipe, index):g} leaves a KV cache of {cache} bytes, which hold"
        if rollout.kv_cache_bytes:
            start, fix = f"rollout.kv_cache_bytes: {cache} bytes hold", "raise it"
        return UserError(
            f"{start} {tokens} tokens at {memory.kv_token} bytes each; a sample may have {max_sample_tokens(recipe, shape)} tokens and "
            f"needs {_sample_cache_bytes(recipe, shape, memory)} bytes; {fix}, or lower rollout.context"
        )
    return None


def _misfit(rank: Rank, error: MtpctlError, recipe: Recipe, shortfall: Shortfall, remedies: Sequence[Remedy]) -> Misfit:
    combination: list[Remedy] = []
    if not any(remedy.fits for remedy in remedies):
        combination = _combine_remedies(recipe, [r for r in remedies if not r.more_gpus], shortfall) or _combine_remedies(
            recipe, remedies, shortfall
        )
    return Misfit(rank, error, shortfall(recipe), tuple(remedies), tuple(combination))


def _remedies(recipe: Recipe, shortfall: Shortfall, changes: Sequence[Change]) -> list[Remedy]:
    """The remedies for the changes with a positive gain, the largest gain first."""
    remedies = (_remedy(recipe, change, shortfall) for change in changes)
    return sorted((remedy for remedy in remedies if remedy.gain > 0), key=lambda remedy: -remedy.gain)


def _remedy(recipe: Recipe, change: Change, shortfall: Shortfall) -> Remedy:
    changed_recipe = apply_change(recipe, change)
    remaining = shortfall(changed_recipe)
    return Remedy(change, shortfall(recipe) - remaining, remaining <= 0, _count_gpus(changed_recipe) > _count_gpus(recipe))


def _combine_remedies(recipe: Recipe, remedies: Sequence[Remedy], shortfall: Shortfall) -> list[Remedy]:
    """Remedies that suffice in combination, selected greedily by their additional gain; empty if all together do not suffice."""
    candidates, selected = list(remedies), []
    while candidates and shortfall(recipe) > 0:
        best = min(candidates, key=lambda remedy: shortfall(apply_change(recipe, remedy.change)))
        recipe = apply_change(recipe, best.change)
        selected.append(best)
        candidates = [remedy for remedy in candidates if not remedy.change.keys() & best.change.keys()]
    return selected if shortfall(recipe) <= 0 else []


def _count_gpus(recipe: Recipe) -> float:
    """Number of GPUs that the recipe's actors need."""
    gpus = recipe.train.parallel.world_size * recipe.train.gpus
    if recipe.train.needs_rollout:
        gpus += recipe.rollout.tp * sum(engine_share(recipe, index) for index in range(recipe.rollout.replica_range.min))
        servers = [recipe.logprob] if recipe.runs_logprob_server else []
        servers += [recipe.for_teacher_server().logprob] if recipe.served_teacher is not None else []
        gpus += sum(server.replicas * server.parallel.world_size * server.gpus for server in servers)
    return gpus


def _trainer_changes(recipe: Recipe, shape: ModelShape) -> list[Change]:
    train, parallel = recipe.train, recipe.train.parallel
    modes = {"none": ("selective", "full"), "selective": ("full",), "full": ()}[train.recompute]
    changes: list[Change] = [{"train.recompute": mode} for mode in modes]
    changes += [{f"train.offload.{part}": True} for part in ("optimizer", "params", "grads") if not getattr(train.offload, part)]
    if not train.distributed_optimizer:
        more_ranks: Change = {"train.parallel.dp": 2} if parallel.dp * parallel.cp == 1 else {}
        changes.append({**more_ranks, "train.distributed_optimizer": True})
    else:
        changes.append({"train.parallel.dp": 2 * parallel.dp})
    if train.tokens_per_microbatch // 2 >= max_sample_tokens(recipe, shape):  # A sample over the limit would be a separate microbatch.
        changes.append({"train.tokens_per_microbatch": train.tokens_per_microbatch // 2})
    if train.precision == "fp32":
        changes.append({"train.precision": "bf16"})
    if recipe.kernels.linear_logprob == "reference":
        changes.append({"kernels.linear_logprob": "auto"})
    return [*changes, *_parallel_changes(parallel, shape, "train.parallel")]


def _server_changes(recipe: Recipe, shape: ModelShape, field: str) -> list[Change]:
    """Changes that reduce the memory of a rank of `recipe.logprob`, whose section of the user's recipe is `field`."""
    server = recipe.logprob
    changes: list[Change] = [{"logprob.keep_previous": False}] if server.keep_previous else []
    if server.gpus < 1:
        needed = logprob_memory(recipe, shape).total / _gpu_bytes(recipe)
        changes += [{f"{field}.gpus": math.ceil(100 * needed) / 100}] if needed <= 1 else []
    if server.tokens_per_batch // 2 >= max_sample_tokens(recipe, shape):
        changes.append({"logprob.tokens_per_batch": server.tokens_per_batch // 2})
    return [*changes, *_parallel_changes(server.parallel, shape, f"{field}.parallel")]


def _parallel_changes(parallel: ParallelConfig, shape: ModelShape, field: str) -> Iterator[Change]:
    """Layouts that split the model over twice the ranks, if Megatron supports them."""
    names = ["tp"] + (["pp"] if parallel.pp_layout is None else []) + ["cp"] + (["ep"] if shape.moe else [])
    for name in names:
        update: dict[str, object] = {name: 2 * getattr(parallel, name)}
        if name == "tp" and not parallel.sequence_parallel:
            update["sequence_parallel"] = True
        if name == "ep" and (parallel.dp * parallel.cp) % (2 * parallel.ep):
            update["dp"] = 2 * parallel.dp
        if not list(check_parallel(parallel.model_copy(update=update), shape, field)):
            yield {f"{field}.{key}": value for key, value in update.items()}


def _engine_changes(recipe: Recipe, shape: ModelShape) -> list[Change]:
    rollout = recipe.rollout
    changes: list[Change] = []
    if not list(check_tp(2 * rollout.tp, shape)):
        changes.append({"rollout.tp": 2 * rollout.tp})
    if recipe.train.precision == "fp32" and rollout.dtype == "auto":
        changes.append({"rollout.dtype": "bf16"})
    memory = engine_memory(recipe, shape)
    if rollout.kv_cache_bytes is None:
        share = math.ceil(100 * _engine_minimum(recipe, shape) / _gpu_bytes(recipe)) / 100
        changes += [{"rollout.gpu_memory": share}] if share <= MAX_MEMORY_SHARE * engine_share(recipe) else []
        cache = int(_gpu_bytes(recipe) * engine_memory_share(recipe)) - memory.weights - memory.reserve
    else:
        cache = rollout.kv_cache_bytes
        free_bytes = int(_gpu_bytes(recipe) * engine_share(recipe)) - memory.weights - memory.reserve
        max_cache = None if recipe.cluster.gpu_gib is None else free_bytes
        needed = _sample_cache_bytes(recipe, shape, memory)
        if cache < needed and (max_cache is None or needed <= max_cache):
            changes.append({"rollout.kv_cache_bytes": needed})
        elif max_cache is not None and needed <= max_cache:
            changes.append({"rollout.kv_cache_bytes": max_cache})
    context = (cache - memory.sequence_state) // memory.kv_token if memory.kv_token else 0
    if 1 < context < max_sample_tokens(recipe, shape):
        changes.append({"rollout.context": context})
    return changes


def _on_trainer_changes(recipe: Recipe, shape: ModelShape) -> list[Change]:
    """Changes that give an engine on the trainer's GPU more memory: fewer engines there, or a smaller share that the trainer still fits."""
    engines = recipe.rollout.on_trainer_gpus
    changes: list[Change] = [{"rollout.on_trainer_gpus": fewer} for fewer in sorted({0, engines - 1})]
    min_share = math.ceil(100 * trainer_memory(recipe, shape).total / _gpu_bytes(recipe)) / 100 if _gpu_bytes(recipe) else 1.0
    if min_share < recipe.train.gpus:
        changes.append({"train.gpus": min_share})
    return changes


def sharing_cautions(recipe: Recipe, placement: Placement, hosts: Sequence[Host] | None = None) -> list[str]:
    """Cautions about too few cores, and about GPUs whose processes take turns.

    hosts: hosts of the cluster that the run joins. None: this machine. If it has no GPU, the plan is for another machine, and the result is
    empty.
    """
    if hosts is None and gpu_memory_gib() is None:
        return []
    cores = {0: float(len(os.sched_getaffinity(0)))} if hosts is None else {i: host.cpus for i, host in enumerate(hosts)}
    cautions = list(filter(None, [core_shortage(recipe, placement, cores)]))
    processes = Counter((actor.host, gpu) for actor in placement.actors for gpu in actor.gpu_ids)
    if processes and max(processes.values()) > 1 and hosts is None and mps_state() == "off":
        cautions.append(
            f"cluster: {max(processes.values())} processes share a GPU and take turns on it; with CUDA MPS their kernels run concurrently: "
            "start nvidia-cuda-mps-control -d before the run"
        )
    return cautions


def planned_bytes(recipe: Recipe, shape: ModelShape, actor: Actor, teacher: ModelShape | None = None) -> int | None:
    """Planned memory of an actor on its GPU, in bytes. teacher: as in `find_misfits`; without it, a teacher's memory is None.

    For a rank of the trainer or of a log-prob server: its estimate. For an engine: its weights, reserve and `rollout.kv_cache_bytes`; if
    that is not set, its share of `cluster.gpu_gib`, which must then be known.
    """
    if actor.role == "trainer":
        return trainer_memory(recipe, shape).total
    if actor.role == "logprob":
        return logprob_memory(recipe, shape).total
    if actor.role == "teacher":
        return None if teacher is None else teacher_memory(recipe, teacher).total
    if recipe.rollout.kv_cache_bytes is not None:
        memory = engine_memory(recipe, shape, actor.index)
        return memory.weights + memory.reserve + recipe.rollout.kv_cache_bytes
    return int((recipe.cluster.gpu_gib or 0.0) * GIB * engine_memory_share(recipe, actor.index))


def shared_gpu_lines(
    recipe: Recipe, shape: ModelShape, placement: Placement, hosts: Sequence[str], teacher: ModelShape | None = None
) -> Iterator[str]:
    """A line for each GPU that several actors share: the actors, and their planned memory. Empty if the size of the GPUs is unknown.

    hosts: names of the hosts; empty if they are not known yet. teacher: as in `find_misfits`.
    """
    by_gpu: defaultdict[tuple[int, int], list[Actor]] = defaultdict(list)
    for actor in placement.actors:
        for gpu in actor.gpu_ids:
            by_gpu[actor.host, gpu].append(actor)
    gib, label = recipe.cluster.gpu_gib, "shared"
    for (host, gpu), actors in by_gpu.items() if gib is not None else ():
        if len(actors) > 1:
            sizes = [planned_bytes(recipe, shape, actor, teacher) for actor in actors]
            actor_sizes = ", ".join(
                f"{actor.name} {'of unknown size' if size is None else format_bytes(size)}"
                for actor, size in zip(actors, sizes, strict=True)
            )
            name, total = hosts[host] if hosts else host, sum(size or 0 for size in sizes)
            yield f"{label:10} host {name}, GPU {gpu}: {actor_sizes}; {format_bytes(total)} of {gib:.4g} GiB"
            label = ""


def format_bytes(value: int) -> str:
    """A size with one decimal and a binary unit."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
