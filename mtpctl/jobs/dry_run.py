"""The plan that `train --dry-run` prints: placement, memory, buckets and errors of a run, before anything is started.

Files are checked without reading tensors, and torch is imported only to check a user-defined objective. So a plan takes about a second for
a model of any size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from mtpctl.cluster.hosts import Host
from mtpctl.cluster.local import cluster
from mtpctl.controller.copies import check_copies
from mtpctl.controller.preflight import check_code
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.data.end_tokens import EndToken, EndTokens, recipe_end_tokens
from mtpctl.data.inspection import inspect_sets, leaks_in
from mtpctl.data.prompts import check_lengths
from mtpctl.data.sets import first_problems, row_sources
from mtpctl.data.tokenizers import Tokenizer, check_fits_model, load_plain_tokenizer, make_byte_tokenizer
from mtpctl.errors import ClusterResources, MtpctlError, PrerequisiteMissing, UserError
from mtpctl.families.drafters import Drafting, describe_drafting
from mtpctl.families.reading import check_importable, shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters
from mtpctl.plan.buckets import DeltaPlan, QuantizationPlan, base_weight_bytes, plan_delta, plan_quantization, section_buckets
from mtpctl.plan.fitting import (
    Misfit,
    apply_change,
    engine_kinds,
    find_misfits,
    format_bytes,
    gpu_gib_needed,
    shared_gpu_lines,
    sharing_cautions,
)
from mtpctl.plan.memory import GIB, engine_memory, logprob_memory, max_sample_tokens, route_bytes, teacher_memory, trainer_memory
from mtpctl.plan.placement import Actor, Placement, max_engines, place
from mtpctl.recipe.checks import cautions_of
from mtpctl.recipe.model import ModelConfig, context_note, hf_config
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.sync import StorageConfig, sync_notes
from mtpctl.rollout.installed import check_engine
from mtpctl.telemetry.run_directory import RunDirectory
from mtpctl.telemetry.trackers import check_packages
from mtpctl.telemetry.versions import gpu_memory_gib

MAX_REMEDIES = 8
Sizes = Mapping[str, int | None]


@dataclass(frozen=True)
class Plan:
    """The plan of a run. Sizes are in bytes.

    Attributes:
        teacher: shape of the teacher that the run serves; None without one, or if its config is not on this machine.
        drafting: the model's drafter, and the drafter that each engine uses.
        gpu_size_source: where the size of the GPUs is from; empty if it is unknown.
        hosts: names of the hosts by index, if the cluster is already running.
        engines: number of rollout engines that fit, within the recipe's bounds; the minimum if there is no placement.
        end_tokens: the tokens that end a response, as far as the model's files are available.
        errors: errors that would end the run before training.
        resume_lines: about the checkpoint that the run would resume from.
    """

    recipe: Recipe
    shape: ModelShape
    teacher: ModelShape | None
    drafting: Drafting
    gpu_size_source: str
    placement: Placement | None
    hosts: list[str]
    engines: int
    misfits: list[Misfit]
    data: list[str]
    end_tokens: tuple[EndToken, ...]
    cautions: list[str]
    errors: list[MtpctlError]
    resume_lines: list[str]

    @property
    def rl(self) -> bool:
        return "rl" in self.recipe.train.stages

    @cached_property
    def memory(self) -> dict[str, Sizes]:
        """Memory of each kind of rank, by part."""
        trainer = trainer_memory(self.recipe, self.shape)
        sizes: dict[str, Sizes] = {"trainer_rank": asdict(trainer) | {"total": trainer.total}}
        if self.recipe.train.needs_rollout:
            for index in engine_kinds(self.recipe):
                engine = engine_memory(self.recipe, self.shape, index)
                name = "rollout_rank" if index is None else "rollout_rank_on_trainer_gpu"
                sizes[name] = asdict(engine) | {"kv_tokens": engine.kv_tokens}
        if self.recipe.runs_logprob_server:
            server = logprob_memory(self.recipe, self.shape)
            sizes["logprob_rank"] = asdict(server) | {"total": server.total}
        if self.teacher is not None:
            server = teacher_memory(self.recipe, self.teacher)
            sizes["teacher_rank"] = asdict(server) | {"total": server.total}
        return sizes

    @cached_property
    def buckets(self) -> dict[str, dict[str, int]]:
        """Tensors, buckets and bytes of each section of a sync."""
        return {
            section: {
                "tensors": len({entry.name for bucket in buckets for entry in bucket.entries}),
                "buckets": len(buckets),
                "bytes": sum(bucket.nbytes for bucket in buckets),
                "largest": max(bucket.nbytes for bucket in buckets),
            }
            for section, buckets in section_buckets(self.recipe, self.shape).items()
        }

    @cached_property
    def quantization(self) -> QuantizationPlan | None:
        """The matrices that `rollout.quantization` quantizes, and their sizes; None without it."""
        return plan_quantization(self.recipe, self.shape)

    @cached_property
    def delta(self) -> DeltaPlan | None:
        """Sizes of the syncs after the first; None without `sync.delta`."""
        return plan_delta(self.recipe, section_buckets(self.recipe, self.shape))


class _ErrorCollector:
    """Runs checks and collects their errors, so that the plan is printed in any case."""

    def __init__(self) -> None:
        self.errors: list[MtpctlError] = []

    def __call__[T](self, check: Callable[[], T]) -> T | None:
        try:
            return check()
        except MtpctlError as error:
            self.errors.append(error)
            return None


def dry_run(recipe: Recipe) -> Plan:
    """Plan a run. Raises UserError or PrerequisiteMissing if the model's sizes are not available."""
    config = hf_config(recipe.model)
    if config is None:
        raise UserError("model: its config is not available; download the model, or set model.config")
    shape = shape_of(config)
    recipe, gpu_size_source = _with_gpu_size(recipe)
    run_check = _ErrorCollector()
    named_hosts = run_check(partial(_cluster_hosts, recipe)) if recipe.cluster.address is not None else None
    hosts = [host for _, host in named_hosts] if named_hosts else None
    placement = run_check(partial(place, recipe, hosts))
    engines = recipe.rollout.replica_range.min
    if placement is not None and recipe.train.needs_rollout:
        engines = max_engines(recipe, hosts)
        if recipe.cluster.address is None:
            run_check(partial(place, recipe, engines=recipe.rollout.replica_range.max))
    if recipe.train.needs_rollout:
        run_check(partial(check_engine, recipe))
        if not recipe.rollout.traits.own_environment:
            run_check(partial(check_importable, config))
    run_check(partial(RunDirectory.check_writable, recipe.run_path))
    run_check(partial(check_packages, recipe.telemetry))
    run_check(partial(check_copies, recipe))
    reports = run_check(partial(inspect_sets, recipe.data, recipe.evaluation, recipe.train.stages))
    leak_caution = leaks_in(reports or [], recipe.data, recipe.train.stages)
    for check in (partial(check_weights, recipe), partial(check_rows, recipe, shape)):
        run_check(check)
    warnings = run_check(partial(check_code, recipe)) if reports is not None else None
    resume_lines = run_check(partial(_describe_resume, recipe))
    ends, tokenizer_note = run_check(partial(recipe_end_tokens, recipe.model, recipe.rollout, vocab=shape.vocab)) or (EndTokens(()), "")
    sharing_notes = [] if placement is None else sharing_cautions(recipe, placement, hosts)
    end_cautions = [f"{tokenizer_note}, so some end tokens may be unknown" if tokenizer_note else "", ends.disagreement]
    teacher = _teacher_shape(recipe)
    misfit_list = list(find_misfits(recipe, shape, teacher))
    return Plan(
        recipe,
        shape,
        teacher,
        describe_drafting(config, shape),
        gpu_size_source,
        placement,
        [name for name, _ in named_hosts or []],
        engines,
        misfit_list,
        data=list(map(str, reports or [])),
        end_tokens=ends.tokens,
        cautions=[*cautions_of(recipe), *sharing_notes, *(warnings or []), *filter(None, [leak_caution, *end_cautions])],
        errors=[*(misfit.error for misfit in misfit_list), *run_check.errors],
        resume_lines=resume_lines or [],
    )


def _teacher_shape(recipe: Recipe) -> ModelShape | None:
    """The shape of the teacher that the run serves; None without one, or if its config is not on this machine."""
    if (teacher := recipe.served_teacher) is None:
        return None
    config = hf_config(ModelConfig(path=teacher.path), fetch=False, field="train.rl.teacher.path")
    return None if config is None else shape_of(config)


def _describe_resume(recipe: Recipe) -> list[str]:
    """Lines about the checkpoint that a start would resume from. Raises UserError if every checkpoint is damaged."""
    if not RunDirectory(recipe.run_path).checkpoints.is_dir():
        return []
    # Imported here: a plan without a run does not need these modules.
    from mtpctl.controller.resume import describe_start

    return describe_start(recipe)


def _with_gpu_size(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with the size of its GPUs, and the source of that size: the recipe or this machine."""
    if recipe.cluster.gpu_gib is not None:
        return recipe, "cluster.gpu_gib"
    if recipe.device == "cuda" and recipe.cluster.address is None and (gib := gpu_memory_gib()) is not None:
        return apply_change(recipe, {"cluster.gpu_gib": gib}), "this machine"
    return recipe, ""


def _cluster_hosts(recipe: Recipe) -> list[tuple[str, Host]]:
    """Names and resources of the hosts of the cluster that the run joins: the free resources, or all if the free ones do not suffice.

    Raises PrerequisiteMissing if no cluster answers.
    """
    from mtpctl.cluster.bundles import list_ray_hosts

    with cluster(recipe.cluster, cpus=0, gpus=0, remove_leftovers=False):
        hosts = list_ray_hosts()
    try:
        place(recipe, [host.free for host in hosts])
    except ClusterResources:
        return [(host.name, host.total) for host in hosts]
    return [(host.name, host.free) for host in hosts]


def as_json(plan: Plan) -> dict[str, object]:
    recipe, shape = plan.recipe, plan.shape
    schedule: dict[str, object] = {"staleness_threshold": recipe.async_.staleness, "sync_every": recipe.async_.sync_every}
    plan_json: dict[str, object] = {
        "name": recipe.name,
        "run_dir": str(recipe.run_path),
        "stages": _stages(recipe),
        "numerics": recipe.numerics,
        "model": {
            "family": shape.family,
            "architecture": shape.architecture,
            "parameters": count_parameters(shape),
            "mtp_layers": shape.mtp_layers,
            "mtp_mode": recipe.mtp.mode,
            "drafter": plan.drafting._asdict(),
            "max_positions": shape.max_positions,
        },
        "memory": plan.memory,
        "misfits": [
            {
                "rank": misfit.rank,
                "missing": misfit.shortfall,
                "remedies": [{"set": str(r), "gain": r.gain, "fits": r.fits, "cards": r.more_gpus} for r in misfit.remedies],
                "together": list(map(str, misfit.combination)),
            }
            for misfit in plan.misfits
        ],
        "async": schedule,
        "data": plan.data,
        "end_tokens": [token._asdict() for token in plan.end_tokens],
        "cautions": plan.cautions,
        "errors": list(map(str, plan.errors)),
        "resumes": plan.resume_lines,
    }
    if (placement := plan.placement) is not None:
        plan_json["placement"] = {
            "device": placement.device,
            "hosts": placement.hosts,
            "cpus": placement.cpus,
            "gpus": placement.gpus,
            "names": plan.hosts,
            "engines": {**recipe.rollout.replica_range.model_dump(), "room": plan.engines},
            "actors": [
                {"name": a.name, "role": _role(recipe, a), "host": a.host, "cpus": a.cpus, "gpus": a.gpus} for a in placement.actors
            ],
        }
    if recipe.device == "cuda":
        plan_json["card"] = {
            "gib": recipe.cluster.gpu_gib,
            "source": plan.gpu_size_source,
            "needed_gib": gpu_gib_needed(recipe, shape, plan.teacher),
        }
    if plan.rl:
        plan_json |= {"buckets": plan.buckets, "bytes_once": base_weight_bytes(recipe, shape)}
        plan_json |= {"kv": recipe.sync.kv, "relay": isinstance(recipe.sync, StorageConfig) and recipe.sync.relay}
        plan_json["quantization"] = None if plan.quantization is None else asdict(plan.quantization)
        plan_json["delta"] = None if plan.delta is None else asdict(plan.delta)
        schedule["old_logprobs"] = recipe.old_logprobs
        if (routes := route_bytes(recipe, shape)) is not None:
            plan_json["routes"] = asdict(routes)
    return plan_json


def render(plan: Plan) -> str:
    recipe, shape = plan.recipe, plan.shape
    counts = count_parameters(shape)
    stages = ", ".join(f"{stage} {steps} steps" for stage, steps in _stages(recipe).items())
    lines = [
        f"{recipe.name}: {stages} → {recipe.run_path}",
        "",
        f"model      {shape.architecture} ({shape.family}), {_count(counts['total'])} parameters, {shape.max_positions} positions",
        f"           {_count(counts['mtp'])} in {shape.mtp_layers} MTP layer(s) ({recipe.mtp.mode}), "
        f"{_count(counts['embedding'])} in the embedding, {_count(counts['head'])} in the head",
        *([f"context    {note}"] if (note := context_note(recipe.model)) is not None else []),
        f"drafter    {plan.drafting.drafter}; {recipe.rollout.traits.title} drafts with {_draft_source(plan)}",
    ]
    if recipe.numerics == "bitwise":
        lines.append("numerics   bitwise: engine, log-prob server and trainer compute equal log-probs, at a cost in speed")
    if plan.placement is not None:
        lines += _placement_lines(recipe, plan.placement, plan.hosts)
        if plan.rl and recipe.rollout.elastic:
            bounds = recipe.rollout.replica_range
            room = f"{bounds.min} are planned, and up to {bounds.max} join; now there is room for {plan.engines}"
            lines.append(f"           rollout engines: {room}")
    lines.append("memory     estimates, without CUDA context and allocator slack")
    for rank, sizes in plan.memory.items():
        parts = ", ".join(f"{name.replace('_', ' ')} {_size(name, value)}" for name, value in sizes.items() if value)
        lines.append(f"           {rank.replace('_', ' ')}: {parts}")
    if plan.placement is not None:
        lines += shared_gpu_lines(recipe, shape, plan.placement, plan.hosts, plan.teacher)
    if recipe.device == "cuda":
        lines.append(_gpu_line(recipe.cluster.gpu_gib, plan.gpu_size_source, gpu_gib_needed(recipe, shape, plan.teacher)))
    for misfit in plan.misfits:
        lines += _misfit_lines(misfit)
    if plan.rl:
        lines += _sync_lines(plan)
    for title, section in (("data", plan.data), ("resumes", plan.resume_lines), ("end tokens", plan.end_tokens)):
        lines += [f"{'' if i else title:10} {line}" for i, line in enumerate(section)]
    lines += [f"caution    {caution}" for caution in plan.cautions]
    return "\n".join(lines)


def _draft_source(plan: Plan) -> str:
    """What the recipe's engine drafts with."""
    speculation = plan.recipe.rollout.speculation
    if speculation.model_tokens:
        return getattr(plan.drafting, plan.recipe.rollout.engine) or "nothing"
    return speculation.method if speculation.num_tokens else "nothing: rollout.speculation.num_tokens is 0"


def _stages(recipe: Recipe) -> dict[str, int]:
    return {stage: getattr(recipe.train, stage).steps for stage in recipe.train.stages}


def _placement_lines(recipe: Recipe, placement: Placement, hosts: list[str]) -> Iterator[str]:
    yield f"placement  {placement.device}, {placement.hosts} host(s), {placement.cpus:g} CPUs, {placement.gpus:g} GPUs"
    width = max(len(actor.name) for actor in placement.actors)
    for actor in placement.actors:
        amount = f"{actor.cpus:g} CPU" + (f", {actor.gpus:g} GPU" if actor.gpus else "")
        host = hosts[actor.host] if hosts else actor.host
        yield f"           {actor.name:{width}}  host {host}, {amount}: {_role(recipe, actor)}"


def _gpu_line(gib: float | None, source: str, needed_gib: float) -> str:
    needed = f"the fullest rank needs a GPU of {needed_gib:.1f} GiB"
    if gib is None:
        return (
            f"GPU        of unknown size, so only rollout.kv_cache_bytes is checked: {needed}; set cluster.gpu_gib, or cluster.device: cpu"
        )
    return f"GPU        {gib:.4g} GiB ({source}); {needed}"


def _misfit_lines(misfit: Misfit) -> Iterator[str]:
    """A rank that does not fit, and changes that would free memory, the largest gain first."""
    yield f"misfit     {misfit.rank.replace('_', ' ')}: {misfit.shortfall / GIB:.1f} GiB are missing; changes that free memory:"
    for remedy in misfit.remedies[:MAX_REMEDIES]:
        results = " and ".join((["fits"] if remedy.fits else []) + (["needs more GPUs"] if remedy.more_gpus else []))
        yield f"           {remedy.gain / GIB:>7.1f} GiB  --set {' --set '.join(str(remedy).split())}{f'  ({results})' if results else ''}"
    if misfit.combination:
        yield f"           together they fit: {' '.join(f'--set {change}' for each in misfit.combination for change in str(each).split())}"


def _sync_lines(plan: Plan) -> Iterator[str]:
    recipe, schedule = plan.recipe, plan.recipe.async_
    source = {"behaviour": "the engine's own", "recompute": "recomputed by Megatron"}[recipe.old_logprobs]
    yield f"sync       every {schedule.sync_every} update(s), staleness threshold {schedule.staleness:g}, old log-probs {source}"
    for section, sizes in plan.buckets.items():
        amount = f"{format_bytes(sizes['bytes'])}, largest {format_bytes(sizes['largest'])}"
        yield f"           {section}: {sizes['tensors']} tensors in {sizes['buckets']} bucket(s), {amount}"
    if (quantization := plan.quantization) is not None:
        yield from (f"           {line}" for line in quantization.lines(format_bytes))
    if base_bytes := base_weight_bytes(recipe, plan.shape):
        yield f"           at the first sync also {format_bytes(base_bytes)} of base weights"
    if (delta := plan.delta) is not None:
        yield f"           {delta.line(format_bytes)}"
    yield from (f"           {note}" for note in sync_notes(recipe.sync))
    if (routes := route_bytes(recipe, plan.shape)) is not None:
        amounts = f"{routes.token} B a token, up to {format_bytes(routes.sample)} a sample and {format_bytes(routes.batch)} a batch"
        yield f"routes     train.moe.replay: {routes.replay}; {amounts}"


def _role(recipe: Recipe, actor: Actor) -> str:
    parallel = recipe.train.parallel
    if actor.role == "trainer":
        layout = ", ".join(f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "cp", "ep", "dp") if getattr(parallel, name) > 1)
        return f"Megatron trainer, {recipe.train.precision}" + (f", {layout}" if layout else "")
    if actor.role == "rollout":
        k = recipe.rollout.speculation.num_tokens
        fp8 = "FP8 weights, " if recipe.rollout.quantization == "fp8" else ""
        return f"{recipe.rollout.engine}, tp {recipe.rollout.tp}, {fp8}" + (f"{k} draft token(s) a step" if k else "no speculation")
    return "teacher" if actor.role == "teacher" else "log-prob server (old log-probs)"


def _size(name: str, value: int) -> str:
    return f"{value:,}" if name == "kv_tokens" else format_bytes(value)


def _count(value: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)


def check_weights(recipe: Recipe) -> None:
    """Check names, types, shapes and sizes of the local weights of the model and of a served teacher. Raises UserError."""
    model, teacher = recipe.model, recipe.served_teacher
    if model.path is not None and not model.randomly_initialized and Path(model.path).is_dir():
        ModelWeights(Path(model.path), mtp=recipe.mtp.mode != "off")
    if teacher is not None and Path(teacher.path or "").is_dir():
        ModelWeights(Path(teacher.path or ""), mtp=False)


def check_rows(recipe: Recipe, shape: ModelShape) -> None:
    """Load the tokenizer and render the first row of each set, as the run will, but without the tools of an environment.

    Does nothing if the tokenizer is not on this machine.

    Raises UserError if tokenizer or chat template are missing, if they do not fit the model or the row, or if the row is too long.
    """
    if recipe.model.tokenizer == "bytes" and recipe.data.task is not None:
        return  # both are created by mtpctl and match
    if (tokenizer := _tokenizer(recipe)) is None:
        return
    check_fits_model(tokenizer, shape.vocab)
    context = max_sample_tokens(recipe, shape)
    sets = first_problems(recipe.data, recipe.seed, recipe.evaluation, 1, recipe.rollout)
    stages = recipe.train.stages
    rows = row_sources(recipe.data, recipe.evaluation, stages).get("sft")
    supervised = sets.get("train", [])
    if rows is not None:
        try:
            supervised = list(islice(rows.problems(fetch=False), 1))
        except PrerequisiteMissing:  # not in the hub's cache
            supervised = []
    for role, problems in sets.items():
        if recipe.train.needs_rollout or role != "train":
            check_lengths(tokenizer, problems, recipe.data, context=context)
    if recipe.train.trains_on_rows:
        check_lengths(tokenizer, supervised, recipe.data, context=context, targets=True)


def _tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The recipe's tokenizer; None if it is on the hub, which is not contacted."""
    name = recipe.model.tokenizer
    if name == "bytes":
        with tempfile.TemporaryDirectory() as folder:
            make_byte_tokenizer(Path(folder))
            return load_plain_tokenizer(Path(folder), ignore_tools=recipe.data.ignore_tools)
    path = Path(name or recipe.model.path or "")
    return load_plain_tokenizer(path, ignore_tools=recipe.data.ignore_tools) if path.is_dir() else None
