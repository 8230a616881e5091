"""From samples to packed micro-batches: what a forward pass reads, and which of its rows predict a response token.

Sizes: T tokens of a micro-batch, R response tokens among them, D MTP depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.model.packing import Packing, blocks
from mtpctl.model.parallel import summed
from mtpctl.plan.flops import card_peak, step_flops
from mtpctl.routes import Routes, RouteShape


@dataclass
class Sequence:
    """One prompt with its response.

    token_ids are int32, loss_mask is bool, columns are float32; whatever numpy makes such arrays of may be given. loss_mask and every
    column run over the response: one entry a response token. A mask of 0 marks tokens that nobody sampled (tool output), which no loss
    sees. routes: the experts that its first tokens are sent to (`mtpctl.routes`). name: what errors call it.
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
        ) -> None:
            """What a dataclass takes, with anything in the place of an array that numpy makes one of."""

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
    def trained(self) -> int:
        """Response tokens that a loss sees."""
        return int(np.count_nonzero(self.loss_mask))

    def drafted(self, depth: int) -> int:
        """How many tokens of the response `depth` can be asked to draft: those behind the first `depth` of each turn.

        A turn is a run of sampled tokens. What stands before it is read in one go, from which the target samples the turn's first token;
        the first draft is of the second one, and drafts of a depth k begin k - 1 tokens further.
        """
        return sum(max(0, len(turn) - depth) for turn in self.loss_mask.tobytes().split(b"\0"))


@dataclass
class DraftRows:
    """Rows of one MTP depth: hidden states at `rows` predict `labels`, entries `tokens` of the R response tokens."""

    rows: Tensor
    labels: Tensor
    tokens: Tensor


@dataclass
class MicroBatch:
    """One packed forward pass.

    input_ids [T]; rows and labels [R]: hidden state at `rows[r]` predicts `labels[r]`; mask [R]; seq_ids [R], the
    sequence of each response token within this micro-batch; columns: name → [R]; order: the sequences' places in the
    list they came from; drafts: one `DraftRows` a depth, over tokens that a drafter can be asked for. idle: it stands in on a
    rank that has nothing to do while others work; no loss sees its tokens, and their scores are not used.
    """

    input_ids: Tensor
    packing: Packing
    rows: Tensor
    labels: Tensor
    mask: Tensor
    seq_ids: Tensor
    columns: dict[str, Tensor]
    order: list[int]
    lengths: list[int]
    drafts: list[DraftRows]
    idle: bool = False


def check(sequences: list[Sequence], shape: ModelShape) -> None:
    """Raise UserError for what the model cannot read: on a card a token id outside the vocabulary ends the process without a word, and so
    does the number of an expert that is not there."""
    experts = RouteShape.of(shape)
    for i, sequence in enumerate(sequences):
        if sequence.routes is not None:
            what = experts.fault(sequence.routes, len(sequence.token_ids)) if experts else f"{shape.family} has no experts to route to"
            if what:
                raise UserError(f"sample {sequence.name or i}: {what}")
        if len(sequence.token_ids) > shape.max_positions:
            raise UserError(
                f"sequence {i} has {len(sequence.token_ids)} tokens, the model's max_position_embeddings is {shape.max_positions}; "
                "lower rollout.max_tokens or rollout.context"
            )
        if not 0 <= sequence.token_ids.min() <= sequence.token_ids.max() < shape.vocab:
            strange = next(t for t in sequence.token_ids if not 0 <= t < shape.vocab)
            raise UserError(f"sequence {i} has token id {strange}, the vocabulary has {shape.vocab}; is model.tokenizer the model's own?")


def pack(
    sequences: list[Sequence], order: list[int], depths: int, device: torch.device | str, *, cp_rank: int = 0, cp: int = 1, tp: int = 1
) -> MicroBatch:
    """Lay `sequences[i] for i in order` out as one micro-batch, whose tokens divide over the blocks of `cp` ranks and a rank's over `tp`.

    Where they do not, a sample of token 0 follows the others; it stands apart, and no loss sees it.
    """
    chosen = [sequences[i] for i in order]
    lengths = [len(s.token_ids) for s in chosen]
    responses = [len(s.loss_mask) for s in chosen]
    # The rows of a response are those of the tokens before its own: they end one before the end of the sequence.
    ends = np.cumsum(lengths)
    opens = np.cumsum(responses) - responses
    rows = np.arange(sum(responses)) + np.repeat(ends - responses - 1 - opens, responses)
    ids = [s.token_ids for s in chosen]
    if spare := -sum(lengths) % (blocks(cp) * tp):
        ids.append(np.zeros(spare, np.int32))
        lengths.append(spare)
    row = np.concatenate(ids, dtype=np.int64)
    labels = row[rows + 1]
    mask = np.concatenate([s.loss_mask for s in chosen])
    # Where each token stands in its turn; -1 where nobody sampled it.
    index = np.arange(len(rows))
    begin = np.where(mask, 0, index + 1)
    begin[opens] = np.maximum(begin[opens], opens)
    placed = index - np.maximum.accumulate(begin)
    arrays = [row, rows, labels, mask.astype(np.float32), np.repeat(np.arange(len(chosen)), responses)]
    names = chosen[0].columns.keys()
    arrays += [np.concatenate([s.columns[name] for s in chosen]) for name in names]
    for depth in range(1, depths + 1):
        tokens = np.flatnonzero(placed >= depth)
        arrays += [rows[tokens] - depth, labels[tokens], tokens]
    there = iter(uploaded(arrays, device))
    packing = replace(Packing.of(lengths, device, cp_rank=cp_rank, cp=cp), spare=spare)
    return MicroBatch(
        input_ids=next(there),
        packing=_routed(packing, chosen),
        rows=next(there),
        labels=next(there),
        mask=next(there),
        seq_ids=next(there),
        columns={name: next(there) for name in names},
        order=order,
        lengths=responses,
        drafts=[DraftRows(next(there), next(there), next(there)) for _ in range(depths)],
    )


def _routed(packing: Packing, chosen: list[Sequence]) -> Packing:
    first = next((s.routes for s in chosen if s.routes is not None), None)
    if first is None:
        return packing
    # torch indexes no uint16.
    of_row = np.zeros((sum(packing.sample_lengths), *first.shape[1:]), np.uint8 if first.dtype == np.uint8 else np.int16)
    routed = np.zeros(len(of_row), np.bool_)
    place = 0
    for sequence in chosen:
        if sequence.routes is not None:
            end = place + len(sequence.routes)
            of_row[place:end], routed[place:end] = sequence.routes, True
        place += len(sequence.token_ids)
    device, own = packing.tokens.device, packing.tokens.cpu().numpy()
    # Of the whole row where a rank has all of it: no copy then.
    mine = (of_row, routed) if packing.ranks == 1 else (of_row[own], routed[own])
    there, which = uploaded(mine, device)
    return replace(packing, routes=there, routed=which)


def idle(sequences: list[Sequence], depths: int, device: torch.device | str, **layout: int) -> MicroBatch:
    """The shortest of the sequences with nothing to train, laid out as `pack` does."""
    shortest = min(sequences, key=lambda s: len(s.token_ids))
    unseen = replace(shortest, loss_mask=np.zeros_like(shortest.loss_mask))
    made = pack([unseen], [0], depths, device, **layout)
    return replace(made, packing=replace(made.packing, spare=len(made.input_ids)), idle=True)


# Arrays of the host, brought to a device together.

ALIGNED = 16
"""Each array begins at a multiple of so many bytes, more than any kernel asks for."""


def uploaded(arrays: Rows[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Arrays that nobody else holds as tensors on the device, of the same shapes and dtypes, in the order given.

    To a card they go in one copy: each one takes the host longer than the bytes of a micro-batch take to travel.
    """
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(each) for each in arrays]
    return in_one_copy(arrays, device)


def in_one_copy(arrays: Rows[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """`uploaded`, by one copy to any device. The tensors share one storage."""
    starts, size = [], 0
    for each in arrays:
        starts.append(size)
        size += -(-each.nbytes // ALIGNED) * ALIGNED
    # From pinned memory, so that the host does not wait until the card comes to the copy.
    together = torch.empty(size, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    here = together.numpy()
    for start, each in zip(starts, arrays, strict=True):
        here[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    there = together.to(device, non_blocking=True)
    return [
        there[start : start + each.nbytes].view(torch.from_numpy(each).dtype).view(each.shape)
        for start, each in zip(starts, arrays, strict=True)
    ]


# The counts over all sequences of an update, those of other ranks included, by which losses are divided.


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over all sequences of an update. `trained`: response tokens that are trained on; `drafted`: those of them that each MTP depth
    can be asked to draft."""

    sequences: int
    tokens: int
    trained: int
    drafted: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Rows[Sequence], depths: int) -> Totals:
        """The counts over these sequences alone. depths: MTP layers."""
        drafted = tuple(sum(s.drafted(depth) for s in sequences) for depth in range(1, depths + 1))
        return cls(len(sequences), sum(len(s.token_ids) for s in sequences), sum(s.trained for s in sequences), drafted)

    def over_ranks(self) -> Totals:
        """The counts summed over the data-parallel ranks, each of which has sequences of its own. A collective: all ranks call it."""
        sequences, tokens, trained, *drafted = map(int, summed([self.sequences, self.tokens, self.trained, *self.drafted]))
        return Totals(sequences, tokens, trained, tuple(drafted))


# How much of its cards an update used: model FLOP/s over their peak (MFU, arXiv:2204.02311, appendix B).


def utilisation(
    shape: ModelShape, sequences: list[Sequence], depths: int, *, isolated: bool, seconds: float, card: str, cards: int
) -> float | None:
    """Share of the bf16 peak of `cards` cards that an update of all weights on `sequences` used in `seconds`; recomputation does not count.

    `depths`: MTP depths that are trained. None for a card whose peak is not known.
    """
    peak = card_peak(card)
    if peak is None:
        return None
    return update_flops(shape, sequences, depths, isolated=isolated) / (seconds * cards * peak)


def update_flops(shape: ModelShape, sequences: list[Sequence], depths: int, *, isolated: bool) -> int:
    """Operations of a forward and backward pass over these sequences, with so many MTP depths trained. See `step_flops`."""
    rows, *drafts = (sum(s.drafted(depth) for s in sequences) for depth in range(depths + 1))
    return step_flops(shape, [len(s.token_ids) for s in sequences], rows, drafts, isolated=isolated)
