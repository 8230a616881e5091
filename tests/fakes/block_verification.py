"""Speculative decoding of a toy with block verification (arXiv 2403.10444, algorithm 2), with random numbers by seed and position."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpctl.rollout.vllm.patches.verification import derive_step_seeds

REQUESTS, VOCAB = 400, 7


class Toy:
    """A target and a drafter whose next token depends on the last one: distributions [last, next] at a temperature."""

    def __init__(self, temperature: float) -> None:
        g = torch.Generator().manual_seed(0)
        logits = 1.5 * torch.randn(VOCAB, VOCAB, generator=g, dtype=torch.float64)
        noise = 1.2 * torch.randn(VOCAB, VOCAB, generator=g, dtype=torch.float64)
        self.target, self.draft = ((each / temperature).softmax(1) for each in (logits, logits + noise))


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """A number in (0, 1) for each seed, position and stream, by the finalizer of SplitMix64."""
    x = seeds ^ (positions * 0x2545F4914F6CDD1D + stream * 0x5851F42D4C957F2D)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (((x ^ ((x >> 31) & ((1 << 33) - 1))) >> 12 & ((1 << 52) - 1)).double() + 0.5) / (1 << 52)


def drawn(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The entry of each row's distribution at the number in (0, 1)."""
    return (probabilities.cumsum(1) < numbers.unsqueeze(1) * probabilities.sum(1, keepdim=True)).sum(1).clamp(max=VOCAB - 1)


def transitions(toy: Toy, drafts: int, tokens: int, *, fresh: bool) -> tuple[Tensor, float]:
    """Counts [last, next] of at least `tokens` tokens of 400 requests, and the tokens per step.

    fresh: seeds depend on the step, as with the patch.
    """
    base = torch.randint(1 << 40, (REQUESTS,), generator=torch.Generator().manual_seed(1))
    slots, last, begin = torch.arange(REQUESTS), torch.zeros(REQUESTS, dtype=torch.long), torch.zeros(REQUESTS, dtype=torch.long)
    counts, steps, previous = torch.zeros(VOCAB, VOCAB), 0, base
    while counts.sum() < tokens:
        seeds = derive_step_seeds(base, slots, begin) if fresh else base
        row, ratio = [last], [torch.ones(REQUESTS, dtype=torch.float64)]
        for number in range(drafts):
            # Drafts are sampled at the end of the step before, whose seeds they use.
            row.append(drawn(toy.draft[row[-1]], uniform(previous, begin + number, 0)))
            ratio.append((ratio[-1] * (toy.target / toy.draft)[row[-2], row[-1]]).clamp(max=1))
        accepted = torch.zeros(REQUESTS, dtype=torch.long)
        for number in range(1, drafts + 1):
            chance = ratio[number]
            if number < drafts:
                mass = (chance.unsqueeze(1) * toy.target[row[number]] - toy.draft[row[number]]).clamp(min=0).sum(1)
                chance = torch.where(mass + 1 - chance > 0, mass / (mass + 1 - chance), 1.0)
            accepted = torch.where(uniform(seeds, begin + number - 1, 1) <= chance, number, accepted)
        state, left = torch.stack(row)[accepted, slots], torch.stack(ratio)[accepted, slots]
        rest = (left.unsqueeze(1) * toy.target[state] - toy.draft[state]).clamp(min=0)
        rest = torch.where((accepted == drafts).unsqueeze(1), toy.target[state], rest)
        following = drawn(rest, uniform(seeds, begin + accepted, 2))
        for number in range(1, drafts + 1):
            chosen = accepted >= number
            counts.index_put_((row[number - 1][chosen], row[number][chosen]), torch.ones(()), accumulate=True)
        counts.index_put_((state, following), torch.ones(()), accumulate=True)
        last, begin, previous, steps = following, begin + accepted + 1, seeds, steps + 1
    return counts, float(counts.sum()) / (steps * REQUESTS)


def chi_squared(counts: Tensor, target: Tensor) -> tuple[float, int]:
    """Pearson's statistic of the transitions, and its degrees of freedom."""
    expected = counts.double().sum(1, keepdim=True) * target
    return float(((counts - expected) ** 2 / expected).sum()), VOCAB * (VOCAB - 1)


def tokens_per_step(toy: Toy, drafts: int) -> float:
    """Of token-by-token verification: exact, at the stationary distribution of where steps begin."""
    both = torch.minimum(toy.target, toy.draft)
    rest = (toy.target - toy.draft).clamp(min=0)
    # The distribution of the token after a step, given the token before it.
    after, alive = torch.zeros(VOCAB, VOCAB, dtype=torch.float64), torch.eye(VOCAB, dtype=torch.float64)
    length = torch.ones(VOCAB, dtype=torch.float64)
    for _ in range(drafts):
        after, alive = after + alive @ rest, alive @ both
        length = length + alive.sum(1)
    after = after + alive @ toy.target
    begins = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    for _ in range(200):
        begins = begins @ after
    return float(begins @ length)


def main() -> None:
    """Print tokens per step of both rules, and with random numbers that steps share (`python -m tests.fakes.block_verification`)."""
    print("| temperature | drafts | token | block | block, shared numbers | total variation, shared numbers |\n|---|---|---|---|---|---|")
    for temperature in (0.7, 1.0):
        for drafts in (1, 3, 5):
            toy = Toy(temperature)
            token, block = tokens_per_step(toy, drafts), transitions(toy, drafts, 400_000, fresh=True)[1]
            counts, shared = transitions(toy, drafts, 400_000, fresh=False)
            apart = (counts / counts.sum() - counts.sum(1, keepdim=True) / counts.sum() * toy.target).abs().sum() / 2
            print(f"| {temperature} | {drafts} | {token:.3f} | {block:.3f} ({block / token - 1:+.1%}) | {shared:.3f} | {apart:.4f} |")


if __name__ == "__main__":
    main()
