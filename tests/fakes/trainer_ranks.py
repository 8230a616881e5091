"""Runs parallel cases in ranks that are forked from this process."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mtpctl.checkpoint.finding import check_checkpoint
from mtpctl.checkpoint.listing import files_in, read_listing
from mtpctl.cluster.rendezvous import address_of, host_store, join_store
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.errors import SaveFailed
from mtpctl.kernels.policy import TokenLoss
from mtpctl.model import experts
from mtpctl.model.experts import Experts
from mtpctl.model.parallel import Rank
from mtpctl.routes import RouteShape
from mtpctl.trainer import data_parallel
from mtpctl.trainer.batch import MicroBatch, Sequence
from mtpctl.trainer.engine import MegatronEngine
from mtpctl.trainer.objective import DraftsOnly, NextToken, PolicyObjective, Sums
from mtpctl.trainer.share import partition
from tests.fakes.forked import run_ranks
from tests.fakes.full_disk import full_disk
from tests.fakes.tiny import GENTLE, drawn_routes, engine, gradients, mimo, sequences
from tests.fakes.trainer_cases import MODELS, Case

CASE_S = 300
"""Deadline of a case."""

SMOOTH = GENTLE.model_copy(update={"lr": 1e-3, "eps": 1e-2})
"""An Adam whose steps do not depend on the sign of tiny gradients."""

CLIPPED = SMOOTH.model_copy(update={"clip_grad": 0.3, "mtp_lr": 5e-3, "weight_decay": 0.1})


def failed_save(trainer: MegatronEngine, rank: Rank, path: Path, *, of: int) -> None:
    """A save that fails on one rank fails on all ranks, which can save again."""
    try:
        with full_disk() if rank.rank == of else nullcontext():
            trainer.save(path, {"step": 1})
    except SaveFailed:
        assert not path.exists()
    else:
        raise AssertionError("a save on a full disk that did not fail")


def found_by(case: Case, rank: Rank, root: Path) -> dict[str, Any]:
    """After a first update, or a restore of another layout's checkpoint: scores, and a second update's metrics,
    gradients and weights. `before`: log-probs before both, with `numerics: bitwise`. `seconds`: until the engine
    stood, and from then on."""
    began = time.perf_counter()
    folder = mimo(root / case.model / f"{rank.rank}-{case.name}", **MODELS[case.model])
    if case.crowded:
        experts.IMBALANCE_LIMIT = 1.5  # twice its share is the most that comes to one of two ranks
    with engine(folder, rank=rank, parallel=case.parallel, **case.fields) as trainer:
        stood = time.perf_counter()
        batch = (
            [*sequences(2, seed=3, vocab=61, low=14, high=16), Sequence([3, 5, 7, 9], 3, [1])]
            if case.few
            else sequences(7, seed=3, vocab=61)
        )
        if case.uneven:
            batch = uneven()
        if case.replay:
            batch = followed(batch, folder, crowded=case.crowded)
        trainer.set_trunk_frozen(case.drafts_only)
        trainer.set_optimizer(CLIPPED if case.clipped else SMOOTH)
        before = [score.logprobs for score in trainer.score(batch)] if case.fields.get("numerics") == "bitwise" else None
        supervised = DraftsOnly() if case.drafts_only else NextToken()
        if case.restore:
            assert trainer.restore(root / case.restore) == {"step": 1}
        else:
            trainer.update(batch, supervised)
        if case.saved:
            failed_save(trainer, rank, root / case.name, of=dist.get_world_size() - 1 if case.parallel.dp == 1 else 0)
            trainer.save(root / case.name, {"step": 1})
            check_checkpoint(root / case.name, verify_checksums=True)
            listing = read_listing(root / case.name)
            assert listing is not None and set(listing.files) == {file.name for file in files_in(root / case.name)}, "of every rank's files"
        scored = trainer.score(batch, record_routes=case.replay)
        for sequence, found_scores in zip(batch, scored, strict=True):
            if sequence.routes is not None:
                assert found_scores.routes is not None
                assert np.array_equal(found_scores.routes[: len(sequence.routes)], sequence.routes)
        scores = [(s.logprobs, s.entropy) for s in scored]
        check_own_scores(trainer, batch, scores, case)
        if case.poisoned:
            poisoned_update(trainer, batch)
        # The first update was shared out by the ranks; for this one each is given its own sequences.
        message = batch if case.policy is None else with_columns(batch, scores)
        objective = supervised if case.policy is None else PolicyObjective(case.policy, max_tokens=20)
        members, passes = own_part(batch, case)
        with counted_parts() as parts:
            metrics = trainer.update([message[i] for i in members], objective, microbatches=passes)
        crowd = case.crowded and case.parallel.ep > 1 and parallel_state.get_expert_model_parallel_rank() == 0
        assert bool(parts) == crowd or not case.crowded, f"{len(parts)} passes in parts"
        weights = {name: value.clone() for name, value in trainer.export()}
        if case.fields.get("lora"):
            weights |= {name: value.clone() for name, value in trainer.export_adapter()}
        result = {"metrics": metrics, "before": before, "scores": scores, "weights": weights, "gradients": gradients(trainer)}
        return result | {"seconds": {"start": stood - began, "work": time.perf_counter() - stood}}


def uneven() -> list[Sequence]:
    """Sequences of 5, 33 and 7 tokens, which do not divide over 2 cp ranks; the last one trains only its last token."""
    draw = random.Random(11)
    lengths = ((3, 2), (5, 28), (6, 1))
    return [Sequence([draw.randrange(61) for _ in range(prompt + tokens)], prompt, [1] * tokens) for prompt, tokens in lengths]


def followed(batch: list[Sequence], folder: HfFolder, *, crowded: bool) -> list[Sequence]:
    """The batch with routes: none for the second sequence, and only for the first tokens of the fourth."""
    shape = RouteShape.of(folder.shape)
    assert shape is not None
    if crowded:
        shape = replace(shape, experts=shape.experts // 2)
    result = [replace(s, routes=drawn_routes(shape, len(s.token_ids) - 1, number)) for number, s in enumerate(batch)]
    result[1] = batch[1]
    routes = result[3].routes
    assert routes is not None
    result[3] = replace(result[3], routes=routes[:2])
    return result


@contextmanager
def counted_parts() -> Iterator[list[int]]:
    """Record the rows of each pass that a rank splits because its experts received too many."""
    rows: list[int] = []
    whole = Experts.run_in_chunks

    def run_in_chunks(self: Experts, all_rows: Tensor, ends: Tensor, shares: Tensor, most: int) -> Tensor:
        rows.append(len(all_rows))
        return whole(self, all_rows, ends, shares, most)

    Experts.run_in_chunks = run_in_chunks  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        Experts.run_in_chunks = whole  # type: ignore[method-assign]


def poisoned_update(trainer: MegatronEngine, batch: list[Sequence]) -> None:
    """An update that all ranks must skip because of a NaN on the last one."""
    weight = next(value for name, value in trainer.module.named_parameters() if name.endswith("linear_fc2.weight"))
    retained = weight.detach().clone()
    if dist.get_rank() == dist.get_world_size() - 1:
        weight.data[0, 0] = torch.nan
    assert trainer.update(batch, NextToken())["skipped"] == 1.0
    weight.data.copy_(retained)
    assert trainer.update(batch, InfiniteOnLastRank())["skipped"] == 1.0


class InfiniteOnLastRank(NextToken):
    """A loss that is infinite on the last rank, with finite gradients."""

    def token_loss(self, micro: MicroBatch) -> TokenLoss:
        loss = super().token_loss(micro)

        def infinite(logprob: Tensor, entropy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Sums]:
            value, sums = loss(logprob, entropy, tokens)
            return value + (math.inf if dist.get_rank() == dist.get_world_size() - 1 else 0.0), sums

        return infinite


def own_part(batch: list[Sequence], case: Case) -> tuple[list[int], list[list[int]]]:
    """The sequences of this dp rank, and their microbatches."""
    rank = case.parallel.dp_rank(dist.get_rank())
    assert rank == parallel_state.get_data_parallel_rank()
    micros = partition([len(s.token_ids) for s in batch], case.fields["tokens_per_microbatch"], case.parallel.dp)[rank]
    members = sorted(i for micro in micros for i in micro)
    return members, [[members.index(i) for i in micro] for micro in micros]


def check_own_scores(trainer: MegatronEngine, batch: list[Sequence], scores: list[Any], case: Case) -> None:
    """Scores of a rank's own sequences match those of the whole batch."""
    members = own_part(batch, case)[0]
    own = trainer.score([batch[i] for i in members], record_routes=case.replay, local=True)
    assert len(own) == len(members)
    for i, each in zip(members, own, strict=True):
        assert np.allclose(each.logprobs, scores[i][0], atol=1e-5) and np.allclose(each.entropy, scores[i][1], atol=1e-5)
        assert (each.routes is not None) == case.replay


def with_columns(batch: list[Sequence], scores: list[Any]) -> list[Sequence]:
    """The batch with old, behaviour and reference log-probs close to the policy's, on both sides of every clip."""
    draw = random.Random(7)

    def perturbed(logprobs: list[float]) -> list[float]:
        return [value + draw.gauss(0, 0.3) for value in logprobs]

    def columns(logprobs: list[float]) -> dict[str, list[float]]:
        made_up = {name: perturbed(logprobs) for name in ("old", "behaviour", "reference")}
        return made_up | {"advantage": [draw.choice((-1.2, 0.7))] * len(logprobs)}

    return [replace(sequence, columns=columns(logprobs)) for sequence, (logprobs, _) in zip(batch, scores, strict=True)]


def run(cases: list[Case], root: Path) -> dict[str, Any]:
    """The results of rank 0 by case. All ranks must have equal metrics and scores.

    Cases of equally many ranks run in the same processes: what the first one imports and compiles serves all. If one fails, all of
    these have its error as their result.
    """
    results: dict[str, Any] = {}

    def turn(case: Case) -> tuple[int, int]:
        """After the cases that it starts from, and next to those of equally many ranks."""
        origin = next((other for other in cases if other.name == case.restore), None)
        return 0 if origin is None else 1 + turn(origin)[0], case.parallel.world_size

    for (_, world), batch in groupby(sorted(cases, key=turn), turn):
        members = list(batch)
        answers, error = run_ranks(world, partial(run_rank, members, root), CASE_S * len(members))
        for number, case in enumerate(members):
            results[case.name] = error or agreed([results_by_case[number] for results_by_case in answers])
    return results


def run_rank(cases: list[Case], root: Path, rank: Rank) -> list[dict[str, Any]]:
    """The results of one rank, in plain tensors: those in the pipe's shared memory would end with this process."""
    torch.set_num_threads(1)
    # One bucket per layer, and rows of embeddings, although the models are small.
    data_parallel.MIN_BUCKET_NUMEL, data_parallel.SPARSE_SHARE = 1, 100.0
    store = join_store(rank.master, rank.deadline_s) if rank.world_size > 1 else None
    results = []
    for case in cases:
        # A process group leaves its keys in its store, so that each case needs another one.
        meeting = host_store("127.0.0.1") if rank.rank == 0 else None
        if store is not None and meeting is not None:
            store.set(case.name, address_of(meeting))
        here = rank if store is None else replace(rank, master=store.get(case.name).decode(), deadline_s=CASE_S)
        try:
            results_by_case = found_by(case, here, root)
        except Exception as error:
            error.add_note(f"in case {case.name}")
            raise
        results.append(
            results_by_case
            | {part: {name: value.tolist() for name, value in results_by_case[part].items()} for part in ("weights", "gradients")}
        )
    return results


def agreed(answers: list[dict[str, Any]]) -> Any:
    """The first rank's result, or how another one differs."""
    first = answers[0]
    for other in answers[1:]:
        for name in ("sft/loss", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "skipped", "mtp/loss_1", "mtp/grad_norm"):
            if other["metrics"].get(name) != first["metrics"].get(name):
                return f"ranks differ in {name}: {other['metrics'].get(name)} and {first['metrics'].get(name)}"
        if other["scores"] != first["scores"]:
            return "ranks differ in their scores"
    return first
