"""How soon a student comes within two points of its teacher, learning from the teacher alone and by RL.

    python benchmarks/teacher.py mimo_small_mtp --out runs/teacher              # one GPU
    python benchmarks/teacher.py tiny_mtp --out runs/teacher --window 4         # a CPU, some minutes

Three runs: a supervised warm start; RL from it, whose last weights become the teacher; and on-policy distillation from that teacher,
from the same warm start, with the settings of `DISTILLED`, which `--teach KEY=VALUE` overrides. Both learn from equally many responses an
update. Seconds are of updates with all waiting, syncs and the teacher's scoring, evaluations excluded. A level is reached when the
line through the held-out accuracies first crosses it. Existing runs in the folder are reused. Prints a table and the same as JSON. Exit
code 6 if the student needs more than a third of RL's seconds, or if the KL does not fall from window to window.
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

from harness import finish, parser, print_environment
from mtpctl.bench.arms import Arm, Experiment, Outcome
from mtpctl.bench.asynchrony import curve_by_seconds, extract_evaluations, with_evaluations
from mtpctl.bench.report import format_number, markdown_table, merge_machines
from mtpctl.telemetry.summary import Point, best_so_far, interpolate

WITHIN = 0.02
"""Distance of the level below the teacher's accuracy."""
BOUND = 1 / 3
"""Maximum seconds to the level, relative to RL's."""
DISTILLED = (
    "train.rl.teacher.rewards=false",
    "train.rl.teacher.topk=8",
    "train.rl.group_size=1",
    "train.rl.advantage=reinforce_pp",
    "train.rl.dynamic_sampling=false",
    "train.rl.minibatches=4",
)
"""Settings of distillation. Groups have one response, because a teacher scores each response by itself, and more prompts teach more. There
are four minibatches, because the teacher scores every token, so a quarter of the responses is enough for an optimizer step."""
ON_ONE_GPU = ("train.gpus=0.4", "rollout.gpus=0.4", "train.rl.teacher.gpus=0.2")
BY_REWARD, BY_TEACHER = Arm("rl", "by reward"), Arm("taught", "by the teacher")


def crossing(curve: Sequence[Point], level: float) -> float | None:
    """The first x at which a curve reaches `level`, by linear interpolation; None if it never does."""
    best = best_so_far(curve)
    if best[0][1] >= level:
        return best[0][0]
    for (x0, y0), (x1, y1) in pairwise(best):
        if y1 >= level:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("recipe", help="the recipe of the warm start and of RL")
    arguments.add_argument("--out", type=Path, default=Path("runs/teacher"))
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    arguments.add_argument("--teach", action="append", default=[], metavar="KEY=VALUE", help="for the run with a teacher")
    arguments.add_argument("--overlay", action="append", default=[])
    arguments.add_argument("--window", type=int, default=5, help="updates of a window of the KL")
    arguments.add_argument("--measured-only", action="store_true", help="start nothing: evaluate the folder's runs, finished or not")
    options = arguments.parse_args()
    experiment = with_evaluations(Experiment(options.recipe, options.overlay, options.set, options.out))
    if options.measured_only:
        rl, taught = experiment.load_outcomes([BY_REWARD, BY_TEACHER], [options.seed], report=print)
    else:
        print_environment()
        settings = experiment.load("probe", options.seed).train.rl
        (rl,) = experiment.run([BY_REWARD], [options.seed], report=print)
        teacher = options.out / f"teacher-{options.seed}.hf"
        if not teacher.exists():
            convert = [sys.executable, "-m", "mtpctl", "convert-hf", str(options.out / f"rl-{options.seed}"), str(teacher)]
            subprocess.run(convert, check=True)
        keys = (
            f"train.rl.teacher.path={teacher}",
            f"train.rl.prompts_per_step={settings.prompts_per_step * settings.group_size}",
            *DISTILLED,
            *(ON_ONE_GPU if rl.placement.device == "cuda" else ()),
            *options.teach,
        )
        (taught,) = experiment.run([replace(BY_TEACHER, sets=keys)], [options.seed], report=print)
    finish(compare(rl, taught, options.window))


def compare(rl: Outcome, taught: Outcome, window: int) -> list[str]:
    """Print the comparison of both runs. Returns the missed bounds."""
    accuracy = extract_evaluations(rl.history)[-1].accuracy
    level = accuracy - WITHIN
    rows, runs = [], []
    for name, outcome in (("RL", rl), ("teacher", taught)):
        evaluations = extract_evaluations(outcome.history)
        seconds = crossing(curve_by_seconds(outcome.history), level)
        updates = None if seconds is None else interpolate([(e.seconds, float(e.update)) for e in evaluations], seconds)
        update_s = statistics.median(value for _, value in outcome.history.series("timing_s/step", "rl"))
        curve = ", ".join(f"{e.update}: {100 * e.accuracy:.1f}" for e in evaluations)
        rows.append((name, outcome.updates, f"{update_s:.2f}", format_number(updates, ".1f"), format_number(seconds, ".1f"), curve))
        points = [(e.update, round(e.seconds, 2), e.accuracy) for e in evaluations]
        runs.append({"run": name, "update_s": update_s, "seconds_to_level": seconds, "updates_to_level": updates, "curve": points})
    values = [value for _, value in taught.history.series("teacher/kl", "rl")]
    kl = [statistics.fmean(part) for part in batched(values, window) if len(part) == window]
    falls = all(after < before for before, after in pairwise(kl))
    times = [run["seconds_to_level"] for run in runs]
    share = times[1] / times[0] if all(isinstance(value, float) for value in times) else None  # type: ignore[operator]
    headings = ("learns by", "updates", "s an update", "updates to the level", "seconds to it", "held-out accuracy by update")
    print(f"The teacher solves {accuracy:.1%} of the held-out problems; the level is {level:.1%}.\n\n{markdown_table(headings, rows)}\n")
    print(f"KL to the teacher by windows of {window} updates, 1e-3 nats a token: {', '.join(f'{1000 * value:.1f}' for value in kl)}")
    document = {"teacher_accuracy": accuracy, "level": level, "share": share, "kl_windows": kl, "runs": runs}
    print(json.dumps({"environment": merge_machines([rl.versions, taught.versions]), **document}))
    misses = [] if share is not None and share <= BOUND else [f"share of RL's seconds {format_number(share, '.3f')}, bound {BOUND:.3f}"]
    return misses if falls else [*misses, "the KL does not fall from window to window"]


if __name__ == "__main__":
    main()
