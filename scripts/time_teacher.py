"""Time how soon a student comes within two points of its teacher by the teacher's word alone, and how soon by RL.

    python scripts/time_teacher.py mimo_small_mtp --out runs/teacher              # one card
    python scripts/time_teacher.py tiny_mtp --out runs/teacher --window 4         # a CPU, some minutes

Three runs: a supervised warm start; RL from it, whose last weights become the teacher; and on-policy distillation by that teacher from the
same warm start, with the settings of `TAUGHT`, which `--teach KEY=VALUE` overrides. Both learn from as many responses an update. Seconds
are those of updates with all waiting, syncs and the teacher's own scoring, evaluations excluded; where all share one card they are seconds
of the card. A level is reached where the line through the held-out accuracies first crosses it. Runs that the folder holds are reused.
Prints a table, the curves and the KL over windows, and then the same as a line of JSON. Exit code 6 where the student takes more than the
bound's share of RL's seconds, or the KL does not fall.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import batched, pairwise
from pathlib import Path
from typing import Annotated

import typer

from mtpctl.bench.arms import Arm, Experiment, Outcome
from mtpctl.bench.asynchrony import Evaluation, evaluated, evaluations_of
from mtpctl.bench.machine import machine, machines, told
from mtpctl.telemetry.summary import Point, best_so_far, height

WITHIN = 0.02
"""How far below the teacher's accuracy counts as having reached it."""
BOUND = 1 / 3
"""Seconds until then with a teacher over those by RL, at most."""
TAUGHT = (
    "train.rl.teacher.rewards=false",
    "train.rl.teacher.topk=8",
    "train.rl.group_size=1",
    "train.rl.advantage=reinforce_pp",
    "train.rl.dynamic_sampling=false",
    "train.rl.minibatches=4",
)
"""What the run with a teacher sets. Groups of one: a teacher needs no other response to compare with, and more prompts teach more.
Minibatches: it has a say on every token, so that a quarter of the responses shows the way well enough for a step of the optimizer."""
ON_ONE_CARD = ("train.gpus=0.4", "rollout.gpus=0.4", "train.rl.teacher.gpus=0.2")


def crossing(curve: Sequence[Point], level: float) -> float | None:
    """The first x at which a curve is at `level`, interpolated; None where it never is."""
    best = best_so_far(curve)
    if best[0][1] >= level:
        return best[0][0]
    for (x0, y0), (x1, y1) in pairwise(best):
        if y1 >= level:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def reached(evaluations: Sequence[Evaluation], level: float) -> tuple[float, float] | None:
    """Seconds and updates until the level; None where it is never reached."""
    seconds = crossing([(e.seconds, e.accuracy) for e in evaluations], level)
    return None if seconds is None else (seconds, height([(e.seconds, float(e.update)) for e in evaluations], seconds))


def converted(run: Path, folder: Path) -> Path:
    """The newest checkpoint of a run as a Hugging Face folder, unless it is there already."""
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "mtpctl", "convert-hf", str(run), str(folder)], check=True)
    return folder


def of_run(name: str, outcome: Outcome, level: float) -> dict[str, object]:
    """What is told of one run: its curve as (update, seconds, held-out accuracy), and when it reached the level."""
    evaluations = evaluations_of(outcome.history)
    found = reached(evaluations, level)
    return {
        "run": name,
        "updates": outcome.updates,
        "update_s": statistics.median(seconds for _, seconds in outcome.history.series("timing_s/step", "rl")),
        "curve": [(e.update, round(e.seconds, 2), e.accuracy) for e in evaluations],
        "seconds_to_level": found and found[0],
        "updates_to_level": found and found[1],
    }


def windows(outcome: Outcome, size: int) -> list[float]:
    """The KL to the teacher, in nats a token, as means over windows of so many updates; a last, shorter one is left out."""
    values = [value for _, value in outcome.history.series("teacher/kl", "rl")]
    return [statistics.fmean(window) for window in batched(values, size) if len(window) == size]


def main(
    recipe: Annotated[str, typer.Argument(help="The recipe of the warm start and of RL.")],
    out: Annotated[Path, typer.Option(help="The folder of all runs.")] = Path("runs/time-teacher"),
    seed: Annotated[int, typer.Option(help="Of all runs.")] = 0,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For all runs.")] = None,
    teach: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the run with a teacher.")] = None,
    overlay: Annotated[list[str] | None, typer.Option(help="Laid over the recipe.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Updates of a window of the KL.")] = 5,
    measured_only: Annotated[bool, typer.Option("--measured-only", help="Start nothing: tell of the folder's runs, ended or not.")] = False,
) -> None:
    experiment = evaluated(Experiment(recipe, overlay or [], sets or [], out))
    by_reward, by_teacher = Arm("rl", "by reward"), Arm("taught", "by the teacher")
    if measured_only:
        learned, taught = experiment.measured([by_reward, by_teacher], [seed], say=print)
        tell(learned, taught, window)
        return
    rl = experiment.load("probe", seed).train.rl
    print(f"{told(machine())}\n", flush=True)
    (learned,) = experiment.run([by_reward], [seed], say=print)
    teacher = converted(out / f"rl-{seed}", out / f"teacher-{seed}.hf")
    keys = (
        f"train.rl.teacher.path={teacher}",
        f"train.rl.prompts_per_step={rl.prompts_per_step * rl.group_size}",
        *TAUGHT,
        *(ON_ONE_CARD if learned.placement.device == "cuda" else ()),
        *(teach or ()),
    )
    (taught,) = experiment.run([replace(by_teacher, sets=keys)], [seed], say=print)
    tell(learned, taught, window)


def tell(learned: Outcome, taught: Outcome, window: int) -> None:
    """Print the comparison of the run that learned by reward with the one that was taught by its last weights; exit code 6 as above."""
    accuracy = evaluations_of(learned.history)[-1].accuracy
    level = accuracy - WITHIN
    runs = [of_run("RL", learned, level), of_run("teacher", taught, level)]
    kl = windows(taught, window)
    print(table(runs, accuracy, kl, window), flush=True)
    times = [run["seconds_to_level"] for run in runs]
    share = times[1] / times[0] if all(isinstance(each, float) for each in times) else None  # type: ignore[operator]
    falls = all(after < before for before, after in pairwise(kl))
    print(f"share of RL's seconds: {'–' if share is None else f'{share:.3f}'}, bound {BOUND:.3f}; KL falls from window to window: {falls}")
    found = {"teacher_accuracy": accuracy, "level": level, "share": share, "kl_windows": kl, "kl_falls": falls}
    print(json.dumps({"environment": machines([learned.versions, taught.versions]), **found, "runs": runs}))
    if share is None or share > BOUND or not falls:
        raise typer.Exit(6)


def table(runs: Sequence[dict[str, object]], accuracy: float, kl: Sequence[float], window: int) -> str:
    """The two runs, their curves, and the KL over windows, as Markdown."""
    lines = [
        f"The teacher has {accuracy:.1%} of the held-out problems right; the level is {accuracy - WITHIN:.1%}.",
        "",
        "| learns by | updates | s an update | updates to the level | seconds to it | held-out accuracy by update |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        curve = ", ".join(f"{update}: {100 * held_out:.1f}" for update, _, held_out in run["curve"])  # type: ignore[attr-defined]
        to_level = ("–", "–") if run["seconds_to_level"] is None else (f"{run['updates_to_level']:.1f}", f"{run['seconds_to_level']:.1f}")
        lines.append(f"| {run['run']} | {run['updates']} | {run['update_s']:.2f} | {to_level[0]} | {to_level[1]} | {curve} |")
    thousandths = ", ".join(f"{1000 * each:.1f}" for each in kl)
    return "\n".join(
        [*lines, "", f"KL to the teacher over windows of {window} updates, in thousandths of a nat a token: {thousandths}", ""]
    )


if __name__ == "__main__":
    typer.run(main)
