"""Acceptance: the estimate matches simulated drafting; weights, gradient and an update of the multi-step loss match float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.kernels.policy import linear_draft_loss
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.schema import KernelsConfig
from mtpctl.trainer.acceptance import DRAFT_KINDS, Chains, DepthProbabilities, StepEstimate, acceptance_metrics, acceptance_sums
from mtpctl.trainer.batch import DraftRows, Sequence, pack
from mtpctl.trainer.head import scale_gradient
from mtpctl.trainer.objective import NextToken
from tests.fakes import mimo_reference
from tests.fakes.batches import packed
from tests.fakes.tiny import GENTLE, assert_close, engine, gradients, mimo, sequences
from tests.fakes.updates import sampled

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


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_walk_over_plain_samples_matches_simulated_drafting(kind: str) -> None:
    p, q = chains()
    greedy = kind == "greedy"
    steps, accepted, _ = played(p, q, greedy, 3000)
    _, _, samples = played(p, [p] * DEPTHS, False, 1500)  # of the target alone, whatever drafted
    overlap = [torch.minimum(p, each).sum(1) for each in q]
    first = [p.gather(1, each.argmax(1, keepdim=True)).squeeze(1) for each in q]
    estimate = StepEstimate()
    for tokens in samples:
        before, here = torch.tensor([0, *tokens[:-1]]), torch.tensor(tokens)
        chances = [(first if greedy else overlap)[depth][before].tolist() for depth in range(DEPTHS)]
        retained = [
            (each[before].argmax(1) == here).float() if greedy else (each[before, here] / p[before, here]).clamp(max=1) for each in q
        ]
        estimate.add(chances, [each.tolist() for each in retained], len(tokens))
    for depth in range(DEPTHS):
        # Four standard errors of a share over the steps played, and as much again for those walked.
        share = accepted[depth] / steps
        assert abs(estimate.accepted[depth] / estimate.steps - share) < 8 * (share * (1 - share) / steps) ** 0.5


def test_turns_and_responses_are_walked_separately_up_to_the_limit() -> None:
    """Responses of 3, 4 (one of a tool) and 2 tokens. All drafts are accepted, so one step covers the rest of a turn."""
    micro = packed([[1, 1, 1], [1, 0, 1, 1], [1, 1]], depths=2)
    ones = torch.ones(9)
    depths = [DepthProbabilities(ones, dict.fromkeys(DRAFT_KINDS, ones), dict.fromkeys(DRAFT_KINDS, ones)) for _ in range(2)]
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
    depths = [DepthProbabilities(ones, dict.fromkeys(DRAFT_KINDS, ones), dict.fromkeys(DRAFT_KINDS, ones)) for _ in range(2)]
    sums = {name: float(value) for name, value in acceptance_sums(micro, depths, 5, drafts=1).items()}
    # Steps begin at tokens 1 and 3, each with its draft accepted; what follows token 5 is not there to be drafted.
    assert (sums["mtp/expected_steps"], sums["mtp/expected_rate_1"]) == (2, 2)
    metrics = acceptance_metrics(sums, 2)
    assert metrics["mtp/expected_accept_2"] == 1 and "mtp/expected_rate_2" not in metrics


def test_metrics_are_empty_without_measured_tokens() -> None:
    micro = packed([[1, 1]], depths=1)
    none = torch.zeros(2)
    depth = DepthProbabilities(none, dict.fromkeys(DRAFT_KINDS, none), dict.fromkeys(DRAFT_KINDS, none))
    assert acceptance_metrics({name: float(value) for name, value in acceptance_sums(micro, [depth], 0).items()}, 1) == {}


DEPTHS = 3
SOFT_SHARE = 0.1


def expected_accepted(alphas: list[Tensor]) -> Tensor:
    """E of one chain, term by term."""
    total = torch.zeros((), dtype=torch.float64)
    for last in range(len(alphas)):
        term = torch.ones((), dtype=torch.float64)
        for alpha in alphas[: last + 1]:
            term = term * alpha
        total = total + term
    return total


def rows(begins: list[list[int]]) -> list[DraftRows]:
    """Rows of depths 1, 2, … whose chains begin after these tokens."""
    return [DraftRows(torch.tensor([]), torch.tensor([]), torch.tensor(at) + depth) for depth, at in enumerate(begins, start=1)]


# The chains after tokens 2 and 3 end early.
RAGGED = [[0, 1, 2, 3, 6, 7], [0, 1, 2, 6], [0, 1, 6]]


def chain_of(values: list[Tensor], begins: list[list[int]], start: int) -> list[Tensor]:
    return [value[at.index(start)] for value, at in zip(values, begins, strict=True) if start in at]


def test_weights_are_derivatives_of_the_expected_accepted_length() -> None:
    g = torch.Generator().manual_seed(0)
    alphas = [torch.rand(len(at), generator=g, dtype=torch.float64).requires_grad_() for at in RAGGED]
    alphas[1].data[1] = 0.0  # c does not divide by α
    starts = sorted(set(RAGGED[0]))
    expected = torch.autograd.grad(sum(expected_accepted(chain_of(alphas, RAGGED, s)) for s in starts), alphas)
    chains = Chains(rows(RAGGED), 12)
    losses = chains.compute_weights([alpha.detach() for alpha in alphas])
    for weight, exact in zip(chains.weights, expected, strict=True):
        assert torch.allclose(weight.double(), exact, atol=1e-6)
    alphas = [alpha.detach() for alpha in alphas]
    reached = [sum(float(1 - torch.stack(chain_of(alphas, RAGGED, s)[:depth]).prod()) for s in at) for depth, at in enumerate(RAGGED, 1)]
    assert [float(loss) for loss in losses] == pytest.approx(reached)


def test_chains_of_a_packed_batch_stay_within_turns() -> None:
    """A chain has a depth only if its token, and all before it in the chain, were sampled in one turn of one sequence."""
    batch = [Sequence([1, 2, 3, 4, 5, 6, 7, 8], 2, [1, 1, 1, 0, 1, 1]), Sequence([1, 2, 3, 4, 5], 1, [1, 1, 1, 1])]
    chains = Chains(pack(batch, [0, 1], DEPTHS, "cpu").drafts, 10)
    assert [at.tolist() for at in chains.start_tokens] == [[0, 1, 4, 6, 7, 8], [0, 6, 7], [6]]


def test_gradient_matches_finite_differences() -> None:
    """Of minus the expected accepted length, with the total variation alone."""
    g = torch.Generator().manual_seed(1)
    tokens, width, vocab = 10, 5, 9
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    trunk, weight, mixing = draw(tokens, width), draw(vocab, width), draw(width, width)
    noise = [draw(len(at), width) for at in RAGGED]
    drafts = rows(RAGGED)

    def states(x: Tensor) -> list[Tensor]:
        """All depths depend on the parameter, as with a repeated layer."""
        return [trunk[draft.response_indices] + 0.5 * z @ x for draft, z in zip(drafts, noise, strict=True)]

    def accepted(x: Tensor) -> float:
        p = (trunk @ weight.T).softmax(1)
        alphas = [
            torch.minimum(p[draft.response_indices], (state @ weight.T).softmax(1)).sum(1)
            for draft, state in zip(drafts, states(x), strict=True)
        ]
        return sum(float(expected_accepted(chain_of(alphas, RAGGED, start))) for start in RAGGED[0])

    x = mixing.clone().requires_grad_()
    chains = Chains(drafts, tokens)
    outs = [
        linear_draft_loss(
            scale_gradient(state, weights),
            trunk[draft.response_indices],
            weight,
            torch.zeros(len(state), dtype=torch.long),
            detach_weight=True,
        )
        for state, draft, weights in zip(states(x), drafts, chains.weights, strict=True)
    ]
    assert all(chains.compute_weights([out.overlap for out in outs]))
    (grad,) = torch.autograd.grad(sum(out.loss_sum for out in outs), x)
    for _ in range(4):
        direction = draw(width, width)
        slope = (accepted(mixing + 1e-6 * direction) - accepted(mixing - 1e-6 * direction)) / 2e-6
        assert float((grad * direction).sum()) == pytest.approx(-slope, rel=1e-5)


def test_gradient_is_scaled_by_row_in_the_backward_pass() -> None:
    x, weights = torch.randn(3, 4, requires_grad=True), torch.zeros(5)
    y = scale_gradient(x, weights, torch.tensor([4, 0, 2]))
    weights.copy_(torch.arange(5.0))
    y.sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [4.0, 0.0, 2.0] and torch.equal(y, x)


@pytest.mark.parametrize("loss", ["tv", "e2e_tv", "e2e_greedy"])
def test_draft_without_common_mass_still_has_a_gradient(loss: str) -> None:
    """With e2e_tv and e2e_greedy; the total variation alone has none."""
    weight = 30 * torch.eye(8, dtype=torch.float64)
    target, draft = weight[:1] / 30, (weight[1:2] / 30).requires_grad_()
    out = linear_draft_loss(draft, target, weight, torch.tensor([0]), loss=loss, detach_weight=True)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(out.loss_sum, draft)
    assert out.overlap < 1e-9
    assert (float(grad.norm()) > 1) is (loss != "tv")


def reference(folder: HfFolder, batch: list[Sequence], *, greedy: bool, loss_scale: float) -> tuple[list[float], dict[str, Tensor]]:
    """Mean of 1 − Π α by depth, and gradients of the drafter, token by token."""
    weights = {name: value.double().requires_grad_() for name, value in load_file(folder.path / "model.safetensors").items()}
    total, chains = torch.zeros((), dtype=torch.float64), 0
    missed, counts = [0.0] * DEPTHS, [0] * DEPTHS
    for sequence in batch:
        logits, drafts = mimo_reference.forward(weights, folder.config, sequence.token_ids, DEPTHS, isolated=True)
        for begin in range(sequence.prompt_length, len(sequence.token_ids) - 1):
            alphas, soft = [], []
            for depth in range(1, DEPTHS + 1):
                token = begin + depth
                if token >= len(sequence.token_ids) or not sampled(sequence, begin, token + 1):
                    break
                p, logq = logits[token - 1].detach().softmax(0), drafts[depth - 1][begin - 1].log_softmax(0)
                q = logq.exp()
                if greedy:  # the value of p(argmax q), with the gradient of Σ p q
                    surrogate = (p * q).sum()
                    alphas.append(surrogate + (p[q.argmax()] - surrogate).detach())
                else:
                    alphas.append(torch.minimum(p, q).sum())
                soft.append(-(p * logq).sum())
            if not alphas:
                continue
            chains += 1
            length = expected_accepted(alphas)
            factors = torch.autograd.grad(length, alphas, retain_graph=True)
            total = total - length + SOFT_SHARE * sum(factor * cost for factor, cost in zip(factors, soft, strict=True))
            for depth in range(len(alphas)):
                counts[depth] += 1
                missed[depth] += float(1 - torch.stack(alphas[: depth + 1]).prod().detach())
    (loss_scale * total / (chains * DEPTHS)).backward()
    grads = {name: value.grad for name, value in weights.items() if "mtp" in name and value.grad is not None}
    return [value / count for value, count in zip(missed, counts, strict=True)], grads


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_update_matches_the_reference_in_every_packing(tmp_path: Path, greedy: bool) -> None:
    """Sequences alone, partly packed, all packed, and with a separate pass for each depth."""
    folder, batch = mimo(tmp_path / "model", num_nextn_predict_layers=DEPTHS), sequences()
    losses, expected = reference(folder, batch, greedy=greedy, loss_scale=0.3)
    mtp = MtpConfig(mode="isolated", loss="e2e_tv", loss_scale=0.3, clip_grad=0)
    for budget, kernel in ((1, "auto"), (40, "auto"), (4096, "auto"), (4096, "reference")):
        kernels = KernelsConfig.model_validate({"linear_logprob": kernel})
        with engine(folder, mtp=mtp, greedy_drafts=greedy, tokens_per_microbatch=budget, kernels=kernels) as trainer:
            trainer.set_optimizer(GENTLE)
            metrics = trainer.update(batch, NextToken())
            result = {name: value for name, value in gradients(trainer).items() if "mtp" in name}
        assert [metrics[f"mtp/loss_{depth}"] for depth in range(1, DEPTHS + 1)] == pytest.approx(losses, rel=1e-5)
        assert_close(result, expected, 1e-5)
