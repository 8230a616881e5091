"""Which MTP loss gives the most accepted drafts, for a randomly initialized small head on a toy target.

    python benchmarks/multistep_training.py                          # three draft tokens, two seeds
    python benchmarks/multistep_training.py --drafts 5 --layers --updates 100 --seeds 1

The target is a random function of the last two tokens, with an entropy of about 0.7 nats. The head is one small layer that is repeated for
every draft token, or with `--layers` one layer per draft token. It uses the target's LM head. Gradients come from the training kernels.
Tokens per step (accepted drafts + 1) are exact expectations over 20,000 contexts, for sampled and for greedy drafts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness import parser, print_environment
from mtpctl.bench.report import markdown_table
from mtpctl.kernels.backend import DraftLoss
from mtpctl.kernels.policy import linear_draft_loss
from mtpctl.trainer.acceptance import Chains
from mtpctl.trainer.batch import DraftRows
from mtpctl.trainer.head import scale_gradient

VOCAB, WIDTH, NARROW, SHARPNESS = 96, 32, 16, 7.0
BATCH, RATE, CONTEXTS = 192, 3e-3, 20_000
LOSSES: tuple[DraftLoss, ...] = ("ce", "soft_ce", "tv", "e2e_tv", "e2e_greedy")


class Target:
    """A language model whose next token depends on the last two."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=self.generator)  # noqa: E731
        self.embedding, self.first, self.second = draw(VOCAB, WIDTH), draw(2 * WIDTH, 64) / (2 * WIDTH) ** 0.5, draw(64, WIDTH) / 8
        self.head = draw(VOCAB, WIDTH) * SHARPNESS / WIDTH**0.5

    def state(self, tokens: Tensor) -> Tensor:
        """The normalized state [n, H] after each pair of tokens [n, 2]."""
        hidden = torch.tanh(self.embedding[tokens].flatten(1) @ self.first) @ self.second
        return hidden / hidden.pow(2).mean(1, keepdim=True).sqrt()

    def responses(self, count: int, length: int) -> Tensor:
        """Sampled sequences [count, length], without the two uniformly random tokens before them."""
        tokens = torch.randint(VOCAB, (count, 2), generator=self.generator)
        for _ in range(length):
            p = (self.state(tokens[:, -2:]) @ self.head.T).softmax(1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=self.generator)], dim=1)
        return tokens[:, -length:]


@dataclass(frozen=True)
class Chain:
    """Drafts of one step for each of n responses, by depth: the head's and the target's states [n, H], and the sampled tokens [n]."""

    states: list[Tensor]
    teachers: list[Tensor]
    labels: list[Tensor]

    @classmethod
    def of(cls, target: Target, layers: nn.ModuleList, drafts: int, count: int) -> Chain:
        tokens = target.responses(count, drafts + 3)
        state, chain = target.state(tokens[:, :2]), cls([], [], [])
        for depth in range(1, drafts + 1):
            state = layers[min(depth, len(layers)) - 1](torch.cat([state, target.embedding[tokens[:, depth + 1]]], dim=1))
            state = state / (state.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
            chain.states.append(state)
            chain.teachers.append(target.state(tokens[:, depth : depth + 2]))
            chain.labels.append(tokens[:, depth + 2])
        return chain


def gradient_loss(chain: Chain, target: Target, loss: DraftLoss) -> Tensor:
    """A scalar whose gradients are those of the loss."""
    count, drafts = len(chain.labels[0]), len(chain.labels)
    # Responses follow each other as in a packed sequence. The first token of each is not drafted.
    first = torch.arange(count) * (drafts + 1)
    rows = [DraftRows(first, labels, first + depth) for depth, labels in enumerate(chain.labels, start=1)]
    chains, chained, outs = Chains(rows, count * (drafts + 1)), loss.startswith("e2e"), []
    for state, teacher, labels, weights in zip(chain.states, chain.teachers, chain.labels, chains.weights, strict=True):
        hidden = scale_gradient(state, weights if chained else None)
        outs.append(linear_draft_loss(hidden, teacher, target.head, labels, loss=loss, grad_scale=1 / count, detach_weight=True))
    chains.compute_weights([out.greedy if loss == "e2e_greedy" else out.overlap for out in outs])
    return torch.stack([out.loss_sum for out in outs]).sum() / count


@torch.no_grad()
def tokens_per_step(chain: Chain, target: Target) -> tuple[float, float]:
    """Tokens per step with sampled and with greedy drafts: 1 + Σ over depths of the probability that the draft is reached and accepted."""
    totals, reach_probabilities = [1.0, 1.0], [torch.ones(len(chain.labels[0]))] * 2
    for state, teacher, labels in zip(chain.states, chain.teachers, chain.labels, strict=True):
        q, p = ((states @ target.head.T).softmax(1) for states in (state, teacher))
        at, best = labels.unsqueeze(1), q.argmax(1)
        accepted = [torch.minimum(p, q).sum(1), p.gather(1, best.unsqueeze(1)).squeeze(1)]
        survived = [(q / p).gather(1, at).squeeze(1).clamp(max=1), (best == labels).float()]
        totals = [total + float((r * a).mean()) for total, r, a in zip(totals, reach_probabilities, accepted, strict=True)]
        reach_probabilities = [r * s for r, s in zip(reach_probabilities, survived, strict=True)]
    return totals[0], totals[1]


def train(loss: DraftLoss, seed: int, drafts: int, updates: int, count: int = 1) -> list[tuple[float, float]]:
    """Tokens per step of a head of `count` layers, after a sixth of the updates and at the end."""
    target = Target(seed)
    torch.manual_seed(seed)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2 * WIDTH, NARROW), nn.SiLU(), nn.Linear(NARROW, WIDTH)) for _ in range(count))
    optimizer, measured = torch.optim.Adam(layers.parameters(), lr=RATE), []
    for number in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 2 * (1 - number / updates) + 0.02)
        optimizer.zero_grad()
        gradient_loss(Chain.of(target, layers, drafts, BATCH), target, loss).backward()
        optimizer.step()
        if number in (max(1, updates // 6), updates):
            with torch.no_grad():
                measured.append(tokens_per_step(Chain.of(target, layers, drafts, CONTEXTS), target))
    return measured


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--drafts", type=int, default=3, help="Draft tokens per step.")
    arguments.add_argument("--layers", action="store_true", help="A separate layer for each draft token.")
    arguments.add_argument("--updates", type=int, default=1200)
    arguments.add_argument("--seeds", type=int, default=2, help="Number of targets and heads.")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print_environment()
    print(f"{options.drafts} drafts, {options.updates} updates of {BATCH} chains; tokens per step, the mean and each seed\n")
    early = f"after {max(1, options.updates // 6)} updates"
    headings = ("loss", f"sampled, {early}", "sampled, at the end", f"greedy, {early}", "greedy, at the end")
    print(markdown_table(headings, []), flush=True)
    for loss in LOSSES:
        count = options.drafts if options.layers else 1
        runs = [train(loss, seed, options.drafts, options.updates, count) for seed in range(options.seeds)]
        cells = []
        for kind in (0, 1):
            ends = [run[-1][kind] for run in runs]
            cells += [
                f"{statistics.mean(run[0][kind] for run in runs):.2f}",
                f"{statistics.mean(ends):.2f} ({', '.join(f'{end:.2f}' for end in ends)})",
            ]
        print(f"| {' | '.join([loss, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
