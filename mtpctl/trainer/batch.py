"""Sequences, and the packed microbatches of a forward pass.

Shape legend: T tokens of a microbatch, R response tokens among them, D MTP depths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.model.packing import Packing, num_blocks
from mtpctl.model.parallel import sum_over_ranks
from mtpctl.plan.flops import TrunkTraining, peak_flops, step_flops
from mtpctl.routes import Routes, RouteShape

_ALIGNMENT = 16
"""Alignment, in bytes, of the arrays that `copy_packed` packs; more than any kernel requires."""


@dataclass
class Sequence:
    """A prompt with its response. Array arguments may be anything that numpy can convert.

    loss_mask and the columns have one row per response token. A mask of 0 marks tokens that the policy did not sample (tool output); they
    are excluded from all losses. routes: the experts to replay for each of the first `len(routes)` tokens (see `mtpctl.routes`). name:
    used in error messages.
    """

    token_ids: npt.NDArray[np.int32]
    prompt_length: int
    loss_mask: npt.NDArray[np.bool_]
    columns: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    routes: Routes | None = None
    name: str = ""

    if TYPE_CHECKING:

        def __init__(
            self,
            token_ids: npt.ArrayLike,
            prompt_length: int,
            loss_mask: npt.ArrayLike,
            columns: Mapping[str, npt.ArrayLike] = ...,
            routes: Routes | None = None,
            name: str = "",
        ) -> None: ...

    def __post_init__(self) -> None:
        self.token_ids, self.loss_mask = np.asarray(self.token_ids, np.int32), np.asarray(self.loss_mask, np.bool_)
        self.columns = {name: np.asarray(values, np.float32) for name, values in self.columns.items()}
        response = len(self.token_ids) - self.prompt_length
        if self.prompt_length < 1 or response < 1:
            raise UserError(f"a sequence needs a prompt and a response; it has {self.prompt_length} and {response} tokens")
        lengths = {"loss_mask": len(self.loss_mask)} | {name: len(values) for name, values in self.columns.items()}
        for name, length in lengths.items():
            if length != response:
                raise UserError(f"{name} has {length} entries for {response} response tokens")

    @property
    def num_trained(self) -> int:
        """Number of response tokens in the loss."""
        return int(np.count_nonzero(self.loss_mask))

    def num_drafted(self, depth: int) -> int:
        """Number of response tokens that MTP depth `depth` drafts: all except the first `depth` of each turn. Depth 0 counts all.

        A turn is a run of sampled tokens. The target samples its first token after prefill. Depth 1 drafts from the second token on, and
        depth k starts k - 1 tokens later.
        """
        return sum(max(0, len(turn) - depth) for turn in self.loss_mask.tobytes().split(b"\0"))


@dataclass
class DraftRows:
    """Rows of one MTP depth: hidden states at `rows` predict `labels`.

    response_indices: indices of the labels among the R response tokens.
    """

    rows: Tensor
    labels: Tensor
    response_indices: Tensor


@dataclass
class MicroBatch:
    """The input of one packed forward pass.

    input_ids [T]. rows, labels [R]: the hidden state at `rows[r]` predicts `labels[r]`. mask [R]: the loss mask. seq_ids [R]: the sequence
    of each response token within this microbatch. columns: name → [R, …]. order: indices of the sequences in the list that was packed.
    response_lengths: number of response tokens of each. drafts: one `DraftRows` per depth. dummy: set for the microbatch that a rank
    computes when it has no sequences; it has no loss, and its scores are not used.
    """

    input_ids: Tensor
    packing: Packing
    rows: Tensor
    labels: Tensor
    mask: Tensor
    seq_ids: Tensor
    columns: dict[str, Tensor]
    order: list[int]
    response_lengths: list[int]
    drafts: list[DraftRows]
    dummy: bool = False


def check_sequences(sequences: list[Sequence], shape: ModelShape) -> None:
    """Raise UserError for token ids, experts or lengths out of the model's range. On a GPU they would end the process without a message."""
    route_shape = RouteShape.of(shape)
    for i, sequence in enumerate(sequences):
        if sequence.routes is not None:
            problem = (
                route_shape.fault(sequence.routes, len(sequence.token_ids)) if route_shape else f"{shape.family} has no experts to route to"
            )
            if problem:
                raise UserError(f"sample {sequence.name or i}: {problem}")
        if len(sequence.token_ids) > shape.max_positions:
            raise UserError(
                f"sequence {i} has {len(sequence.token_ids)} tokens, but the model's max_position_embeddings is {shape.max_positions}; "
                "lower rollout.max_tokens or rollout.context, or raise model.context"
            )
        if not 0 <= sequence.token_ids.min() <= sequence.token_ids.max() < shape.vocab:
            unknown = next(t for t in sequence.token_ids if not 0 <= t < shape.vocab)
            raise UserError(
                f"sequence {i} has token id {unknown}, but the vocabulary has {shape.vocab}; check that model.tokenizer is the model's"
            )


def pack(
    sequences: list[Sequence], order: list[int], depths: int, device: torch.device | str, *, cp_rank: int = 0, cp: int = 1, tp: int = 1
) -> MicroBatch:
    """Pack `sequences[i] for i in order` into a microbatch whose tokens divide evenly over the blocks of `cp` ranks and over `tp`.

    If needed, appends a padding sample of token 0, which is excluded from the other samples' attention and from losses.
    """
    packed = [sequences[i] for i in order]
    lengths = [len(s.token_ids) for s in packed]
    response_lengths = [len(s.loss_mask) for s in packed]
    # A response token is predicted by the row of the preceding token, so the last row is that of the second-to-last token.
    ends = np.cumsum(lengths)
    starts = np.cumsum(response_lengths) - response_lengths
    rows = np.arange(sum(response_lengths)) + np.repeat(ends - response_lengths - 1 - starts, response_lengths)
    pieces = [s.token_ids for s in packed]
    if padding := -sum(lengths) % (num_blocks(cp) * tp):
        pieces.append(np.zeros(padding, np.int32))
        lengths.append(padding)
    token_ids = np.concatenate(pieces, dtype=np.int64)
    labels = token_ids[rows + 1]
    mask = np.concatenate([s.loss_mask for s in packed])
    # Index of each token within its turn; -1 if the policy did not sample the token.
    positions = np.arange(len(rows))
    turn_starts = np.where(mask, 0, positions + 1)
    turn_starts[starts] = np.maximum(turn_starts[starts], starts)
    turn_positions = positions - np.maximum.accumulate(turn_starts)
    arrays = [token_ids, rows, labels, mask.astype(np.float32), np.repeat(np.arange(len(packed)), response_lengths)]
    names = packed[0].columns.keys()
    arrays += [np.concatenate([s.columns[name] for s in packed]) for name in names]
    for depth in range(1, depths + 1):
        response_indices = np.flatnonzero(turn_positions >= depth)
        arrays += [rows[response_indices] - depth, labels[response_indices], response_indices]
    tensors = iter(to_device(arrays, device))
    packing = replace(Packing.of(lengths, device, cp_rank=cp_rank, cp=cp), padding_tokens=padding)
    return MicroBatch(
        input_ids=next(tensors),
        packing=_with_routes(packing, packed),
        rows=next(tensors),
        labels=next(tensors),
        mask=next(tensors),
        seq_ids=next(tensors),
        columns={name: next(tensors) for name in names},
        order=order,
        response_lengths=response_lengths,
        drafts=[DraftRows(next(tensors), next(tensors), next(tensors)) for _ in range(depths)],
    )


def _with_routes(packing: Packing, sequences: list[Sequence]) -> Packing:
    first_routes = next((s.routes for s in sequences if s.routes is not None), None)
    if first_routes is None:
        return packing
    # torch cannot index with uint16.
    routes = np.zeros((sum(packing.sample_lengths), *first_routes.shape[1:]), np.uint8 if first_routes.dtype == np.uint8 else np.int16)
    routed = np.zeros(len(routes), np.bool_)
    start = 0
    for sequence in sequences:
        if sequence.routes is not None:
            end = start + len(sequence.routes)
            routes[start:end], routed[start:end] = sequence.routes, True
        start += len(sequence.token_ids)
    device, rank_tokens = packing.tokens.device, packing.tokens.cpu().numpy()
    rank_arrays = (routes, routed) if packing.ranks == 1 else (routes[rank_tokens], routed[rank_tokens])
    local_routes, local_routed = to_device(rank_arrays, device)
    return replace(packing, routes=local_routes, routed=local_routed)


def dummy_batch(sequences: list[Sequence], depths: int, device: torch.device | str, **layout: int) -> MicroBatch:
    """Pack the shortest sequence with an empty loss mask. layout: keyword arguments of `pack`."""
    shortest = min(sequences, key=lambda s: len(s.token_ids))
    masked = replace(shortest, loss_mask=np.zeros_like(shortest.loss_mask))
    micro = pack([masked], [0], depths, device, **layout)
    return replace(micro, packing=replace(micro.packing, padding_tokens=len(micro.input_ids)), dummy=True)


def to_device(arrays: Collection[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Copy the arrays to the device as tensors. On a CPU the tensors share the arrays' memory."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return copy_packed(arrays, device)


def copy_packed(arrays: Collection[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Copy the arrays to the device in one transfer, as tensors that share one storage.

    Launching a copy takes longer than transferring the bytes of a microbatch.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Pinned, so that the host does not wait for the copy.
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    host = buffer.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = buffer.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over all sequences of an update; losses are divided by them.

    trained_tokens: response tokens in the loss. drafted_tokens: the number of these that each MTP depth drafts.
    """

    sequences: int
    tokens: int
    trained_tokens: int
    drafted_tokens: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Collection[Sequence], depths: int) -> Totals:
        drafted_tokens = tuple(sum(s.num_drafted(depth) for s in sequences) for depth in range(1, depths + 1))
        return cls(len(sequences), sum(len(s.token_ids) for s in sequences), sum(s.num_trained for s in sequences), drafted_tokens)

    def sum_over_ranks(self) -> Totals:
        """Sum the counts over data-parallel ranks, each of which has different sequences. Collective."""
        sequences, tokens, trained_tokens, *drafted_tokens = map(
            int, sum_over_ranks([self.sequences, self.tokens, self.trained_tokens, *self.drafted_tokens])
        )
        return Totals(sequences, tokens, trained_tokens, tuple(drafted_tokens))


def utilization(
    shape: ModelShape,
    sequences: list[Sequence],
    depths: int,
    *,
    isolated: bool,
    trunk: TrunkTraining,
    seconds: float,
    gpu: str,
    gpus: int,
) -> float | None:
    """Model FLOPs utilization (arXiv:2204.02311, appendix B) of an update in bf16; recomputation does not count.

    depths: MTP depths that are trained. isolated: whether the trunk and the head get no gradient from the MTP loss (`mtp.mode: isolated`).
    trunk: see `step_flops`. Returns None for a device whose peak is unknown.
    """
    peak = peak_flops(gpu)
    if peak is None:
        return None
    return update_flops(shape, sequences, depths, isolated=isolated, trunk=trunk) / (seconds * gpus * peak)


def update_flops(shape: ModelShape, sequences: list[Sequence], depths: int, *, isolated: bool, trunk: TrunkTraining = "all") -> int:
    """FLOPs of a forward and backward pass over these sequences, with `depths` MTP depths trained. isolated, trunk: see `step_flops`."""
    trunk_rows, *draft_rows = (sum(s.num_drafted(depth) for s in sequences) for depth in range(depths + 1))
    return step_flops(shape, [len(s.token_ids) for s in sequences], trunk_rows, draft_rows, isolated=isolated, trunk=trunk)
