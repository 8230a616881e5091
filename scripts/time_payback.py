"""Holds `train.rl.train_mtp: auto` against training the drafter always and never, in three regimes on one card.

    python scripts/time_payback.py --out runs/payback
    python scripts/time_payback.py --out runs/payback --device cpu --updates 24

The model is that of `tiny_mtp`, and trainer and engine share the card. A supervised warm start trains a drafter of one token; from it start
three runs of each regime, those of one regime at once, so that whatever else the machine does slows all three. In two of the regimes a
step drafts three tokens, of which the warm start has trained the first alone.

tokens/s        response tokens over wall time, from update 4 on: updates, syncs and waiting included, on one card
update, s       the trainer's own seconds an update, of updates that trained the drafter and of those that did not: medians
rollout, s      seconds an update in which engines had requests, times the tokens that a decoding step yielded: the median
tokens a step   which a decoding step yields, over the first and the last quarter
of the best     tokens/s of auto over the better of the other two, with its standard error by a jackknife over blocks of updates

Runs that `--out` holds are reused; `--measured-only` starts nothing. Exit code 6 where a share misses its bound.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtpctl.bench.arms import Arm, Experiment, Outcome

BOUND = 0.98
SKIPPED = 3
"""Updates at the beginning, in which kernels are chosen and the first samples waited for."""
BLOCKS = 8
HEADINGS = ("drafter trained", "updates", "in", "update with, without, s", "rollout, s", "tokens a step", "tokens/s")
CHOICES = {"always": "true", "never": "false", "auto": "auto"}
SHARED = (
    "train.eval_every=100000",
    "train.checkpoint_every=0",
    "train.rl.dynamic_sampling=false",
    "data.task.eval_size=16",
    "mtp.loss=soft_ce",
)
DEVICES = {
    "cpu": (),
    "cuda": (
        "cluster={device: cuda, gpus_per_node: 1, num_cpus: 4}",
        "train.precision=bf16",
        "train.gpus=0.4",
        "rollout.gpus=0.6",
        "rollout.gpu_memory=0.1",
        "rollout.kv_cache_bytes=1073741824",
    ),
}
THREE = ("rollout.speculation.num_tokens=3", "mtp.repeat=3")
REGIMES = {
    "settled": ("the drafter came well trained, and the policy hardly moves", ("train.rl.optimizer={lr: 1e-7, mtp_lr: 1e-6}",)),
    "behind": ("three drafts, two of them untrained, and a high rate", (*THREE, "train.rl.optimizer={lr: 1e-5, mtp_lr: 3e-3}")),
    "short": (
        "three drafts, and answers of a few tokens",
        (*THREE, "train.rl.optimizer={lr: 1e-5, mtp_lr: 1e-4}", "data.task={name: addition, max_digits: 1, train_size: 80, eval_size: 16}"),
    ),
}


@dataclass(frozen=True, slots=True)
class Update:
    """One update: wall seconds since the one before it, the trainer's own, those of the engines, response tokens, and tokens that a
    decoding step yielded."""

    step_s: float
    update_s: float
    rollout_s: float
    tokens: float
    trained: bool
    length: float | None


def arms(regime: str) -> list[Arm]:
    meaning, sets = REGIMES[regime]
    return [Arm(f"{regime}-{choice}", meaning, (*sets, f"train.rl.train_mtp={value}")) for choice, value in CHOICES.items()]


def updates_of(outcome: Outcome) -> list[Update]:
    always = not outcome.arm.name.endswith("never")
    rows = [row.metrics for row in outcome.history.rows if row.phase == "rl" and "timing_s/step" in row.metrics]
    return [
        Update(
            step_s=row["timing_s/step"],
            update_s=row["timing_s/step"] * (1 - row["async/trainer_idle"]),
            rollout_s=row["timing_s/step"] * (1 - row["async/rollout_idle"]),
            tokens=row["rollout/tokens_per_s"] * row["timing_s/step"],
            trained=bool(row.get("mtp/trained", always)),
            length=row.get("rollout/spec_accept_length"),
        )
        for row in rows[SKIPPED:]
    ]


def rate(updates: Sequence[Update]) -> float:
    """Response tokens a second."""
    return sum(each.tokens for each in updates) / sum(each.step_s for each in updates)


def share_of_best(by_choice: dict[str, list[Update]]) -> tuple[float, float]:
    """Tokens a second of auto over those of the better fixed choice, and the standard error: a jackknife over blocks of updates."""

    def share(kept: dict[str, list[Update]]) -> float:
        rates = {choice: rate(updates) for choice, updates in kept.items()}
        return rates["auto"] / max(rates["always"], rates["never"])

    shares = []
    for block in range(BLOCKS):
        kept = {
            choice: [each for index, each in enumerate(updates) if index * BLOCKS // len(updates) != block]
            for choice, updates in by_choice.items()
        }
        shares.append(share(kept))
    mean = statistics.fmean(shares)
    return share(by_choice), math.sqrt((BLOCKS - 1) / BLOCKS * sum((each - mean) ** 2 for each in shares))


def row_of(choice: str, updates: Sequence[Update]) -> str:
    """A run's row of the table."""
    lengths = [each.length for each in updates if each.length is not None]
    quarter = max(1, len(lengths) // 4)
    ends = f"{statistics.fmean(lengths[:quarter]):.2f} → {statistics.fmean(lengths[-quarter:]):.2f}"
    kinds = [[each.update_s for each in updates if each.trained is trained] for trained in (True, False)]
    seconds = ", ".join(f"{statistics.median(kind):.3f}" if kind else "–" for kind in kinds)
    rollout = statistics.median(each.rollout_s * each.length for each in updates if each.length is not None)
    trained = sum(each.trained for each in updates) / len(updates)
    return f"| {choice} | {len(updates)} | {trained:.0%} | {seconds} | {rollout:.2f} | {ends} | {rate(updates):,.0f} |"


def tell(regime: str, outcomes: Sequence[Outcome]) -> bool:
    """Print a regime's table; returns whether the bound is met."""
    by_choice = {outcome.arm.name.removeprefix(f"{regime}-"): updates_of(outcome) for outcome in outcomes}
    share, error = share_of_best(by_choice)
    print(f"\n{REGIMES[regime][0]}: auto makes {share:.1%} of the best fixed choice's tokens/s (± {error:.1%})\n")
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for choice, updates in by_choice.items():
        print(row_of(choice, updates))
    for event in outcomes[-1].history.events:
        if event.kind == "mtp":
            print(f"  {event.message}")
    return share >= BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=sorted(DEVICES), default="cuda")
    parser.add_argument("--updates", type=int, default=90)
    parser.add_argument("--regime", action="append", choices=sorted(REGIMES), help="May be repeated; default: all.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="As of mtpctl train; may be repeated.")
    parser.add_argument("--measured-only", action="store_true")
    given = parser.parse_args()
    sets = (*SHARED, *DEVICES[given.device], f"train.rl.steps={given.updates}", *given.set)
    experiment = Experiment("tiny_mtp", (), sets, given.out)
    met = []
    for regime in given.regime or REGIMES:
        if given.measured_only:
            outcomes = experiment.measured(arms(regime), [given.seed], say=print)
        else:
            outcomes = experiment.run(arms(regime), [given.seed], together=True, say=print)
        met.append(tell(regime, outcomes))
    sys.exit(0 if all(met) else 6)


if __name__ == "__main__":
    main()
