"""Whether the drafter has to be trained during RL: acceptance of a frozen and of a trained drafter, by loss and number of drafts.

    python benchmarks/online_drafter.py --loss ce soft_ce e2e_tv --drafts 1 3 5 --seeds 0 1 --out runs/online
    python benchmarks/online_drafter.py --recipe tiny_mtp --loss soft_ce --drafts 2 --set train.rl.steps=8     # on a CPU

For each loss and number of drafts, a supervised stage trains trunk and drafter, the drafter at --mtp-lr and with as many depths as drafts.
Two RL runs start from the result: one with the drafter frozen, one that trains and syncs it with the same loss. `e2e_tv` and `soft_ce` get
sampled drafts, `ce` greedy ones, because cross-entropy with samples makes the most likely token likely. The runs of a seed are concurrent,
so their tokens/s compare only with each other. Several processes with separate --loss and the same --out share the work, and
--measured-only evaluates the runs in --out.

Reported are the means of the first and the last quarter of the updates. Tokens per step are response tokens per verification step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from harness import parser, print_environment
from mtpctl.bench.arms import Arm, Experiment, Outcome
from mtpctl.bench.report import markdown_table
from mtpctl.telemetry.names import format_value

FROZEN = Arm("frozen", "frozen", ("train.rl.train_mtp=false",))
TRAINED = Arm("trained", "trained and synced", ("train.rl.train_mtp=true", "sync.sections=[target, draft]"))
METHODS = {"ce": "greedy", "soft_ce": "probabilistic", "kl": "probabilistic", "tv": "probabilistic", "e2e_tv": "probabilistic"}
HEADINGS = (
    "loss before RL | drafts | drafter in RL | acceptance: first, last quarter | tokens/step: first, last | expected | update, s | accuracy"
)


@dataclass(frozen=True)
class Quarter:
    """Means over the updates of a quarter of the runs, seeds pooled. Acceptances are weighted by their number of drafts."""

    acceptance: float
    tokens_per_step: float
    update_s: float
    expected: float | None


def quarter(outcomes: list[Outcome], *, last: bool) -> Quarter:
    updates = []
    for outcome in outcomes:
        rows = [row.metrics for row in outcome.history.rows if row.phase == "rl" and "rollout/spec_drafted" in row.metrics]
        size = max(1, len(rows) // 4)
        updates += rows[-size:] if last else rows[:size]
    drafted = sum(row["rollout/spec_drafted"] for row in updates)

    def weighted(name: str) -> float:
        return sum(row[name] * row["rollout/spec_drafted"] for row in updates) / drafted

    kind = "" if outcomes[0].draft_method == "probabilistic" else "_greedy"
    expected = f"mtp/expected_rate{kind}_1"
    return Quarter(
        acceptance=sum(row["rollout/spec_accepted"] for row in updates) / drafted,
        tokens_per_step=weighted("rollout/spec_accept_length"),
        update_s=sum(row["timing_s/update"] for row in updates) / len(updates),
        expected=weighted(expected) if all(expected in row for row in updates) else None,
    )


def row(loss: str, drafts: int, arm: Arm, outcomes: list[Outcome]) -> list[str]:
    first, end = (quarter(outcomes, last=last) for last in (False, True))
    accuracies = [points[-1][1] for outcome in outcomes if (points := outcome.history.series("eval/accuracy", "rl"))]
    return [
        loss,
        str(drafts),
        arm.meaning,
        f"{format_value(first.acceptance, 'share')}, {format_value(end.acceptance, 'share')}",
        f"{first.tokens_per_step:.2f}, {end.tokens_per_step:.2f}",
        "–" if end.expected is None else f"first draft {format_value(end.expected, 'share')}",
        f"{end.update_s:.3f}",
        ", ".join(format_value(accuracy, "share") for accuracy in accuracies),
    ]


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
    arguments = options.parse_args()
    print_environment()
    rows = []
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
    print()
    print(markdown_table(HEADINGS.split(" | "), rows))


if __name__ == "__main__":
    main()
