"""What `train --dry-run` prints: everything that can be known about a run before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import NotRequired, TypedDict, TypeVar

from mtpctl.cluster.local import cluster
from mtpctl.cluster.room import Host
from mtpctl.controller.rehearsal import rehearse
from mtpctl.data.look import look
from mtpctl.errors import ClusterResources, MtpctlError, UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.serving import check_importable
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.fitting import Misfit, Remedy, card_needed, changed, misfits
from mtpctl.plan.memory import GIB, EngineMemory, LogprobMemory, TrainerMemory, engine_memory, logprob_memory, trainer_memory
from mtpctl.plan.placement import Actor, Placement, place
from mtpctl.plan.routes import route_bytes
from mtpctl.plan.wire import base_weight_bytes, section_buckets
from mtpctl.recipe.cautions import cautions_of
from mtpctl.recipe.model_source import hf_config
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.installed import check_engine
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.sinks import check_packages
from mtpctl.telemetry.versions import card_gib

Answer = TypeVar("Answer")
MOST_REMEDIES = 8
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
    """All actors, and what they take together. `names`: of the hosts, by their numbers, where the cluster is there already."""

    device: str
    hosts: int
    cpus: float
    gpus: float
    names: list[str]
    actors: list[ActorPlan]


class CardPlan(TypedDict):
    """The card that ranks have to fit: its size, None where it is not known, who says so, and the size that the fullest rank needs."""

    gib: float | None
    source: str
    needed_gib: float


class RemedyPlan(TypedDict):
    """A change that makes a rank smaller, as `--set` takes it; `fits`: it suffices; `cards`: it takes more cards."""

    set: str
    gain: int
    fits: bool
    cards: bool


class MisfitPlan(TypedDict):
    """A rank that does not fit: bytes that are missing, single changes by their gain, and some that suffice only together."""

    rank: str
    missing: int
    remedies: list[RemedyPlan]
    together: list[str]


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


class RoutesPlan(TypedDict):
    """Bytes of routes that samples carry for `train.moe.replay`: of a token, of the longest sample, of a batch of such."""

    replay: str
    token: int
    sample: int
    batch: int


# The key `async` is a word of Python.
Plan = TypedDict(
    "Plan",
    {
        "name": str,
        "run_dir": str,
        "stages": dict[str, int],
        "model": ModelPlan,
        "placement": NotRequired[PlacementPlan],
        "memory": dict[str, Sizes],
        "card": NotRequired[CardPlan],
        "misfits": list[MisfitPlan],
        "async": SchedulePlan,
        "data": list[str],
        "cautions": list[str],
        "errors": list[str],
        "buckets": NotRequired[dict[str, SectionPlan]],
        "bytes_once": NotRequired[int],
        "routes": NotRequired[RoutesPlan],
    },
)


class _Trials:
    """Tries what may fail, and keeps the errors, so that the table is shown in any case."""

    def __init__(self) -> None:
        self.errors: list[MtpctlError] = []

    def __call__(self, what: Callable[[], Answer]) -> Answer | None:
        try:
            return what()
        except MtpctlError as error:
            self.errors.append(error)
            return None


def dry_run(recipe: Recipe) -> tuple[Plan, list[MtpctlError]]:
    """The plan of a run, JSON-ready, and the errors that it would end with before anything is trained. Sizes are bytes.

    Raises UserError or EnvironmentMissing where the model's sizes cannot be had, without which there is no plan.
    """
    config = hf_config(recipe.model)
    if config is None:
        raise UserError("model: its sizes are not known")
    shape, rl = shape_of(config), "rl" in recipe.train.stages
    recipe, source = _with_card(recipe)
    trials = _Trials()
    names = trials(partial(_joined, recipe)) if recipe.cluster.address is not None else None
    placement = trials(partial(place, recipe, [host for _, host in names] if names else None))
    if rl:
        trials(partial(check_engine, recipe))
        if recipe.rollout.engine == "vllm":
            trials(partial(check_importable, config))
    trials(partial(RunDirectory.check_writable, recipe.run_path))
    trials(partial(check_packages, recipe.telemetry))
    looked = trials(partial(look, recipe.data, recipe.evaluation, recipe.train.stages))
    # Code of the user's own gets rows of the data.
    warnings = trials(partial(rehearse, recipe)) if looked is not None else None
    unfit = list(misfits(recipe, shape))
    errors = [*(misfit.error for misfit in unfit), *trials.errors]
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
        "memory": {"trainer_rank": _sizes(trainer) | {"total": trainer.total}},
        "misfits": [_misfit_plan(misfit) for misfit in unfit],
        "async": {"staleness_threshold": recipe.async_.staleness, "sync_every": recipe.async_.sync_every},
        "data": list(map(str, looked or [])),
        "cautions": [*cautions_of(recipe), *(warnings or [])],
        "errors": list(map(str, errors)),
    }
    if placement is not None:
        plan["placement"] = _placement_plan(recipe, placement, [name for name, _ in names or []])
    if recipe.device == "cuda":
        plan["card"] = {"gib": recipe.cluster.gpu_gib, "source": source, "needed_gib": card_needed(recipe, shape)}
    if rl:
        _plan_rl(plan, recipe, shape)
    return plan, errors


def _with_card(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with the size of the cards that it is planned for, and who says so: the recipe itself, or this machine."""
    if recipe.cluster.gpu_gib is not None:
        return recipe, "cluster.gpu_gib"
    if recipe.device == "cuda" and recipe.cluster.address is None and (found := card_gib()) is not None:
        return changed(recipe, {"cluster.gpu_gib": found}), "this machine"
    return recipe, ""


def _joined(recipe: Recipe) -> list[tuple[str, Host]]:
    """The hosts of the cluster that the run joins with what is free there, or whole where they are too full.

    Raises EnvironmentMissing where no cluster answers.
    """
    from mtpctl.cluster.hosts import ray_hosts

    with cluster(recipe.cluster, cpus=0, gpus=0, tidy=False):
        found = ray_hosts()
    try:
        place(recipe, [host.free for host in found])
    except ClusterResources:
        return [(host.name, host.whole) for host in found]
    return [(host.name, host.free) for host in found]


def _placement_plan(recipe: Recipe, placement: Placement, names: list[str]) -> PlacementPlan:
    return {
        "device": placement.device,
        "hosts": placement.hosts,
        "cpus": placement.cpus,
        "gpus": placement.gpus,
        "names": names,
        "actors": [{"name": a.name, "role": _role(recipe, a), "host": a.host, "cpus": a.cpus, "gpus": a.gpus} for a in placement.actors],
    }


def _plan_rl(plan: Plan, recipe: Recipe, shape: ModelShape) -> None:
    """Add what RL has besides the trainer."""
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
    if (routes := route_bytes(recipe, shape)) is not None:
        plan["routes"] = {"replay": routes.replay, "token": routes.token, "sample": routes.sample, "batch": routes.batch}


def _misfit_plan(misfit: Misfit) -> MisfitPlan:
    return {
        "rank": misfit.rank,
        "missing": misfit.shortfall,
        "remedies": list(map(_remedy_plan, misfit.remedies)),
        "together": list(map(str, misfit.together)),
    }


def _remedy_plan(remedy: Remedy) -> RemedyPlan:
    return {"set": str(remedy), "gain": remedy.gain, "fits": remedy.fits, "cards": remedy.cards}


def render(plan: Plan) -> str:
    """The plan for a person to read."""
    model = plan["model"]
    counts = model["parameters"]
    stages = ", ".join(f"{stage} {steps} steps" for stage, steps in plan["stages"].items())
    lines = [
        f"{plan['name']}: {stages} → {plan['run_dir']}",
        "",
        f"model      {model['architecture']} ({model['family']}), {_count(counts['total'])} parameters, {model['max_positions']} positions",
        f"           {_count(counts['mtp'])} in {model['mtp_layers']} MTP layer(s) ({model['mtp_mode']}), "
        f"{_count(counts['embedding'])} in the embedding, {_count(counts['head'])} in the head",
    ]
    if "placement" in plan:
        lines += _placement_lines(plan["placement"])
    lines.append("memory     estimates, without CUDA context and allocator slack")
    for rank, sizes in plan["memory"].items():
        parts = ", ".join(f"{name.replace('_', ' ')} {_size(name, value)}" for name, value in sizes.items() if value)
        lines.append(f"           {rank.replace('_', ' ')}: {parts}")
    if "card" in plan:
        lines.append(_card_line(plan["card"]))
    for misfit in plan["misfits"]:
        lines += _misfit_lines(misfit)
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
    if "routes" in plan:
        routes = plan["routes"]
        amounts = f"{routes['token']} B a token, up to {_bytes(routes['sample'])} a sample and {_bytes(routes['batch'])} a batch"
        lines.append(f"routes     train.moe.replay: {routes['replay']}; {amounts}")
    lines += [f"{'data' if not number else '':10} {line}" for number, line in enumerate(plan["data"])]
    lines += [f"caution    {caution}" for caution in plan["cautions"]]
    return "\n".join(lines)


def _placement_lines(placement: PlacementPlan) -> Iterator[str]:
    yield f"placement  {placement['device']}, {placement['hosts']} host(s), {placement['cpus']:g} CPUs, {placement['gpus']:g} GPUs"
    width = max(len(actor["name"]) for actor in placement["actors"])
    for actor in placement["actors"]:
        amount = f"{actor['cpus']:g} CPU" + (f", {actor['gpus']:g} GPU" if actor["gpus"] else "")
        host = placement["names"][actor["host"]] if placement["names"] else actor["host"]
        yield f"           {actor['name']:{width}}  host {host}, {amount}: {actor['role']}"


def _card_line(card: CardPlan) -> str:
    needed = f"the fullest rank needs one of {card['needed_gib']:.1f} GiB"
    if card["gib"] is None:
        return f"card       of unknown size, so nothing is checked: {needed}; set cluster.gpu_gib"
    return f"card       {card['gib']:.4g} GiB ({card['source']}); {needed}"


def _misfit_lines(misfit: MisfitPlan) -> Iterator[str]:
    """A rank that does not fit, and what would make it fit, the largest gain first."""
    yield f"no room    {misfit['rank'].replace('_', ' ')}: {misfit['missing'] / GIB:.1f} GiB are missing; what would gain some:"
    for remedy in misfit["remedies"][:MOST_REMEDIES]:
        ends = " and ".join((["fits"] if remedy["fits"] else []) + (["takes more cards"] if remedy["cards"] else []))
        yield f"           {remedy['gain'] / GIB:>7.1f} GiB  --set {' --set '.join(remedy['set'].split())}{f'  ({ends})' if ends else ''}"
    if misfit["together"]:
        yield f"           together they fit: {' '.join(f'--set {change}' for each in misfit['together'] for change in each.split())}"


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
