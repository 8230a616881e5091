"""Whether the drafter has to be trained during RL: acceptance of a frozen and of a trained drafter, by loss and number of drafts.

    python benchmarks/online_drafter.py --loss ce soft_ce e2e_tv --drafts 1 3 5 --seeds 0 1 --out runs/online
    python benchmarks/online_drafter.py --loss soft_ce --drafts 3 --shift-after 100 --out runs/shift
    python benchmarks/online_drafter.py --recipe tiny_mtp --loss soft_ce --drafts 2 --set train.rl.steps=8     # on a CPU

For each loss and number of drafts, a supervised stage trains trunk and drafter, the drafter at --mtp-lr and with as many depths as drafts.
Two RL runs start from the result: one with the drafter frozen, one that trains and syncs it with the same loss. `e2e_tv` and `soft_ce` get
sampled drafts, `ce` greedy ones, because cross-entropy with samples makes the most likely token likely. The runs of a seed are concurrent,
so their tokens/s compare only with each other. Several processes with separate --loss and the same --out share the work, and
--measured-only evaluates the runs in --out.

With --shift-after N, the supervised stage learns additions and subtractions. RL has additions for N updates and subtractions from then on,
without dynamic sampling, so that each update uses the same number of prompts.

Reported are the acceptance in each tenth of the updates, and means of the first and the last quarter. Tokens per step are response tokens
per verification step.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from harness import parser, print_environment
from mtpctl.bench.arms import Arm, Experiment, Outcome
from mtpctl.bench.report import markdown_table
from mtpctl.data.problems import Problem
from mtpctl.data.tasks import generate
from mtpctl.recipe.data import GeneratedTask
from mtpctl.recipe.loading import load_recipe
from mtpctl.telemetry.names import format_value

FROZEN = Arm("frozen", "frozen", ("train.rl.train_mtp=false",))
TRAINED = Arm("trained", "trained and synced", ("train.rl.train_mtp=true", "sync.sections=[target, draft]"))
METHODS = {"ce": "greedy", "soft_ce": "probabilistic", "kl": "probabilistic", "tv": "probabilistic", "e2e_tv": "probabilistic"}
PARTS = 10
HEADINGS = "loss before RL | drafts | drafter in RL | tokens/step: first, last quarter | entropy | expected | update, s | accuracy"


@dataclass(frozen=True)
class Part:
    """Means over the updates of a part of the runs, seeds pooled. Acceptances are weighted by their number of drafts."""

    acceptance: float
    tokens_per_step: float
    update_s: float
    entropy: float
    expected: float | None


def rl_metrics(outcome: Outcome) -> list[dict[str, float]]:
    """The metrics of each RL update with drafts."""
    return [row.metrics for row in outcome.history.rows if row.phase == "rl" and "rollout/spec_drafted" in row.metrics]


def part(outcomes: list[Outcome], index: int, parts: int) -> Part:
    """The part with this index, of parts of equal numbers of updates."""
    updates = []
    for outcome in outcomes:
        rows = rl_metrics(outcome)
        start = len(rows) * index // parts
        updates += rows[start : max(start + 1, len(rows) * (index + 1) // parts)]
    drafted = sum(row["rollout/spec_drafted"] for row in updates)

    def weighted(name: str) -> float:
        return sum(row[name] * row["rollout/spec_drafted"] for row in updates) / drafted

    kind = "" if outcomes[0].draft_method == "probabilistic" else "_greedy"
    expected = f"mtp/expected_rate{kind}_1"
    return Part(
        acceptance=sum(row["rollout/spec_accepted"] for row in updates) / drafted,
        tokens_per_step=weighted("rollout/spec_accept_length"),
        update_s=sum(row["timing_s/update"] for row in updates) / len(updates),
        entropy=sum(row["actor/entropy"] for row in updates) / len(updates),
        expected=weighted(expected) if all(expected in row for row in updates) else None,
    )


def row(loss: str, drafts: int, arm: Arm, outcomes: list[Outcome]) -> list[str]:
    first, end = part(outcomes, 0, 4), part(outcomes, 3, 4)
    accuracies = [points[-1][1] for outcome in outcomes if (points := outcome.history.series("eval/accuracy", "rl"))]
    return [
        loss,
        str(drafts),
        arm.meaning,
        f"{first.tokens_per_step:.2f}, {end.tokens_per_step:.2f}",
        f"{first.entropy:.3f}, {end.entropy:.3f}",
        "–" if end.expected is None else f"first draft {format_value(end.expected, 'share')}",
        f"{end.update_s:.3f}",
        ", ".join(format_value(accuracy, "share") for accuracy in accuracies),
    ]


def shift_task(recipe: str, sets: list[str], updates: int, folder: Path) -> list[str]:
    """Write the rows of a run whose task changes after a number of updates. Returns the settings that select them."""
    config = load_recipe(recipe, sets=sets).recipe
    assert config.data.task is not None
    prompts = config.train.rl.prompts_per_step
    size = prompts * config.train.rl.steps

    def draw(task: GeneratedTask) -> tuple[list[Problem], list[Problem]]:
        problems, held_out = generate(task, config.seed)
        random.Random(config.seed).shuffle(problems)
        return problems, held_out

    kinds = ("addition", "subtraction")
    supervised = [draw((config.data.sft_task or config.data.task).model_copy(update={"name": name}))[0] for name in kinds]
    (additions, _), (subtractions, held_out) = (
        draw(config.data.task.model_copy(update={"name": name, "train_size": size, "eval_size": 256})) for name in kinds
    )
    mixed = [problem for pair in zip(*supervised, strict=True) for problem in pair]
    files = {"sft_path": mixed, "path": additions[: prompts * updates] + subtractions, "eval_path": held_out}
    folder.mkdir(parents=True, exist_ok=True)
    for key, problems in files.items():
        rows = [{"prompt": problem.prompt, "answer": problem.answer, "solution": problem.solution} for problem in problems]
        (folder / f"{key}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [f"data.{key}={(folder / key).absolute()}.jsonl" for key in files]
    return [*paths, "data.task=null", "data.sft_task=null", "data.shuffle=false", "train.rl.dynamic_sampling=false"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--recipe", default="mimo_small_mtp")
    options.add_argument("--loss", nargs="+", choices=METHODS, default=["ce", "soft_ce", "e2e_tv"])
    options.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 5])
    options.add_argument("--seeds", nargs="+", type=int, default=[0])
    options.add_argument("--mtp-lr", type=float, default=3e-4)
    options.add_argument("--out", type=Path, default=Path("runs/online-drafter"))
    options.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    options.add_argument("--measured-only", action="store_true")
    options.add_argument("--shift-after", type=int, metavar="UPDATES")
    arguments = options.parse_args()
    print_environment()
    if arguments.shift_after is not None:
        arguments.sets += shift_task(arguments.recipe, arguments.sets, arguments.shift_after, arguments.out / "rows")
    rows, curves = [], []
    for loss, drafts in itertools.product(arguments.loss, arguments.drafts):
        sets = [
            f"mtp.loss={loss}",
            f"mtp.repeat={drafts}",
            f"train.sft.optimizer.mtp_lr={arguments.mtp_lr}",
            f"rollout.speculation.num_tokens={drafts}",
            f"rollout.speculation.draft_method={METHODS[loss]}",
            *arguments.sets,
        ]
        experiment = Experiment(arguments.recipe, (), tuple(sets), arguments.out / f"{loss}-{drafts}")
        say = print
        if arguments.measured_only:
            outcomes = experiment.load_outcomes([FROZEN, TRAINED], arguments.seeds, report=say)
        else:
            outcomes = experiment.run([FROZEN, TRAINED], arguments.seeds, concurrent=True, report=say)
        for arm in (FROZEN, TRAINED):
            if of_arm := [outcome for outcome in outcomes if outcome.arm == arm]:
                rows.append(row(loss, drafts, arm, of_arm))
                acceptances = [format_value(part(of_arm, index, PARTS).acceptance, "share") for index in range(PARTS)]
                curves.append([loss, str(drafts), arm.meaning, str(sum(len(rl_metrics(outcome)) for outcome in of_arm)), *acceptances])
    print()
    print(markdown_table(HEADINGS.split(" | "), rows))
    print()
    print("Acceptance in each tenth of the updates:\n")
    print(markdown_table([*HEADINGS.split(" | ")[:3], "updates", *map(str, range(1, PARTS + 1))], curves))


if __name__ == "__main__":
    main()
