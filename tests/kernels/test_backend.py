"""Tensor parallelism over gloo: two ranks with half the vocabulary each against one rank with all of it."""

from __future__ import annotations

import itertools
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mtpctl.cluster.rendezvous import address_of, host_store, join_store
from mtpctl.kernels import exact, invariant
from mtpctl.kernels.backend import combine_stats
from mtpctl.kernels.logprob import linear_logprob
from mtpctl.kernels.policy import linear_policy_loss
from tests.fakes.kernel_agreement import relative

WORLD, ROWS, WIDTH, VOCAB, PADDING = 2, 14, 16, 64, 5
OPTIONS = list(itertools.product(("chunked", "triton", "reference", "exact"), (1, 1 << 22)))


def name(implementation: str, workspace: int) -> str:
    return f"{implementation}, {workspace} bytes"


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, VOCAB - PADDING, (ROWS,), generator=g)
    labels[:6] = torch.tensor([0, 31, 32, VOCAB - PADDING - 1, -100, 33])  # both sides of the shard boundary, and both ends
    return torch.randn(ROWS, WIDTH, generator=g).to(dtype), torch.randn(VOCAB, WIDTH, generator=g).to(dtype), labels


def token_loss(logprob: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    assert entropy is not None
    return (logprob * (rows + 1) + entropy).sum(), {}


def unlike_shards(rank: int) -> dict[str, float]:
    """Padding leaves the last rank so few columns that its workspace would fit twice as many rows as the first one's."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH, generator=g), torch.randn(132, WIDTH, generator=g)
    labels = torch.randint(0, 126, (ROWS,), generator=g)
    half = slice(rank * 66, (rank + 1) * 66)
    whole_h, whole_w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    shard_h, shard_w = hidden.clone().requires_grad_(), weight[half].clone().requires_grad_()
    common: dict[str, Any] = {"entropy": True, "valid_vocab": 126}
    reference = linear_logprob(whole_h, whole_w, labels, implementation="reference", **common)
    expected = torch.autograd.grad(token_loss(reference.logprob, reference.entropy, torch.arange(ROWS))[0], (whole_h, whole_w))
    fused = linear_policy_loss(shard_h, shard_w, labels, token_loss, group=dist.group.WORLD, workspace_bytes=3 * 3 * 4 * 128, **common)
    grads = torch.autograd.grad(fused.loss_sum, (shard_h, shard_w))
    return {"hidden": relative(grads[0], expected[0]), "weight": relative(grads[1], expected[1][half])}


def bits(rank: int) -> dict[str, float]:
    """How many elements differ between operations of two ranks and of one, for rows and columns of different magnitudes."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 96, generator=g) * (2 * torch.randn(rows, 1, generator=g)).exp() for rows in (9, 50))
    # Each rank has the largest element of some rows.
    half, group = slice(rank * 48, (rank + 1) * 48), dist.group.WORLD
    logits, columns = 4 * torch.randn(9, 101, generator=g), slice(0, 64) if rank == 0 else slice(64, 101)
    pairs = {
        "linear": (exact.linear(x[:, half], weight[:, half], group), exact.linear(x, weight)),
        "exact mass": (exact.log_mass(logits[:, columns], 101, group), exact.log_mass(logits)),
        "invariant mass": (invariant.log_mass(logits[:, columns], 101, group), invariant.log_mass(logits)),
    }
    flat = {name: [torch.cat(each) if isinstance(each, tuple) else each for each in pair] for name, pair in pairs.items()}
    return {name: torch.ne(two, one).sum().item() for name, (two, one) in flat.items()}


def _rank(rank: int, meeting: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = join_store(meeting, 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    answers: dict[str, dict[str, float]] = {}
    for implementation, workspace in OPTIONS:
        hidden, weight, labels = case(torch.float16 if implementation == "triton" else torch.float32)
        half = slice(rank * VOCAB // WORLD, (rank + 1) * VOCAB // WORLD)
        whole_h, whole_w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        shard_h, shard_w = hidden.clone().requires_grad_(), weight[half].clone().requires_grad_()
        common: dict[str, Any] = {"temperature": 0.7, "entropy": True, "valid_vocab": VOCAB - PADDING}
        parallel: dict[str, Any] = {
            "group": dist.group.WORLD,
            "workspace_bytes": workspace,
            "implementation": implementation,
        }
        topk = 0 if implementation == "triton" else 5
        reference = linear_logprob(whole_h, whole_w, labels, hit=True, topk=topk, implementation="reference", **common)
        got = linear_logprob(shard_h, shard_w, labels, hit=True, topk=topk, **common, **parallel)
        every = torch.arange(ROWS)
        expected = torch.autograd.grad(token_loss(reference.logprob, reference.entropy, every)[0], (whole_h, whole_w))
        grads = torch.autograd.grad(token_loss(got.logprob, got.entropy, every)[0], (shard_h, shard_w))
        answer = {
            "logprob": (got.logprob - reference.logprob).abs().max().item(),
            "entropy": (got.entropy - reference.entropy).abs().max().item(),
            "hit": torch.ne(got.hit, reference.hit).sum().item(),
            "hidden": relative(grads[0], expected[0]),
            "weight": relative(grads[1], expected[1][half]),
        }
        if topk:
            answer["topk"] = (got.topk.ids != reference.topk.ids)[labels != -100].sum().item()
        if implementation == "exact":
            single = linear_logprob(hidden, weight, labels, implementation="exact", **common)
            answer["bits"] = (got.logprob != single.logprob).sum().item()
        if implementation != "reference":
            fused = linear_policy_loss(shard_h, shard_w, labels, token_loss, **common, **parallel)
            grads = torch.autograd.grad(fused.loss_sum, (shard_h, shard_w))
            answer |= {"policy hidden": relative(grads[0], expected[0]), "policy weight": relative(grads[1], expected[1][half])}
        answers[name(implementation, workspace)] = answer
    answers["unlike shards"] = unlike_shards(rank)
    answers["bits"] = bits(rank)
    # A shard that is all padding contributes nothing to the softmax.
    shard_h, shard_w = hidden.clone().requires_grad_(), weight[half].clone().requires_grad_()
    few = labels.clamp(max=VOCAB // WORLD - 3)
    alone = linear_logprob(hidden, weight, few, valid_vocab=VOCAB // WORLD - 2, entropy=True)
    for implementation in ("chunked", "reference", "exact"):
        got = linear_logprob(
            shard_h,
            shard_w,
            few,
            valid_vocab=VOCAB // WORLD - 2,
            entropy=True,
            topk=3,
            group=dist.group.WORLD,
            implementation=implementation,
        )
        weight_grad = torch.autograd.grad(got.logprob.sum(), shard_w)[0]
        answers[f"{implementation}, a shard of padding"] = {
            "logprob": (got.logprob - alone.logprob).abs().max().item(),
            "entropy": (got.entropy - alone.entropy).abs().max().item(),
            "padding": weight_grad[-2:].abs().max().item() if rank == 0 else weight_grad.abs().max().item(),
        }
    try:
        linear_logprob(hidden, weight[half], torch.full((ROWS,), VOCAB), group=dist.group.WORLD)
    except ValueError as error:
        answers["refused"] = {str(error): 0.0}
    Path(folder, f"{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("ranks")
    meeting = host_store("127.0.0.1")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # inherited by the spawned ranks
    try:
        mp.spawn(_rank, args=(address_of(meeting), str(folder)), nprocs=WORLD)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: name(*o))
@pytest.mark.parametrize("rank", range(WORLD))
def test_sharded_results_match_unsharded_ones(answers: list[dict[str, dict[str, float]]], rank: int, options: tuple[str, int]) -> None:
    # fp16 rounds the gradients of logits; parts are summed over ranks in fp32.
    gradient = 2e-3 if options[0] == "triton" else 2e-6
    for what, error in answers[rank][name(*options)].items():
        bound = {"hit": 0, "topk": 0, "bits": 0}.get(what, gradient if "hidden" in what or "weight" in what else 1e-4)
        assert error <= bound, what


@pytest.mark.parametrize("rank", range(WORLD))
def test_bitwise_operations_do_not_depend_on_the_number_of_ranks(answers: list[dict[str, dict[str, float]]], rank: int) -> None:
    assert answers[rank]["bits"] == {"linear": 0, "exact mass": 0, "invariant mass": 0}


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("implementation", ["chunked", "reference", "exact"])
def test_padding_shard_contributes_nothing(answers: list[dict[str, dict[str, float]]], rank: int, implementation: str) -> None:
    answer = answers[rank][f"{implementation}, a shard of padding"]
    assert answer["logprob"] < 1e-5
    assert answer["entropy"] < 1e-5
    assert answer["padding"] == 0


def test_ranks_with_unequal_columns_use_equal_slices(answers: list[dict[str, dict[str, float]]]) -> None:
    for answer in answers:
        for what, error in answer["unlike shards"].items():
            assert error < 2e-6, what


def test_labels_are_checked_against_the_whole_vocabulary(answers: list[dict[str, dict[str, float]]]) -> None:
    for answer in answers:
        assert list(answer["refused"]) == [f"labels: {VOCAB} is outside the vocabulary of {VOCAB} entries (ignore_index is -100)"]


def test_joined_statistics_match_one_softmax() -> None:
    z = torch.randn(5, 12, dtype=torch.float64) * 50
    parts = []
    for block in (z[:, :1], z[:, 1:7], z[:, 7:]):
        top = block.amax(1)
        e = (block - top.unsqueeze(1)).exp()
        parts.append(torch.stack([top, e.sum(1), (e * (block - top.unsqueeze(1))).sum(1), torch.full_like(top, -torch.inf)]))
    empty = torch.stack([torch.full((5,), -torch.inf), torch.zeros(5), torch.zeros(5), torch.full((5,), -torch.inf)]).double()
    joined = combine_stats(torch.stack([empty, *parts]))
    logp = z.log_softmax(1)
    assert torch.allclose(joined.lse, z.logsumexp(1))
    assert torch.allclose(joined.entropy, -(logp.exp() * logp).sum(1), atol=1e-12)
