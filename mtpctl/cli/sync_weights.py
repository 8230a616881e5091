"""`mtpctl sync-weights`: sync weights manually, or print the plan of a sync."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.options import Json, Overlays, Sets, answer

if TYPE_CHECKING:
    from mtpctl.plan.buckets import Bucket, DeltaPlan, QuantizationPlan
    from mtpctl.recipe.schema import Recipe
    from mtpctl.recipe.sync import SyncConfig


@dataclass(frozen=True)
class Plan:
    """The buckets of a complete sync, by section, and the sizes of a delta.

    `bytes_once`: base weights, which only the first sync of an adapter sends.
    """

    sync: SyncConfig
    sections: dict[str, list[Bucket]]
    bytes_once: int
    delta: DeltaPlan | None
    quantization: QuantizationPlan | None

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for buckets in self.sections.values() for bucket in buckets)


def sync_weights(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE|RUN", help="A recipe or a run directory; default: the run that --from names.")
    ] = None,
    sets: Sets = None,
    overlay: Overlays = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="CKPT|RUN", help="Weights; default: those of RUN, or the recipe's model.")
    ] = None,
    to: Annotated[
        list[str] | None, typer.Option("--to", metavar="URL", help="A running vLLM server; default: start the recipe's engines.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the buckets and start nothing.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare checksums at every sync, not at the first alone.")] = False,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Number of syncs, each under a new version.")] = 1,
    as_json: Json = False,
) -> None:
    """Sync weights to engines and log-prob replicas by hand, and print times and rates."""
    from mtpctl.errors import UserError
    from mtpctl.jobs.targets import has_checkpoint, load_target
    from mtpctl.recipe.checks import validate

    named = recipe or source
    if named is None:
        raise UserError("RECIPE: name a recipe or a run, or a run with --from")
    target = load_target(named, overlay or [], sets or [])
    if recipe is None and target.run is None:
        raise UserError(f"--from: {source} has no recipe with it; name a recipe before it")
    loaded = target.recipe
    source = source or target.start or (str(target.run) if target.run and has_checkpoint(target.run) else None)
    validate(loaded)
    if plan and source is None:
        _print(_plan(loaded), as_json)
        return
    # Imports torch, which a plan of the recipe's own model does not need.
    from mtpctl.jobs.sync import Source, render, sync_manually
    from mtpctl.jobs.sync import as_json as results_as_json

    weights = Source.parse(source)
    if plan:
        _print(_plan(loaded), as_json)
        return
    if not as_json:
        answer(_rendered(_plan(loaded)))
    results = sync_manually(loaded, weights, to or [], verify=verify, repeat=repeat)
    answer(results_as_json(results) if as_json else render(results))


def _print(plan: Plan, as_json: bool) -> None:
    answer(json.dumps(_as_json(plan), indent=1) if as_json else _rendered(plan))


def _plan(recipe: Recipe) -> Plan:
    """The buckets by section, computed from the model's shape alone."""
    from mtpctl.errors import UserError
    from mtpctl.families.reading import shape_of
    from mtpctl.plan.buckets import base_weight_bytes, plan_delta, plan_quantization, section_buckets
    from mtpctl.recipe.model import hf_config

    config = hf_config(recipe.model)
    if config is None:
        raise UserError("model: its sizes are not known")
    shape = shape_of(config)
    sections = section_buckets(recipe, shape)
    return Plan(recipe.sync, sections, base_weight_bytes(recipe, shape), plan_delta(recipe, sections), plan_quantization(recipe, shape))


def _as_json(plan: Plan) -> dict[str, object]:
    return {
        "transport": plan.sync.transport,
        "bucket_bytes": plan.sync.bucket_bytes,
        "kv": plan.sync.kv,
        "relay": getattr(plan.sync, "relay", False),
        "bytes_once": plan.bytes_once,
        "bytes": plan.nbytes,
        "delta": None if plan.delta is None else asdict(plan.delta),
        "quantization": None if plan.quantization is None else asdict(plan.quantization),
        "sections": {
            section: [
                {"index": b.index, "bytes": b.nbytes, "tensors": len(b.entries), "first": b.entries[0].name, "last": b.entries[-1].name}
                for b in buckets
            ]
            for section, buckets in plan.sections.items()
        },
    }


def _rendered(plan: Plan) -> str:
    from mtpctl.recipe.sync import notes_of

    count, sync = sum(map(len, plan.sections.values())), plan.sync
    lines = [f"{plan.nbytes / 1e6:,.1f} MB in {count} bucket(s) of at most {sync.bucket_bytes / 1e6:,.1f} MB, over {sync.transport}"]
    if plan.quantization is not None:
        lines += [f"  {line}" for line in plan.quantization.lines(lambda nbytes: f"{nbytes / 1e6:,.1f} MB")]
    if plan.bytes_once:
        lines.append(f"  at the first sync also {plan.bytes_once / 1e6:,.1f} MB of base weights")
    if plan.delta is not None:
        lines.append(f"  {plan.delta.line(lambda nbytes: f'{nbytes / 1e6:,.1f} MB')}")
    lines += [f"  {note}" for note in notes_of(sync)]
    for section, buckets in plan.sections.items():
        for bucket in buckets:
            ends = " … ".join(dict.fromkeys((bucket.entries[0].name, bucket.entries[-1].name)))
            lines.append(f"  {section} {bucket.index:>4}  {bucket.nbytes / 1e6:>10,.1f} MB  {len(bucket.entries):>5} tensor(s)  {ends}")
    return "\n".join(lines)
