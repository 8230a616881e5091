"""What a log-prob server asks of the engine: one pass over sequences that each want something else.

Per-token log-probs and entropy as `MegatronEngine.score` gives them, and on demand the k likeliest tokens and what every MTP
depth would have drafted. Temperature, top k and MTP are chosen sequence by sequence, so that requests of any kind share a
packed micro-batch. Sizes: R response tokens of a micro-batch, D MTP depths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mtpctl.kernels.logprob import LogProbOut
from mtpctl.model.gpt import Hidden
from mtpctl.trainer.batch import MicroBatch, Sequence
from mtpctl.trainer.engine import MegatronEngine

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Want:
    """What one sequence is scored for. topk: how many of the likeliest tokens; mtp: whether the MTP depths answer as well."""

    temperature: float = 1.0
    topk: int = 0
    mtp: bool = False


@dataclass(slots=True)
class DraftScores:
    """One MTP depth over the response: log-prob of each token, and whether the depth would have drafted it greedily.

    None where no drafter can be asked: the first tokens of each turn, up to the depth, and those outside the mask.
    """

    logprobs: list[float | None]
    hits: list[bool | None]


@dataclass(slots=True)
class TokenScores:
    """Of one sequence, over its response tokens; 0 where the mask is 0. topk_*: [tokens, k], likeliest first."""

    logprobs: list[float]
    entropy: list[float]
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    drafts: list[DraftScores] = field(default_factory=list)


@torch.no_grad()
def score_tokens(engine: MegatronEngine, sequences: list[Sequence], wants: list[Want]) -> list[TokenScores]:
    """Score `sequences[i]` for `wants[i]`, in that order. All ranks call together; every rank gets all answers."""
    if not sequences:
        return []
    engine.model.eval()
    found: dict[int, TokenScores] = {}
    depths = engine.depths if any(want.mtp for want in wants) else 0

    def collect(micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = [wants[i] for i in micro.order]
        scores, total = _score(engine, micro, hidden, chosen)
        found.update(zip(micro.order, scores, strict=True))
        return total, {}

    engine._run(engine._micro_batches(sequences, depths), collect, forward_only=True)
    if parallel_state.get_data_parallel_world_size() > 1 or parallel_state.get_pipeline_model_parallel_world_size() > 1:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        found = {i: scores for part in parts for i, scores in part.items()}
    return [found[i] for i in range(len(sequences))]


def _score(engine: MegatronEngine, micro: MicroBatch, hidden: Hidden, wants: list[Want]) -> tuple[list[TokenScores], Tensor]:
    temperature = torch.tensor([want.temperature for want in wants], device=micro.labels.device)[micro.seq_ids]
    # A token outside the mask keeps its place, but is not projected on the vocabulary.
    labels = micro.labels.masked_fill(micro.mask == 0, _IGNORED)
    k = max(want.topk for want in wants)
    out = engine.head.logprob(micro.packing, hidden.trunk, hidden.head, micro.rows, labels, temperature, entropy=True, topk=k)
    assert out.entropy is not None
    logprobs, entropies = (_by_sequence(x, micro) for x in (out.logprob, out.entropy))
    scores = [TokenScores(logprob, entropy) for logprob, entropy in zip(logprobs, entropies, strict=True)]
    if out.topk is not None:
        for score, want, ids, values in zip(
            scores, wants, _by_sequence(out.topk.ids, micro), _by_sequence(out.topk.logprob, micro), strict=True
        ):
            if want.topk:
                score.topk_ids = [row[: want.topk] for row in ids]
                score.topk_logprobs = [row[: want.topk] for row in values]
    _draft(engine, micro, hidden, wants, temperature, scores)
    return scores, out.logprob.sum()


def _draft(
    engine: MegatronEngine, micro: MicroBatch, hidden: Hidden, wants: list[Want], temperature: Tensor, scores: list[TokenScores]
) -> None:
    asked = torch.tensor([want.mtp for want in wants], device=micro.seq_ids.device)[micro.seq_ids]
    for state, draft in zip(hidden.mtp, micro.drafts, strict=True):
        labels = draft.labels.masked_fill(~asked[draft.tokens], _IGNORED)
        out = engine.head.logprob(micro.packing, state, hidden.head, draft.rows, labels, temperature[draft.tokens], hit=True)
        logprobs, hits = _placed(out, draft.tokens, micro)
        for score, want, logprob, hit in zip(scores, wants, logprobs, hits, strict=True):
            if want.mtp:
                score.drafts.append(DraftScores(logprob, hit))


def _placed(out: LogProbOut, tokens: Tensor, micro: MicroBatch) -> tuple[list[list[float | None]], list[list[bool | None]]]:
    """The answers for `tokens` at their places among the R response tokens, None at the others."""
    assert out.hit is not None
    there = torch.zeros(len(micro.labels), dtype=torch.bool, device=tokens.device)
    there[tokens] = True
    logprob = torch.zeros(len(micro.labels), device=tokens.device)
    logprob[tokens] = out.logprob.float()
    hit = torch.zeros_like(there)
    hit[tokens] = out.hit.bool()
    there_lists, logprobs, hits = (_by_sequence(x, micro) for x in (there, logprob, hit))
    return (
        [[v if t else None for v, t in zip(row, mask, strict=True)] for row, mask in zip(logprobs, there_lists, strict=True)],
        [[v if t else None for v, t in zip(row, mask, strict=True)] for row, mask in zip(hits, there_lists, strict=True)],
    )


def _by_sequence(values: Tensor, micro: MicroBatch) -> list[Any]:
    """`values` [R, …] as nested lists, one a sequence."""
    return [part.tolist() for part in values.cpu().split(micro.lengths)]
