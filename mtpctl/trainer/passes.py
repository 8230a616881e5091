"""Forward and backward passes over packed microbatches, through megatron-core's pipeline schedule, and scoring in a forward pass.

A score has the log-prob and entropy of each response token, the k most likely tokens, the drafts of the MTP depths, and expert routes.
Options are per sequence, so that requests with different options can share a packed microbatch.

Shape legend: R response tokens of a microbatch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from mtpctl.families.shape import ModelShape
from mtpctl.kernels.inputs import IGNORE_INDEX
from mtpctl.kernels.logprob import LogProbOut
from mtpctl.model.gpt import Hidden, MtpModel
from mtpctl.model.parallel import max_over_ranks, reduce_sums
from mtpctl.model.router import DecoderLayer, gather_recorded
from mtpctl.routes import Routes, RouteShape
from mtpctl.samples import Logprobs
from mtpctl.trainer.batch import MicroBatch, Sequence, check_sequences, dummy_batch, pack
from mtpctl.trainer.config import DraftScores, EngineConfig, ScoreOptions, TokenScores
from mtpctl.trainer.head import Head
from mtpctl.trainer.objective import Sums
from mtpctl.trainer.share import partition

MicroBatchLoss = Callable[[MicroBatch, Hidden], tuple[Tensor, Sums]]
"""The loss of a microbatch (scalar, differentiable in a training pass) and its metric sums, on the last pipeline stage."""

Microbatches = list[list[int]]
"""The microbatches of a dp rank, as indices into its sequences."""


def assign_microbatches(sequences: list[Sequence], config: EngineConfig) -> Microbatches:
    """Divide this dp rank's sequences into microbatches. Collective; with expert parallelism every rank gets the same number."""
    microbatches = partition([len(s.token_ids) for s in sequences], config.tokens_per_microbatch, 1)[0] if sequences else []
    if config.parallel.ep > 1:
        microbatches += [[] for _ in range(max_over_ranks(len(microbatches)) - len(microbatches))]
    return microbatches


def pack_microbatches(
    sequences: list[Sequence],
    depths: int,
    config: EngineConfig,
    shape: ModelShape,
    device: torch.device,
    *,
    sequence_parallel: bool,
    microbatches: Microbatches | None = None,
) -> list[MicroBatch]:
    """Pack the microbatches of this dp rank, with the rows of the first `depths` MTP depths.

    microbatches: set if the sequences are only this rank's. None if all ranks have the same sequences, which are then distributed.
    Raises UserError for a sequence that the model cannot process.
    """
    check_sequences(sequences, shape)
    local_microbatches = microbatches
    if local_microbatches is None:
        dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        local_microbatches = partition([len(s.token_ids) for s in sequences], config.tokens_per_microbatch, dp)[dp_rank]
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    layout = {"cp_rank": cp_rank, "cp": cp, "tp": config.parallel.tp if sequence_parallel else 1}
    if config.parallel.ep == 1:
        # Dp ranks may have different numbers of microbatches, because their collectives follow the last pass. With expert parallelism every
        # pass has collectives, so the numbers must be equal.
        local_microbatches = [members for members in local_microbatches if members] or [[]]
    dummy_sources = sequences or [Sequence(np.zeros(2), 1, np.zeros(1))]
    return [
        pack(sequences, members, depths, device, **layout) if members else dummy_batch(dummy_sources, depths, device, **layout)
        for members in local_microbatches
    ]


def run_passes(
    model: MtpModel | DistributedDataParallel, micros: list[MicroBatch], loss: MicroBatchLoss, *, tokens: int, forward_only: bool
) -> Sums:
    """Run forward passes over microbatches of at most `tokens` tokens, and backward passes unless `forward_only`.

    Returns the metric sums of `loss` over all microbatches and dp ranks.
    """

    def micro_loss(micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Tensor, Sums]:
        no_tokens = torch.zeros((), dtype=torch.int)
        if micro.dummy and forward_only:
            return hidden.trunk.sum(), no_tokens, {}
        with record_function("mtpctl/log-probs and losses"):
            total, sums = loss(micro, hidden)
        return total, no_tokens, sums

    def forward(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Hidden | Tensor, Callable[[Hidden], object]]:
        micro = next(iterator)
        with record_function("mtpctl/forward"):
            return model(micro.input_ids, micro.packing, depths=len(micro.drafts)), partial(micro_loss, micro)

    pass_sums = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(micros),
        model=model,
        num_microbatches=len(micros),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    sums: Sums = {}
    for micro_sums in pass_sums:
        for name, value in micro_sums.items():
            sums[name] = sums[name] + value if name in sums else value
    return reduce_sums(sums)


class Scorer:
    """Scores microbatches and stores the scores by sequence. Called as the `MicroBatchLoss` of a forward-only pass.

    options: one per sequence; tokens outside the mask then get zeros. None: every response token is scored at `temperature`.
    """

    def __init__(self, head: Head, temperature: float, options: list[ScoreOptions] | None) -> None:
        self.head, self.temperature, self.options = head, temperature, options
        self.scores: dict[int, TokenScores] = {}

    def __call__(self, micro: MicroBatch, hidden: Hidden) -> tuple[Tensor, Sums]:
        temperature: float | Tensor = self.temperature
        labels, topk, options = micro.labels, 0, None
        if self.options is not None:
            options = [self.options[i] for i in micro.order]
            temperature = torch.tensor([option.temperature for option in options], device=labels.device)[micro.seq_ids]
            # Tokens outside the mask keep their rows, but their logits are not computed.
            labels = labels.masked_fill(micro.mask == 0, IGNORE_INDEX)
            topk = max(option.topk for option in options)
        out = self.head.logprob(micro.packing, hidden.trunk, hidden.head, micro.rows, labels, temperature, entropy=True, topk=topk)
        assert out.entropy is not None
        logprobs, entropies = (_split_arrays(values, micro) for values in (out.logprob, out.entropy))
        scores = [TokenScores(logprob, entropy) for logprob, entropy in zip(logprobs, entropies, strict=True)]
        if options is not None:
            _add_topk(scores, options, out, micro)
            self._add_drafts(scores, options, micro, hidden, temperature)
        self.scores.update(zip(micro.order, scores, strict=True))
        return out.logprob.sum(), {}

    def _add_drafts(
        self, scores: list[TokenScores], options: list[ScoreOptions], micro: MicroBatch, hidden: Hidden, temperature: float | Tensor
    ) -> None:
        requested = torch.tensor([option.mtp for option in options], device=micro.seq_ids.device)[micro.seq_ids]
        for state, draft in zip(hidden.mtp, micro.drafts, strict=True):
            labels = draft.labels.masked_fill(~requested[draft.response_indices], IGNORE_INDEX)
            draft_temperature = temperature[draft.response_indices] if isinstance(temperature, Tensor) else temperature
            out = self.head.logprob(micro.packing, state, hidden.head, draft.rows, labels, draft_temperature, hit=True)
            for score, option, draft_scores in zip(scores, options, _draft_scores(out, draft.response_indices, micro), strict=True):
                if option.mtp:
                    score.drafts.append(draft_scores)

    def gather(self, count: int, *, local: bool) -> list[TokenScores]:
        """The scores of all `count` sequences, from all ranks or, with `local`, from this dp rank. Collective."""
        scores = _gather_values(self.scores, local=local)
        return [scores[i] for i in range(count)]


def _gather_values[K, V](values: dict[K, V], *, local: bool) -> dict[K, V]:
    """Merge the values of all ranks or, with `local`, of this dp rank's pipeline stages. Collective."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1 and (local or parallel_state.get_data_parallel_world_size() == 1):
        return values
    group = parallel_state.get_pipeline_model_parallel_group() if local else None
    rank_values: list[dict[K, V]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(rank_values, values, group=group)
    return {key: value for rank_part in rank_values for key, value in rank_part.items()}


def _add_topk(scores: list[TokenScores], options: list[ScoreOptions], out: LogProbOut, micro: MicroBatch) -> None:
    if out.topk is None:
        return
    all_ids, all_logprobs = (_split_lists(values, micro) for values in (out.topk.ids, out.topk.logprob))
    for score, option, ids, logprobs in zip(scores, options, all_ids, all_logprobs, strict=True):
        if option.topk:
            score.topk_ids = [row[: option.topk] for row in ids]
            score.topk_logprobs = [row[: option.topk] for row in logprobs]


def _draft_scores(out: LogProbOut, tokens: Tensor, micro: MicroBatch) -> list[DraftScores]:
    """Scores by sequence: values for `tokens` (indices among the R response tokens), None for other tokens."""
    assert out.hit is not None
    drafted = torch.zeros(len(micro.labels), dtype=torch.bool, device=tokens.device)
    drafted[tokens] = True
    logprob = torch.zeros(len(micro.labels), device=tokens.device)
    logprob[tokens] = out.logprob.float()
    hit = torch.zeros_like(drafted)
    hit[tokens] = out.hit.bool()

    def drafted_only(values: list, mask: list[bool]) -> list:
        return [value if is_drafted else None for is_drafted, value in zip(mask, values, strict=True)]

    by_sequence = zip(*(_split_lists(values, micro) for values in (drafted, logprob, hit)), strict=True)
    return [DraftScores(drafted_only(logprobs, mask), drafted_only(hits, mask)) for mask, logprobs, hits in by_sequence]


def _split_arrays(values: Tensor, micro: MicroBatch) -> list[Logprobs]:
    """Split `values` [R] into an array per sequence."""
    return [array("f", piece.numpy().tobytes()) for piece in values.detach().float().cpu().split(micro.response_lengths)]


def _split_lists(values: Tensor, micro: MicroBatch) -> list[list]:
    """Split `values` [R, …] into a nested list per sequence."""
    return [piece.tolist() for piece in values.cpu().split(micro.response_lengths)]


def with_recording(micros: list[MicroBatch]) -> list[MicroBatch]:
    """Copies of the microbatches that record routes in the next pass."""
    return [replace(micro, packing=replace(micro.packing, recorded={})) for micro in micros]


@torch.no_grad()
def recorded_routes(model: MtpModel, micros: list[MicroBatch], shape: RouteShape, count: int, *, local: bool) -> list[Routes]:
    """The routes of all `count` sequences after a pass over microbatches from `with_recording`. Collective.

    local: the sequences are only this dp rank's.
    """
    local_routes: dict[tuple[int, int], Routes] = {}
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer) and module.moe_index is not None]
    for micro in micros:
        for layer in layers:
            assert layer.moe_index is not None
            layer_routes = gather_recorded(micro.packing, layer).cpu().numpy().astype(shape.dtype)
            start = 0
            # Dummy microbatches reuse another sequence. Padding samples come last.
            for index, length in zip([] if micro.dummy else micro.order, micro.packing.sample_lengths, strict=False):
                # A copy, so that the rest of the packed sequence can be freed. The routes of the last token are not used.
                local_routes[index, layer.moe_index] = layer_routes[start : start + length - 1].copy()
                start += length
    # CP and TP ranks of one packed sequence have the same routes, so only one of them sends if all ranks are gathered.
    is_first_sharer = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    all_local = local or parallel_state.get_data_parallel_world_size() == parallel_state.get_pipeline_model_parallel_world_size() == 1
    routes = _gather_values(local_routes if is_first_sharer or all_local else {}, local=local)
    return [np.stack([routes[index, layer] for layer in range(len(shape.layers))], axis=1) for index in range(count)]
