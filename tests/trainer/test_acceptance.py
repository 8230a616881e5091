"""The trainer's estimate of acceptance matches simulated drafting and rejection sampling."""

from __future__ import annotations

import random

import pytest
import torch

from mtpctl.trainer.acceptance import KINDS, DepthProbabilities, Walk, acceptance_metrics, acceptance_sums
from tests.fakes.batches import packed

VOCAB, DEPTHS, LENGTH = 5, 3, 40


def chains() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The next token's distribution given the last token, and that of each depth's draft, which is worse for deeper ones."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCAB, VOCAB, generator=g) * 1.5
    drafts = [logits + (0.5 + depth) * 0.6 * torch.randn(VOCAB, VOCAB, generator=g) for depth in range(DEPTHS)]
    return logits.softmax(1), [each.softmax(1) for each in drafts]


def played(p: torch.Tensor, q: list[torch.Tensor], greedy: bool, turns: int) -> tuple[int, list[int], list[list[int]]]:
    """Simulate an engine: returns steps, accepted drafts by position, and the tokens."""
    draw = random.Random(1)
    target, draft = p.tolist(), [each.tolist() for each in q]
    steps, accepted, lines = 0, [0] * DEPTHS, []
    for _ in range(turns):
        tokens = draw.choices(range(VOCAB), target[0])
        while len(tokens) < LENGTH:
            steps += 1
            drafts, last = [], tokens[-1]
            for depth in range(DEPTHS):
                row = draft[depth][last]
                last = row.index(max(row)) if greedy else draw.choices(range(VOCAB), row)[0]
                drafts.append(last)
            for depth, guess in enumerate(drafts):
                if len(tokens) == LENGTH:
                    break
                want, have = target[tokens[-1]], draft[depth][tokens[-1]]
                if greedy:
                    have = [float(x == guess) for x in range(VOCAB)]
                if draw.random() < want[guess] / have[guess]:
                    accepted[depth] += 1
                    tokens.append(guess)
                    continue
                tokens.append(draw.choices(range(VOCAB), [max(0.0, w - h) for w, h in zip(want, have, strict=True)])[0])
                break
            else:
                tokens.append(draw.choices(range(VOCAB), target[tokens[-1]])[0])
        lines.append(tokens[:LENGTH])
    return steps, accepted, lines


@pytest.mark.parametrize("kind", KINDS)
def test_walk_over_plain_samples_matches_simulated_drafting(kind: str) -> None:
    p, q = chains()
    greedy = kind == "greedy"
    steps, accepted, _ = played(p, q, greedy, 3000)
    _, _, samples = played(p, [p] * DEPTHS, False, 1500)  # of the target alone, whatever drafted
    overlap = [torch.minimum(p, each).sum(1) for each in q]
    first = [p.gather(1, each.argmax(1, keepdim=True)).squeeze(1) for each in q]
    walk = Walk()
    for tokens in samples:
        before, here = torch.tensor([0, *tokens[:-1]]), torch.tensor(tokens)
        chances = [(first if greedy else overlap)[depth][before].tolist() for depth in range(DEPTHS)]
        retained = [
            (each[before].argmax(1) == here).float() if greedy else (each[before, here] / p[before, here]).clamp(max=1) for each in q
        ]
        walk.add(chances, [each.tolist() for each in retained], len(tokens))
    for depth in range(DEPTHS):
        # Four standard errors of a share over the steps played, and as much again for those walked.
        share = accepted[depth] / steps
        assert abs(walk.accepted[depth] / walk.steps - share) < 8 * (share * (1 - share) / steps) ** 0.5


def test_turns_and_responses_are_walked_separately_up_to_the_limit() -> None:
    """Responses of 3, 4 (one of a tool) and 2 tokens. All drafts are accepted, so one step covers the rest of a turn."""
    micro = packed([[1, 1, 1], [1, 0, 1, 1], [1, 1]], depths=2)
    ones = torch.ones(9)
    depths = [DepthProbabilities(ones, dict.fromkeys(KINDS, ones), dict.fromkeys(KINDS, ones)) for _ in range(2)]
    sums = {name: float(value) for name, value in acceptance_sums(micro, depths, 7).items()}
    # Turns: three tokens, one, two; the last response lies behind the limit. Steps: one of two drafts, none, one of one.
    assert (sums["mtp/expected_steps"], sums["mtp/expected_rate_1"], sums["mtp/expected_rate_2"]) == (2, 2, 1)
    metrics = acceptance_metrics(sums, 2)
    assert metrics["mtp/expected_rate_2"] == metrics["mtp/expected_rate_greedy_2"] == 0.5
    assert metrics["mtp/expected_accept_1"] == 1


def test_step_with_fewer_drafts_than_depths_ends_after_its_drafts() -> None:
    """All drafts of two depths are accepted, but the engine drafts with the first one only."""
    micro = packed([[1, 1, 1, 1, 1]], depths=2)
    ones = torch.ones(5)
    depths = [DepthProbabilities(ones, dict.fromkeys(KINDS, ones), dict.fromkeys(KINDS, ones)) for _ in range(2)]
    sums = {name: float(value) for name, value in acceptance_sums(micro, depths, 5, drafts=1).items()}
    # Steps begin at tokens 1 and 3, each with its draft accepted; what follows token 5 is not there to be drafted.
    assert (sums["mtp/expected_steps"], sums["mtp/expected_rate_1"]) == (2, 2)
    metrics = acceptance_metrics(sums, 2)
    assert metrics["mtp/expected_accept_2"] == 1 and "mtp/expected_rate_2" not in metrics


def test_metrics_are_empty_without_measured_tokens() -> None:
    micro = packed([[1, 1]], depths=1)
    none = torch.zeros(2)
    depth = DepthProbabilities(none, dict.fromkeys(KINDS, none), dict.fromkeys(KINDS, none))
    assert acceptance_metrics({name: float(value) for name, value in acceptance_sums(micro, [depth], 0).items()}, 1) == {}
