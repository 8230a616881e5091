"""Cases of a policy loss with drafts, and its comparison with the sum of separate losses in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mtpctl.kernels.drafts import Draft
from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import PolicyLossOut, linear_draft_loss, linear_policy_loss
from tests.fakes.kernel_agreement import relative

SCALE = 0.25
Grads = dict[str, Tensor]


@dataclass(frozen=True)
class DraftCase:
    """A trunk and its drafts. Like an MTP depth, the first draft omits a few rows; further drafts have all rows."""

    rows: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    padding: int = 3
    drafts: tuple[dict[str, Any], ...] = ({"loss": "tv"},)
    apart: float = 0.7
    """Distance of a draft's states from the trunk's."""
    clear: float = 0.0
    """Ignore rows in which a draft's and the trunk's log-prob of an entry differ by less: the gradient of the total variation depends on
    which is larger."""
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, list[Draft], dict[str, Any]]:
        """The trunk's states, the weight, labels, drafts and options."""
        g = torch.Generator().manual_seed(self.seed)
        trunk = torch.randn(self.rows, self.hidden, generator=g)
        weight = torch.randn(self.vocab, self.hidden, generator=g) * 2 / self.hidden**0.5
        valid = self.vocab - self.padding
        labels = torch.multinomial((trunk @ weight[:valid].T).softmax(1), 1, generator=g).squeeze(1)
        labels[::7] = -100
        options: dict[str, Any] = {
            "temperature": (torch.rand(self.rows, generator=g) + 0.5).to(device),
            "valid_vocab": valid,
        } | self.options
        drafts = []
        for number, settings in enumerate(self.drafts):
            rows = (torch.rand(self.rows, generator=g) < 0.9).nonzero().squeeze(1) if number == 0 else None
            state = (trunk if rows is None else trunk[rows]) * (1 - self.apart) + self.apart * torch.randn(
                self.rows if rows is None else len(rows), self.hidden, generator=g
            )
            hidden = state.to(device, self.dtype).requires_grad_()
            drafts.append(Draft(hidden, None if rows is None else rows.to(device), **settings))
            if self.clear:
                own = torch.arange(self.rows) if rows is None else rows
                t = options["temperature"].cpu()[own, None]
                logq, logp = (((x.float() @ weight[:valid].T) / t).log_softmax(1) for x in (state, trunk[own]))
                labels[own[((logq - logp).abs() < self.clear).any(1)]] = -100
        return (
            trunk.to(device, self.dtype).requires_grad_(),
            weight.to(device, self.dtype).requires_grad_(),
            labels.to(device),
            drafts,
            options,
        )


def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A separable loss."""
    return (-logprob * ((rows % 3) - 0.5)).sum(), {"tokens": torch.tensor(float(len(rows)))}


def in_one_sweep(case: DraftCase, device: str = "cpu", **more: Any) -> tuple[PolicyLossOut, Grads]:
    """The loss of one sweep, and its gradients by name."""
    trunk, weight, labels, drafts, options = case.tensors(device)
    out = linear_policy_loss(trunk, weight, labels, token_loss, drafts=drafts, grad_scale=SCALE, **options | more)
    grads = torch.autograd.grad(out.loss_sum * SCALE, (trunk, weight, *(draft.hidden for draft in drafts)))
    return out, dict(zip(("trunk", "weight", *(f"draft {n}" for n in range(len(drafts)))), grads, strict=True))


def one_by_one(case: DraftCase, device: str = "cpu") -> tuple[Tensor, list[Any], Grads]:
    """Total loss, each draft's outputs, and gradients, in float64."""
    trunk, weight, labels, drafts, options = case.tensors(device)
    wide = [x.detach().double().requires_grad_() for x in (trunk, weight)]
    drafts = [replace(draft, hidden=draft.hidden.detach().double().requires_grad_()) for draft in drafts]
    logprob = linear_logprob(*wide, labels, implementation="reference", **options).logprob
    keep = (labels != -100).nonzero().squeeze(1)
    total, reported = token_loss(logprob[keep], None, keep)[0], []
    for draft in drafts:
        rows = slice(None) if draft.rows is None else draft.rows
        out = linear_draft_loss(
            draft.hidden,
            wide[0][rows],
            wide[1],
            labels[rows],
            loss=draft.loss,
            mix=draft.mix,
            detach_weight=draft.detach_weight,
            implementation="reference",
            **options | {"temperature": options["temperature"][rows]},
        )
        total = total + draft.weight * out.loss_sum
        reported.append(out)
    grads = torch.autograd.grad(total * SCALE, (*wide, *(draft.hidden for draft in drafts)))
    names = ("trunk", "weight", *(f"draft {n}" for n in range(len(drafts))))
    return total.detach(), reported, dict(zip(names, grads, strict=True))


def plain_torch(case: DraftCase, device: str = "cpu") -> Grads:
    """Gradients by plain torch, every logit in the operands' dtype and softmax in fp32."""
    trunk, weight, labels, drafts, options = case.tensors(device)
    valid, t = options["valid_vocab"], options["temperature"].unsqueeze(1)
    keep = labels != -100
    chosen = labels.clamp(min=0).unsqueeze(1)
    logp = ((trunk @ weight[:valid].T).float() / t).log_softmax(1)
    saved = keep.nonzero().squeeze(1)
    total = token_loss(logp.gather(1, chosen).squeeze(1)[saved], None, saved)[0]
    for draft in drafts:
        rows = torch.arange(len(labels), device=device) if draft.rows is None else draft.rows
        head = weight.detach() if draft.detach_weight else weight
        logq = ((draft.hidden @ head[:valid].T).float() / t[rows]).log_softmax(1)
        target = logp.detach()[rows]
        ce = -logq.gather(1, chosen[rows]).squeeze(1)
        values = {
            "ce": ce,
            "soft_ce": -(target.exp() * logq).sum(1),
            "kl": (target.exp() * (target - logq)).sum(1),
            "tv": 1 - torch.minimum(target.exp(), logq.exp()).sum(1),
            "e2e_greedy": 1 - (target.exp() * (logq.exp() + 0.1 * logq)).sum(1),
            "e2e_tv": 1 - torch.minimum(target.exp(), logq.exp()).sum(1) - 0.1 * (target.exp() * logq).sum(1),
        }
        total = total + draft.weight * ((draft.mix * values[draft.loss] + (1 - draft.mix) * ce) * keep[rows]).sum()
    grads = torch.autograd.grad(total * SCALE, (trunk, weight, *(draft.hidden for draft in drafts)))
    return dict(zip(("trunk", "weight", *(f"draft {n}" for n in range(len(drafts)))), grads, strict=True))


def assert_sweep_agrees(case: DraftCase, device: str = "cpu", values: float = 1e-5, spare: float = 0.0, **more: Any) -> None:
    """Assert that one sweep matches the separate losses within `values`, and gradients within 1.5 times plain torch's error + `spare`."""
    out, got = in_one_sweep(case, device, **more)
    total, reported, expected = one_by_one(case, device)
    assert abs(out.loss_sum.item() - total.item()) <= values * max(1.0, abs(total.item()))
    for tensor, exact in zip(out.drafts, reported, strict=True):
        for name in ("logprob", "teacher_logprob", "overlap", "greedy"):
            assert torch.allclose(getattr(tensor, name).double(), getattr(exact, name).double(), atol=10 * values), name
        assert torch.equal(tensor.hit, exact.hit)
    plain = plain_torch(case, device)
    for name, exact_grad in expected.items():
        bound = 1.5 * relative(plain[name], exact_grad) + max(torch.finfo(case.dtype).eps, values) + spare
        assert relative(got[name], exact_grad) <= bound, f"{name}: {relative(got[name], exact_grad):.2e}, bound {bound:.2e}"
