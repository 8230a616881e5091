"""What `train --dry-run` prints: everything that can be known about a run before anything is started."""

from __future__ import annotations

from dataclasses import asdict
from typing import NotRequired, TypedDict

from mtpctl.data.look import look
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.serving import check_importable
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.memory import GIB, EngineMemory, LogprobMemory, TrainerMemory, check_fits, engine_memory, logprob_memory, trainer_memory
from mtpctl.plan.placement import Actor, place
from mtpctl.plan.wire import base_weight_bytes, section_buckets
from mtpctl.recipe.cautions import cautions_of
from mtpctl.recipe.model_source import hf_config
from mtpctl.recipe.schema import Recipe

Sizes = dict[str, int | None]


class ModelPlan(TypedDict):
    """The model of a run."""

    family: str
    architecture: str
    parameters: dict[str, int]
    mtp_layers: int
    mtp_mode: str
    max_positions: int


class ActorPlan(TypedDict):
    """One actor, its host, and the CPUs and GPUs that it takes."""

    name: str
    role: str
    host: int
    cpus: float
    gpus: float


class PlacementPlan(TypedDict):
    """All actors, and what they take together."""

    device: str
    hosts: int
    cpus: float
    gpus: float
    actors: list[ActorPlan]


class SchedulePlan(TypedDict):
    """How far generation runs ahead, and how often weights are synced."""

    staleness_threshold: float
    sync_every: int
    old_logprobs: NotRequired[str]


class SectionPlan(TypedDict):
    """The buckets of one section of a sync."""

    tensors: int
    buckets: int
    bytes: int
    largest: int


# The key `async` is a word of Python.
Plan = TypedDict(
    "Plan",
    {
        "name": str,
        "run_dir": str,
        "stages": dict[str, int],
        "model": ModelPlan,
        "placement": PlacementPlan,
        "memory": dict[str, Sizes],
        "async": SchedulePlan,
        "data": list[str],
        "cautions": list[str],
        "buckets": NotRequired[dict[str, SectionPlan]],
        "bytes_once": NotRequired[int],
    },
)


def dry_run(recipe: Recipe) -> Plan:
    """The plan of a run, JSON-ready. Sizes are bytes.

    Raises UserError, EnvironmentMissing (a hub that does not answer, a package that the family is served with) or ClusterResources, as
    the run itself would.
    """
    config = hf_config(recipe.model)
    if config is None:
        raise UserError("model: its sizes are not known")
    shape = shape_of(config)
    if "rl" in recipe.train.stages and recipe.rollout.engine == "vllm":
        check_importable(config)
    placement = place(recipe)
    check_fits(recipe, shape)
    trainer = trainer_memory(recipe, shape)
    plan: Plan = {
        "name": recipe.name,
        "run_dir": str(recipe.run_path),
        "stages": {stage: {"sft": recipe.train.sft.steps, "rl": recipe.train.rl.steps}[stage] for stage in recipe.train.stages},
        "model": {
            "family": shape.family,
            "architecture": shape.architecture,
            "parameters": count_parameters(shape),
            "mtp_layers": shape.mtp_layers,
            "mtp_mode": recipe.mtp.mode,
            "max_positions": shape.max_positions,
        },
        "placement": {
            "device": placement.device,
            "hosts": placement.hosts,
            "cpus": placement.cpus,
            "gpus": placement.gpus,
            "actors": [
                {"name": a.name, "role": _role(recipe, a), "host": a.host, "cpus": a.cpus, "gpus": a.gpus} for a in placement.actors
            ],
        },
        "memory": {"trainer_rank": _sizes(trainer) | {"total": trainer.total}},
        "async": {"staleness_threshold": recipe.async_.staleness, "sync_every": recipe.async_.sync_every},
        "data": list(map(str, look(recipe.data, recipe.evaluation, recipe.train.stages))),
        "cautions": list(cautions_of(recipe)),
    }
    if "rl" in recipe.train.stages:
        engine = engine_memory(recipe, shape)
        plan["memory"]["rollout_rank"] = _sizes(engine) | {"kv_tokens": engine.kv_tokens}
        if recipe.logprob.standalone:
            server = logprob_memory(recipe, shape)
            plan["memory"]["logprob_rank"] = _sizes(server) | {"total": server.total}
        plan["buckets"] = {
            section: {
                "tensors": len({entry.name for bucket in buckets for entry in bucket.entries}),
                "buckets": len(buckets),
                "bytes": sum(bucket.nbytes for bucket in buckets),
                "largest": max(bucket.nbytes for bucket in buckets),
            }
            for section, buckets in section_buckets(recipe, shape).items()
        }
        plan["bytes_once"] = base_weight_bytes(recipe, shape)
        plan["async"]["old_logprobs"] = recipe.old_logprobs
    return plan


def render(plan: Plan) -> str:
    """The plan for a person to read."""
    model, placement = plan["model"], plan["placement"]
    counts = model["parameters"]
    stages = ", ".join(f"{stage} {steps} steps" for stage, steps in plan["stages"].items())
    lines = [
        f"{plan['name']}: {stages} → {plan['run_dir']}",
        "",
        f"model      {model['architecture']} ({model['family']}), {_count(counts['total'])} parameters, {model['max_positions']} positions",
        f"           {_count(counts['mtp'])} in {model['mtp_layers']} MTP layer(s) ({model['mtp_mode']}), "
        f"{_count(counts['embedding'])} in the embedding, {_count(counts['head'])} in the head",
        f"placement  {placement['device']}, {placement['hosts']} host(s), {placement['cpus']:g} CPUs, {placement['gpus']:g} GPUs",
    ]
    width = max(len(actor["name"]) for actor in placement["actors"])
    for actor in placement["actors"]:
        amount = f"{actor['cpus']:g} CPU" + (f", {actor['gpus']:g} GPU" if actor["gpus"] else "")
        lines.append(f"           {actor['name']:{width}}  host {actor['host']}, {amount}: {actor['role']}")
    lines.append("memory     estimates, without CUDA context and allocator slack")
    for rank, sizes in plan["memory"].items():
        parts = ", ".join(f"{name.replace('_', ' ')} {_size(name, value)}" for name, value in sizes.items() if value)
        lines.append(f"           {rank.replace('_', ' ')}: {parts}")
    if "buckets" in plan:
        schedule = plan["async"]
        anchor = {"behaviour": "the engine's own", "recompute": "recomputed by Megatron"}[schedule["old_logprobs"]]
        lines.append(
            f"sync       every {schedule['sync_every']} update(s), staleness threshold {schedule['staleness_threshold']:g}, "
            f"old log-probs {anchor}"
        )
        for section, one in plan["buckets"].items():
            bucketed = f"{_bytes(one['bytes'])}, largest {_bytes(one['largest'])}"
            lines.append(f"           {section}: {one['tensors']} tensors in {one['buckets']} bucket(s), {bucketed}")
        if plan["bytes_once"]:
            lines.append(f"           at the first sync also {_bytes(plan['bytes_once'])} of base weights")
    lines += [f"{'data' if not number else '':10} {line}" for number, line in enumerate(plan["data"])]
    lines += [f"caution    {caution}" for caution in plan["cautions"]]
    return "\n".join(lines)


def _role(recipe: Recipe, actor: Actor) -> str:
    parallel = recipe.train.parallel
    if actor.role == "trainer":
        layout = ", ".join(f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "cp", "ep", "dp") if getattr(parallel, name) > 1)
        return f"Megatron trainer, {recipe.train.precision}" + (f", {layout}" if layout else "")
    if actor.role == "rollout":
        k = recipe.rollout.speculation.num_tokens
        return f"{recipe.rollout.engine}, tp {recipe.rollout.tp}, " + (f"{k} draft token(s) a step" if k else "no speculation")
    return "old log-probs beside generation"


def _sizes(memory: TrainerMemory | EngineMemory | LogprobMemory) -> Sizes:
    return asdict(memory)


def _size(name: str, value: int) -> str:
    return f"{value:,}" if name == "kv_tokens" else _bytes(value)


def _bytes(value: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"


def _count(value: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)
