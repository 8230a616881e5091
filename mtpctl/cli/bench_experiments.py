"""`mtpctl bench mtp` and `bench async`, which compare whole runs, and `bench compare`, which compares two results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtpctl.cli.options import Json, Overlays, Sets, create_folder, print_result
from mtpctl.jobs import print_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mtpctl.bench.arms import Arm, Experiment, Outcome
    from mtpctl.recipe.schema import Recipe as RecipeTree

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe that every arm is a variant of.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all runs; existing runs are reused.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="May be repeated; default: the recipe's.")]
Arms = Annotated[list[str] | None, typer.Option("--arm", metavar="NAME", help="Only this arm; may be repeated.")]
ArmsOrCustom = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="NAME[: KEY=VALUE …]",
        help="Only this arm. `NAME: KEY=VALUE …` defines a custom arm with these recipe keys. May be repeated.",
    ),
]
ThreeSeeds = Annotated[list[int] | None, typer.Option("--seed", help="May be repeated; default: the recipe's seed and the next two.")]
MeasuredOnly = Annotated[
    bool, typer.Option("--measured-only", help="Start nothing: summarize the recorded metrics of the runs in DIR, finished or not.")
]


def mtp(
    recipe: Recipe = "mimo_small_mtp",
    out: Out = Path("runs/bench-mtp"),
    seed: Seeds = None,
    arm: Arms = None,
    last_updates: Annotated[int, typer.Option("--last", min=1, help="Number of last RL updates that are summarized.")] = 10,
    measured_only: MeasuredOnly = False,
    together: Annotated[
        bool, typer.Option("--together", help="Run the arms of a seed concurrently: tokens/s are then not comparable.")
    ] = False,
    loss: Annotated[
        list[str] | None, typer.Option("--loss", help="An mtp.loss to compare, in place of the four default arms; may be repeated.")
    ] = None,
    draft_method: Annotated[
        list[str] | None,
        typer.Option(
            "--draft-method",
            help="A rollout.speculation.draft_method to compare, in place of the four default arms; may be repeated.",
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k", min=1, help="A number of draft tokens per step to compare, in place of the four default arms; may be repeated."
        ),
    ] = None,
    least_gain: Annotated[float, typer.Option("--least-gain", help="Minimum gain of acceptance by training the drafter, in points.")] = 0.0,
    least_relative: Annotated[
        float, typer.Option("--least-relative", help="Minimum gain relative to the frozen drafter's acceptance.")
    ] = 0.0,
    sets: Sets = None,
    overlay: Overlays = None,
    json: Json = False,
) -> None:
    """Compare four arms of RL: without speculation; drafter frozen; drafter trained and synced to the engine; drafter trained but not
    synced. With --loss, --draft-method or --k: one arm for each combination of these. Exit code 6 if a bound is missed."""
    from mtpctl.bench import mtp as bench
    from mtpctl.bench.arms import Experiment, select_arms
    from mtpctl.bench.report import merge_machines, render
    from mtpctl.errors import ThresholdMissed

    experiment = Experiment(recipe, tuple(overlay or ()), tuple(sets or ()), out)
    arms: Sequence[Arm] = bench.ARMS
    if loss or draft_method or k:
        base = experiment.load("arms", 0)
        speculation = base.rollout.speculation
        layers, is_block = _drafter_of(base)
        arms = bench.make_drafter_arms(
            loss or [base.mtp.loss],
            draft_method or [speculation.draft_method],
            k or [speculation.num_tokens],
            layers=layers,
            is_block=is_block,
        )
    outcomes = _outcomes(experiment, select_arms(arms, arm), seed, measured_only, together=together)
    results, environment = bench.summarize(outcomes, last_updates), merge_machines([o.versions for o in outcomes])
    document = bench.to_document(results, environment, last_updates)
    _write(out, document)
    print_result(render(document, bench.format_table(results, last_updates), as_json=json))
    gain = bench.compute_gain(results)
    if gain is None:
        without_drafts = [r.name for r in results if r.name in ("frozen", "trained") and not r.drafted]
        if without_drafts:
            raise ThresholdMissed(f"the arm {without_drafts[0]} drafted nothing in its last updates; see {out}")
        return
    if not json:
        print_result(
            f"\ntrained against frozen: {gain.points:+.1f} points ({gain.relative:+.0%}, {gain.standard_errors:.1f} standard errors)"
        )
    if gain.points < least_gain or gain.relative < least_relative:
        raise ThresholdMissed(
            f"training the drafter gained {gain.points:+.1f} points ({gain.relative:+.0%}) of acceptance, "
            f"bounds {least_gain:+g} points and {least_relative:+.0%}"
        )


def asynchrony(
    recipe: Recipe = "mimo_small_mtp",
    out: Out = Path("runs/bench-async"),
    seed: ThreeSeeds = None,
    arm: ArmsOrCustom = None,
    measured_only: MeasuredOnly = False,
    accuracy_level: Annotated[
        float | None,
        typer.Option(
            "--accuracy",
            help="Held-out accuracy to reach and hold; default: the mean of the synchronous arm's last evaluations, minus 2 points.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0, help="How far evaluations may fall below --accuracy after reaching it; default: 0.03."),
    ] = None,
    least_speedup: Annotated[
        float,
        typer.Option(
            "--least-speedup",
            help="Minimum speed-up to reach --accuracy and stay there: seconds of the synchronous arm / seconds of the best arm.",
        ),
    ] = 1.0,
    sets: Sets = None,
    overlay: Overlays = None,
    json: Json = False,
) -> None:
    """Compare five arms (synchronous, streaming, stale, partial rollouts, log-prob server): how well and how steadily each learns, and
    when it holds the accuracy of the synchronous arm. Exit code 6 if a bound is missed."""
    from mtpctl.bench import asynchrony as bench
    from mtpctl.bench.arms import Experiment, select_arms
    from mtpctl.bench.report import merge_machines, render
    from mtpctl.errors import ThresholdMissed

    arms, experiment = select_arms(bench.ARMS, arm, custom=True), Experiment(recipe, tuple(overlay or ()), tuple(sets or ()), out)
    outcomes = _outcomes(experiment if measured_only else bench.with_evaluations(experiment), arms, seed, measured_only, seeds_by_default=3)
    tolerance = bench.LEVEL_TOLERANCE if tolerance is None else tolerance
    results, level_by_seed = bench.summarize(outcomes, accuracy_level, tolerance)
    environment = merge_machines([o.versions for o in outcomes])
    document = bench.to_document(outcomes, results, level_by_seed, tolerance, environment)
    _write(out, document)
    table = bench.format_table(results, level_by_seed, tolerance, is_level_given=accuracy_level is not None)
    print_result(render(document, table, as_json=json))
    best = bench.find_best_speedup(results)
    if best is not None and best < least_speedup:
        raise ThresholdMissed(f"the best arm's speed-up over the synchronous one is {best:.2f}x, bound {least_speedup:g}x")


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="JSON of a benchmark.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="JSON of the same benchmark, later or elsewhere.")],
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="How much worse a figure may be, relative.")] = 0.05,
    json: Json = False,
) -> None:
    """Compare B with A, figure by figure. Exit code 6 if one got worse by more than the tolerance."""
    from mtpctl.bench import report as bench
    from mtpctl.errors import ThresholdMissed, UserError

    first, second = bench.read_result(before), bench.read_result(after)
    changes = bench.compare_results(first, second)
    if options := bench.differing_options(first, second):
        raise UserError(f"{before} and {after}: differ in their options ({'; '.join(options)}); compare two results of the same options")
    print_result(bench.to_json(bench.changes_to_json(changes)) if json else bench.format_changes(changes, tolerance))
    worse = [change for change in changes if change.worse_by > tolerance]
    if worse:
        raise ThresholdMissed(f"{len(worse)} of {len(changes)} figures got worse by more than {tolerance:.0%}, first: {worse[0].name}")


def _drafter_of(recipe: RecipeTree) -> tuple[int, bool]:
    """The number of MTP layers, and whether the drafter drafts blocks. Assumes one MTP layer if the model's config is not available."""
    from mtpctl.families.reading import shape_of
    from mtpctl.recipe.model import hf_config

    config = hf_config(recipe.model, fetch=False)
    if config is None:
        return 1, False
    shape = shape_of(config)
    return shape.mtp_layers, shape.dflash is not None


def _outcomes(
    experiment: Experiment,
    arms: Sequence[Arm],
    seeds: list[int] | None,
    measured_only: bool,
    *,
    together: bool = False,
    seeds_by_default: int = 1,
) -> list[Outcome]:
    if measured_only:
        return experiment.load_outcomes(arms, seeds, report=print_progress)
    create_folder(experiment.out, "--out")
    from mtpctl.recipe.loading import load_recipe

    first_seed = load_recipe(experiment.recipe, overlays=list(experiment.overlays), sets=list(experiment.sets)).recipe.seed
    return experiment.run(arms, seeds or list(range(first_seed, first_seed + seeds_by_default)), concurrent=together, report=print_progress)


def _write(out: Path, document: dict[str, object]) -> None:
    from mtpctl.bench.report import to_json

    (out / "result.json").write_text(to_json(document) + "\n")
    print_progress(f"wrote {out / 'result.json'}; mtpctl report {out}/NAME-SEED … draws the curves of these runs")
