"""The cases of `mtpctl bench fused-kernels`: this project's kernels at several workspaces, and other packages' for the same work.

Every case is a callable that does one whole run and returns what it made. Shape legend: N rows, H hidden size, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from mtpctl.plan.memory import GIB

What = Literal["forward", "forward+backward", "policy loss", "mtp, detached, half the rows"]


@dataclass(frozen=True)
class Limit:
    """Upper bounds of a case: time as a multiple of the floor (for mtp: of the first forward+backward case), GiB, and forward error."""

    ratio: float
    gib: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Inputs:
    """hidden [N, H] and weight [V, H] require gradients; labels [N]; half [N] masks about half of the rows; upstream [N] is the gradient of
    each log-prob; old_logprob and advantage [N] are those of the policy loss."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    half: Tensor
    upstream: Tensor
    old_logprob: Tensor
    advantage: Tensor


@dataclass
class Output:
    """What a run computed: log-probs [N], entropies [N], gradients of hidden and weight, and of the trunk's states where hidden is a
    draft's; None for what it does not compute."""

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    hidden_grad: Tensor | None = None
    weight_grad: Tensor | None = None
    trunk_grad: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """One implementation at one kind of work. `peer`: of another package, and held to no bound."""

    what: What
    name: str
    run: Callable[[Inputs], Output]
    limit: Limit | None = None
    peer: bool = False


def make_inputs(rows: int, hidden: int, vocab: int, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """Random inputs whose softmax is neither flat nor one-hot: logits have a standard deviation of 2."""
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    weight = torch.empty(vocab, hidden, device=device, dtype=dtype)
    for start in range(0, vocab, 8192):  # drawn at once, the whole weight in fp32 would be the peak of the run
        part = weight[start : start + 8192]
        part.copy_(normal(*part.shape) * (2 / hidden**0.5))
    labels = torch.randint(0, vocab, (rows,), device=device, generator=g)
    half = torch.rand(rows, device=device, generator=g) < 0.5
    return Inputs(
        normal(rows, hidden).to(dtype).requires_grad_(),
        weight.requires_grad_(),
        labels,
        half,
        normal(rows),
        normal(rows) * 0.1 - 13.0,
        normal(rows),
    )


def clipped_loss(logprob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """A clipped policy loss with an entropy bonus, one term a token [r]."""
    ratio = (logprob - old).clamp(-20, 20).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)) - 0.01 * entropy


def ours(times: float = 1.0) -> Iterator[Case]:
    """This project's cases, with the bounds they are held to. With more rows, workspaces are `times` as large as their names say."""
    half, one, more, three = (int(times * gib * GIB) for gib in (0.5, 1, 1.5, 3))
    yield Case("forward", "triton, 0.5 GiB", _forward("triton", half), Limit(1.12, 0.5, 5e-5))
    yield Case("forward+backward", "triton, 0.5 GiB", _backward("triton", half), Limit(1.42, 0.5, 5e-5))
    yield Case("forward+backward", "triton, 1 GiB", _backward("triton", one))
    yield Case("forward+backward", "triton, 3 GiB", _backward("triton", three), Limit(1.12, 3.0))
    yield Case("forward+backward", "triton, 0.5 GiB, main_grad", _main_grad(half))
    yield Case("policy loss", "triton, 1.5 GiB", _policy(more), Limit(1.12, 1.5))
    yield Case("mtp, detached, half the rows", "linear_logprob, 0.5 GiB", _mtp(half), Limit(0.40))
    yield Case("mtp, detached, half the rows", "linear_policy_loss, 1.5 GiB", _mtp_policy(more), Limit(0.40))
    yield Case("forward", "chunked, 1 GiB", _forward("chunked", one))
    yield Case("forward+backward", "chunked, 1 GiB", _backward("chunked", one))


def peers(device: str) -> Iterator[Case]:
    """The cases of torch, and of cut-cross-entropy if it is installed."""
    yield Case("forward", "torch eager", _torch_forward(_eager), peer=True)
    yield Case("forward+backward", "torch eager", _torch_backward(_eager), peer=True)
    if device != "cuda":
        return
    compiled = torch.compile(_eager)
    yield Case("forward", "torch.compile", _torch_forward(compiled), peer=True)
    yield Case("forward+backward", "torch.compile", _torch_backward(compiled), peer=True)
    if find_spec("cut_cross_entropy"):
        yield Case("forward", "cut-cross-entropy (no entropy)", _torch_forward(_cce), peer=True)
        yield Case("forward+backward", "cut-cross-entropy (no entropy)", _torch_backward(_cce), peer=True)


def missing(device: str) -> list[str]:
    """Peers that would run if they were installed."""
    packages = {"cut_cross_entropy": "cut-cross-entropy"}
    return [name for module, name in packages.items() if find_spec(module) is None] if device == "cuda" else []


def _forward(implementation: str, workspace: int) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        with torch.no_grad():
            out = linear_logprob(x.hidden, x.weight, x.labels, entropy=True, workspace_bytes=workspace, implementation=implementation)
        return Output(out.logprob, out.entropy)

    return run


def _backward(implementation: str, workspace: int) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        out = linear_logprob(x.hidden, x.weight, x.labels, entropy=True, workspace_bytes=workspace, implementation=implementation)
        grads = torch.autograd.grad(out.logprob, (x.hidden, x.weight), x.upstream)
        return Output(out.logprob.detach(), None if out.entropy is None else out.entropy.detach(), *grads)

    return run


def _main_grad(workspace: int) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        weight = x.weight
        if not hasattr(weight, "main_grad"):
            vars(weight)["main_grad"] = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        out = linear_logprob(x.hidden, weight, x.labels, entropy=True, workspace_bytes=workspace, implementation="triton", main_grad=True)
        (hidden_grad, _) = torch.autograd.grad(out.logprob, (x.hidden, weight), x.upstream, allow_unused=True)
        return Output(out.logprob.detach(), hidden_grad=hidden_grad)

    return run


def _policy(workspace: int) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            assert entropy is not None
            return clipped_loss(logprob, entropy, x.old_logprob[rows], x.advantage[rows]).sum(), {}

        out = linear_policy_loss(x.hidden, x.weight, x.labels, token_loss, entropy=True, workspace_bytes=workspace, implementation="triton")
        return Output(out.logprob, out.entropy, *torch.autograd.grad(out.loss_sum, (x.hidden, x.weight)))

    return run


def _mtp(workspace: int) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        out = linear_logprob(
            x.hidden, x.weight, x.labels, rows=x.half, detach_weight=True, hit=True, workspace_bytes=workspace, implementation="triton"
        )
        return Output(hidden_grad=torch.autograd.grad(out.logprob.sum(), x.hidden)[0])

    return run


def _mtp_policy(workspace: int) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return logprob.sum(), {}

        out = linear_policy_loss(
            x.hidden, x.weight, x.labels, token_loss, rows=x.half, detach_weight=True, workspace_bytes=workspace, implementation="triton"
        )
        return Output(hidden_grad=torch.autograd.grad(out.loss_sum, x.hidden)[0])

    return run


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T).float().log_softmax(1)
    return logp.gather(1, labels.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)


def _cce(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    return -import_module("cut_cross_entropy").linear_cross_entropy(hidden, weight, labels, reduction="none"), None


Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def _torch_forward(scores: Scores) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        with torch.no_grad():
            return Output(*scores(x.hidden, x.weight, x.labels))

    return run


def _torch_backward(scores: Scores) -> Callable[[Inputs], Output]:
    def run(x: Inputs) -> Output:
        logprob, entropy = scores(x.hidden, x.weight, x.labels)
        grads = torch.autograd.grad(logprob, (x.hidden, x.weight), x.upstream.to(logprob.dtype))
        return Output(logprob.detach(), None if entropy is None else entropy.detach(), *grads)

    return run
