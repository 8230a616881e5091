"""`mtpctl eval`: measure weights on the recipe's held-out sets."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mtpctl.cli.answers import answer
from mtpctl.cli.options import Json, Overlays, Sets, Start, TargetArgument
from mtpctl.jobs.progress import print_progress


def evaluate(
    target: TargetArgument,
    n: Annotated[int | None, typer.Option("--n", metavar="N", help="Responses to each problem; default: as each set says.", min=1)] = None,
    sets: Sets = None,
    overlay: Overlays = None,
    start: Start = None,
    as_json: Json = False,
) -> None:
    """Measure the newest weights of a run on its held-out sets: avg@n, pass@k, response length and draft acceptance."""
    from mtpctl.jobs.evaluate import evaluate_weights, rendered
    from mtpctl.jobs.targets import target_with_weights

    with target_with_weights(target, start, overlay or [], sets or []) as found:
        measured = evaluate_weights(found.recipe, n=n, say=print_progress, start=found.start)
    answer(json.dumps(measured, indent=2) if as_json else rendered(measured))
