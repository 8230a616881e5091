"""`mtpctl rollout`, `eval`, `logprob-serve` and `sync-weights`: generate, evaluate, serve or sync with the weights of a recipe or run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtpctl.cli.options import FromWeights, Json, Overlays, Sets, TargetArgument, print_result
from mtpctl.jobs import print_progress

if TYPE_CHECKING:
    from mtpctl.jobs.rollout import Progress
    from mtpctl.plan.buckets import Bucket, DeltaPlan, QuantizationPlan
    from mtpctl.recipe.schema import Recipe
    from mtpctl.recipe.sync import SyncConfig
    from mtpctl.rollout.sample_file import Tally


def rollout(
    recipe: TargetArgument,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="JSONL or Parquet with `prompt`, and `answer` where known.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="JSONL file to write, or to complete.")] = None,
    n: Annotated[int, typer.Option("--n", metavar="N", help="Responses to each prompt.", min=1)] = 1,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve an OpenAI-compatible endpoint until Ctrl-C, and write finished trajectories to --out.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Address of --serve; any but loopback needs MTPCTL_GATEWAY_KEY.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of --serve; 0: a free one.")] = 8339,
    sets: Sets = None,
    overlay: Overlays = None,
    from_weights: FromWeights = None,
    as_json: Json = False,
) -> None:
    """Generate with the recipe's engines, from the newest weights of its run. If --out exists, add the responses that it lacks."""
    from mtpctl.errors import UserError

    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out: {out} {'is a folder' if out.is_dir() else 'is in a missing folder'}; name a file to write")
    if serve:
        if prompts is not None:
            raise UserError("--serve: agents send their own prompts; leave --prompts out")
        if n != 1 or as_json:
            raise UserError(f"--serve: leave {'--json' if as_json else '--n'} out")
        _serve(recipe, out, host, port, from_weights, overlay or [], sets or [])
        return
    if prompts is None or out is None:
        raise UserError(f"--{'out' if prompts else 'prompts'}: missing; name a file, or use --serve to serve agents")
    if not prompts.is_file():
        raise UserError(f"--prompts: no file {prompts}; give a .jsonl or .parquet file")
    from mtpctl.jobs.rollout import rollout as generate
    from mtpctl.jobs.targets import target_with_weights

    with target_with_weights(recipe, from_weights, overlay or [], sets or []) as target, _progress() as progress:
        summary = generate(target.recipe, prompts, out, n=n, report=print_progress, progress=progress, from_weights=target.weights)
    print_result(json.dumps(summary, indent=2) if as_json else _render(summary))


def _serve(recipe: str, out: Path | None, host: str, port: int, from_weights: str | None, overlays: list[str], sets: list[str]) -> None:
    from mtpctl.jobs.rollout import serve as serve_agents
    from mtpctl.jobs.targets import target_with_weights

    with target_with_weights(recipe, from_weights, overlays, sets) as target:
        finished = serve_agents(target.recipe, out, host=host, port=port, report=print_progress, from_weights=target.weights)
    print_result(f"{finished} trajectories" + (f" in {out}" if out is not None and finished else ""))


def _render(summary: dict[str, Any]) -> str:
    lines = [f"{summary['samples']} samples in {summary['out']}, {summary['made']} new"]
    if summary["tokens_per_s"] is not None:
        lines.append(f"{summary['tokens_per_s']:,.0f} tokens/s over {summary['seconds']:.1f} s")
    if summary["samples"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary["finish_reasons"].items())
        lines.append(f"mean length {summary['length_mean']:.1f} tokens; ended by {reasons}")
    if summary["drafted"]:
        drafts = f"{summary['accepted']:,} of {summary['drafted']:,} drafts"
        lines.append(f"acceptance {summary['accept_rate']:.1%} ({drafts}), {summary['accept_length']:.2f} tokens a step")
    if summary["reward_mean"] is not None:
        lines.append(f"mean reward {summary['reward_mean']:.3f} over {summary['rewarded']} samples with an answer to compare with")
    return "\n".join(lines)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a function that shows progress: a bar on a terminal, else a line at every tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _print_progress
        return
    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, status="starting the engines")

        def show(done: int, total: int, tally: Tally) -> None:
            bar.update(task, completed=done, total=total, status=f"acceptance {tally.speculation.accept_rate:.0%}")

        yield show


def _print_progress(done: int, total: int, tally: Tally) -> None:
    if done == total or done % max(1, total // 10) == 0:
        print(f"{done}/{total} samples, acceptance {tally.speculation.accept_rate:.1%}", file=sys.stderr)


def evaluate(
    target: TargetArgument,
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="Responses to each problem; default: that of its set.", min=1)] = None,
    sets: Sets = None,
    overlay: Overlays = None,
    from_weights: FromWeights = None,
    as_json: Json = False,
) -> None:
    """Measure the newest weights of a run on its held-out sets: avg@n, pass@k, response length and draft acceptance."""
    from mtpctl.jobs.engines import evaluate_weights, render_evaluation
    from mtpctl.jobs.targets import target_with_weights

    with target_with_weights(target, from_weights, overlay or [], sets or []) as selected:
        evaluation = evaluate_weights(selected.recipe, n=n, report=print_progress, from_weights=selected.weights)
    print_result(json.dumps(evaluation, indent=2) if as_json else render_evaluation(evaluation))


KEY_VARIABLE = "MTPCTL_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def logprob_serve(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe, or a run directory; default: the newest run here, else the tiny recipe."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A Hugging Face folder or hub id to serve instead.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks of a replica.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline-parallel ranks of a replica.")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=1, help="Replicas.")] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; other machines can reach any address but loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = 8338,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help=f"File with the key that clients must send; or set {KEY_VARIABLE}.")
    ] = None,
    sets: Sets = None,
    overlay: Overlays = None,
) -> None:
    """Serve per-token log-probs, entropy and MTP scores of a model over HTTP, until Ctrl-C."""
    from mtpctl.jobs import logprob_serve as jobs
    from mtpctl.web.server import listen

    key = _key(key_file)
    if key is None and host not in LOOPBACK:
        print(f"warning: {host} is reachable from other machines, and no API key is required; set {KEY_VARIABLE} or --key-file", flush=True)
    loaded, run = jobs.recipe_to_serve(recipe, model, sets or [], overlay or [])
    if recipe is None and model is None and run is None and tp is not None:
        loaded = jobs.with_divisible_heads(loaded, tp)
    loaded = jobs.with_layout(loaded, tp, pp, replicas)
    listener = listen(host, port)
    with tempfile.TemporaryDirectory(prefix="mtpctl-logprob-") as scratch:
        served = jobs.find_served_model(loaded, run, Path(scratch))
        print(f"serving {served.name}, as {served.model_id}", flush=True)
        jobs.serve(loaded, served, listener, key=key, report=lambda text: print(text, flush=True))


def _key(file: Path | None) -> str | None:
    from mtpctl.errors import UserError

    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file: {file} cannot be read: {error}") from error
    if not key:
        raise UserError(f"--key-file: {file} is empty; write the key into it")
    return key


@dataclass(frozen=True)
class Plan:
    """The buckets of a complete sync by section, and the sizes of a delta. `bytes_once`: base weights, which only the first sync sends."""

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
    """Sync weights to engines and log-prob replicas manually, and print times and rates."""
    from mtpctl.errors import UserError
    from mtpctl.jobs.targets import has_checkpoint, load_target
    from mtpctl.recipe.checks import validate

    name = recipe or source
    if name is None:
        raise UserError("RECIPE: name a recipe or a run, or a run with --from")
    target = load_target(name, overlay or [], sets or [])
    if recipe is None and target.run is None:
        raise UserError(f"--from: {source} contains no recipe; name a recipe before it")
    loaded = target.recipe
    source = source or target.weights or (str(target.run) if target.run and has_checkpoint(target.run) else None)
    validate(loaded)
    if source is not None:
        from mtpctl.controller.state import resolve_checkpoint

        run, checkpoint, _ = resolve_checkpoint(source, report=print_progress)
    if plan:
        print_result(json.dumps(_plan_json(_plan(loaded)), indent=1) if as_json else _plan_text(_plan(loaded)))
        return
    # Imports torch, which a plan does not need.
    from mtpctl.jobs.sync import as_json as results_as_json
    from mtpctl.jobs.sync import render, sync_manually

    if not as_json:
        print_result(_plan_text(_plan(loaded)))
    weights = None if source is None else (run, checkpoint)
    results = sync_manually(loaded, weights, to or [], verify=verify, repeat=repeat)
    print_result(results_as_json(results) if as_json else render(results))


def _plan(recipe: Recipe) -> Plan:
    """The buckets by section, computed from the model's shape alone."""
    from mtpctl.errors import UserError
    from mtpctl.families.reading import shape_of
    from mtpctl.plan.buckets import base_weight_bytes, plan_delta, plan_quantization, section_buckets
    from mtpctl.recipe.model import hf_config

    config = hf_config(recipe.model)
    if config is None:
        raise UserError("model: its config is not available; download the model, or set model.config")
    shape = shape_of(config)
    sections = section_buckets(recipe, shape)
    return Plan(recipe.sync, sections, base_weight_bytes(recipe, shape), plan_delta(recipe, sections), plan_quantization(recipe, shape))


def _plan_json(plan: Plan) -> dict[str, object]:
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


def _plan_text(plan: Plan) -> str:
    from mtpctl.recipe.sync import sync_notes

    count, sync = sum(map(len, plan.sections.values())), plan.sync
    lines = [f"{plan.nbytes / 1e6:,.1f} MB in {count} bucket(s) of at most {sync.bucket_bytes / 1e6:,.1f} MB, over {sync.transport}"]
    if plan.quantization is not None:
        lines += [f"  {line}" for line in plan.quantization.lines(lambda nbytes: f"{nbytes / 1e6:,.1f} MB")]
    if plan.bytes_once:
        lines.append(f"  at the first sync also {plan.bytes_once / 1e6:,.1f} MB of base weights")
    if plan.delta is not None:
        lines.append(f"  {plan.delta.line(lambda nbytes: f'{nbytes / 1e6:,.1f} MB')}")
    lines += [f"  {note}" for note in sync_notes(sync)]
    for section, buckets in plan.sections.items():
        for bucket in buckets:
            ends = " … ".join(dict.fromkeys((bucket.entries[0].name, bucket.entries[-1].name)))
            lines.append(f"  {section} {bucket.index:>4}  {bucket.nbytes / 1e6:>10,.1f} MB  {len(bucket.entries):>5} tensor(s)  {ends}")
    return "\n".join(lines)
