"""Gated DeltaNet (arXiv 2412.06464) for `numerics: bitwise`: token by token, so that a result does not depend on how a prompt is split.

Chunked kernels sum over the tokens of a chunk, in other orders than a decoding step. Here each head's state S is fp32, and at each token

    S ← S · decay,   S ← S + k ⊗ (v − k S) · rate,   output q S

with sums over key channels in an order that depends on their number only. The state is stored between tokens without rounding. Prefill,
decoding, steps that verify drafts, and the trainer therefore compute the same values.

The inputs are those of the chunked form: q, k and v pass a causal convolution of a few taps, in a fixed order, and SiLU; q and k are
normed. These functions have no gradients; `mtpctl.kernels.exact_grad` adds those of the chunked form.

Shape legend: T tokens, n sequences, C channels of queries, keys and values, W taps, h value heads, d key channels, w value channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from mtpctl.kernels import exact, invariant
from mtpctl.kernels.triton_support import on_device_of, tl, triton

NORM_EPS = 1e-6
BLOCK_CHANNELS, BLOCK_VALUES = 128, 32
"""Channels of the convolution, and value channels of a state, that a program computes."""


class DeltaWeights(NamedTuple):
    """taps [C, W]. decay, bias [h]: a state decays by exp(−exp(decay) · softplus(alpha + bias)). key_heads heads of key_dim channels."""

    taps: Tensor
    decay: Tensor
    bias: Tensor
    key_heads: int
    key_dim: int

    def value_dim(self) -> int:
        return (len(self.taps) - 2 * self.key_heads * self.key_dim) // len(self.decay)


class DeltaCache(NamedTuple):
    """Convolution inputs and recurrent states of sequences, stored between steps.

    windows [slots, C, W − 1 + drafts]: inputs of the convolution. states fp32 [slots, h, d, w].

    slots [n, 1 + drafts]: a sequence's window is in its first slot. With one column, its state is in that slot, too, before and after the
    step. With several, for steps that verify drafts, the state after token t of the step is stored in column t.

    accepted [n]: number of accepted tokens of a sequence's previous step, 1 if that step had no drafts. 0: the sequence has no earlier
    tokens, so its slots' contents are not read. Otherwise a step begins with the state in column `accepted` − 1, and with the window from
    that column on.
    """

    windows: Tensor
    states: Tensor
    slots: Tensor
    accepted: Tensor

    @classmethod
    def empty(cls, weights: DeltaWeights, sequences: int, like: Tensor) -> DeltaCache:
        """An uninitialized cache for new sequences. `like`: a tensor with the dtype of inputs, on their device."""
        channels, width = weights.taps.shape
        shape = sequences, len(weights.decay), weights.key_dim, weights.value_dim()
        return cls(
            like.new_empty(sequences, channels, width - 1),
            like.new_empty(shape, dtype=torch.float32),
            torch.arange(sequences, device=like.device)[:, None],
            torch.zeros(sequences, dtype=torch.int32, device=like.device),
        )


def run(mixed: Tensor, alpha: Tensor, beta: Tensor, weights: DeltaWeights, starts: Tensor, cache: DeltaCache) -> Tensor:
    """Outputs [T, h, w] of packed sequences, whose windows and states in `cache` are updated.

    mixed [T, C]; alpha, beta [T, h]: a state's update rate is sigmoid(beta). starts [n + 1]: first token of each sequence, and T.
    """
    assert cache.states.dtype == torch.float32, f"states of {cache.states.dtype} would be rounded after each step"
    convolve, recur = (convolve_triton, recur_triton) if mixed.is_cuda else (convolve_torch, recur_torch)
    convolved = convolve(mixed, weights.taps, starts, cache)
    keys, values = weights.key_heads, len(weights.decay)
    q, k, v = convolved.split([keys * weights.key_dim] * 2 + [values * weights.value_dim()], dim=-1)
    q, k, v = (x.unflatten(-1, (count, -1)) for x, count in ((q, keys), (k, keys), (v, values)))
    q, k = _l2_normalize(q, weights.key_dim**-0.5), _l2_normalize(k, 1.0)
    return recur(q, k, v, alpha, beta, weights, starts, cache)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x² + eps) · weight · silu(gate), in the shape and dtype of x."""
    kernels = invariant if x.is_cuda else exact
    return kernels.swiglu(torch.cat([gate, kernels.rms_norm(x, weight, eps)], dim=-1))


def _l2_normalize(x: Tensor, scale: float) -> Tensor:
    """x / sqrt(sum x² + eps) · scale."""
    width = x.shape[-1]
    norm = invariant.rms_norm if x.is_cuda else exact.rms_norm
    return norm(x, x.new_full((width,), scale * width**-0.5), NORM_EPS / width)


# ------------------------------------------------------------------------------------------------------------ on a CPU


def convolve_torch(mixed: Tensor, taps: Tensor, starts: Tensor, cache: DeltaCache) -> Tensor:
    """silu of the causal convolution of mixed [T, C], which begins with the inputs in the cache."""
    bounds, slots, accepted = starts.tolist(), cache.slots[:, 0].tolist(), cache.accepted.tolist()
    out, history = torch.zeros_like(mixed), taps.shape[1] - 1
    taps_fp64 = taps.double().unbind(1)
    for index, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        window = cache.windows[slots[index]].T
        window_start = accepted[index] - 1
        earlier = torch.zeros_like(window[:history]) if window_start < 0 else window[window_start : window_start + history]
        inputs = torch.cat([earlier, mixed[start:end]])
        for block in exact._blocks(end - start, mixed.shape[1]):
            block_inputs = inputs[block.start : block.stop + history].double()
            rows = len(block_inputs) - history
            sums = block_inputs[:rows] * taps_fp64[0]
            for distance, tap in enumerate(taps_fp64[1:], start=1):
                sums += block_inputs[distance : distance + rows] * tap
            out[start + block.start : start + block.stop] = sums / (1.0 + exact.exp(-sums))
        recent = inputs[1:] if cache.slots.shape[1] > 1 else inputs[-history:]
        window[: len(recent)] = recent
    return out


def gates(alpha: Tensor, beta: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """A state's decay and update rate at each token, fp32 [T, h]."""
    x = alpha.double() + weights.bias.double()
    softplus = x.clamp(min=0.0) + exact.log(1.0 + exact.exp(-x.abs()))
    decay = exact.exp(-exact.exp(weights.decay.double()) * softplus)
    return decay.float(), exact.sigmoid(beta.float())


def recur_torch(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, weights: DeltaWeights, starts: Tensor, cache: DeltaCache
) -> Tensor:
    """The recurrence for q, k [T, key heads, d] and v [T, h, w]. All sequences advance by one token at a time, sorted by length."""
    decay, rate = gates(alpha, beta, weights)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    lengths, order = starts.diff().sort(descending=True, stable=True)
    counts, slots, sequence_starts, accepted = (
        lengths.tolist(),
        cache.slots[order].long(),
        starts[:-1][order].long(),
        cache.accepted[order].long(),
    )
    state = cache.states[slots.gather(1, (accepted[:, None] - 1).clamp(min=0))[:, 0]]
    state[accepted == 0] = 0.0
    out, active = v.new_zeros(v.shape), len(counts)
    for token in range(max(counts)):
        while counts[active - 1] <= token:
            active -= 1
        active_state, rows = state[:active], sequence_starts[:active] + token
        key = k[rows, :, :, None]
        active_state.mul_(decay[rows, :, None, None])
        update = (v[rows] - _sum_channels(active_state * key)).mul_(rate[rows, :, None])
        active_state.add_(key * update[:, :, None])
        out[rows] = _sum_channels(active_state * q[rows, :, :, None])
        if slots.shape[1] > 1:
            cache.states[slots[:active, token]] = active_state
    if slots.shape[1] == 1:
        nonempty = sum(count > 0 for count in counts)
        cache.states[slots[:nonempty, 0]] = state[:nonempty]
    return out


def _sum_channels(x: Tensor) -> Tensor:
    """Sum of x [..., d, w] over d, by adding the halves. Each addition is elementwise, so its rounding does not depend on other rows."""
    while (count := x.shape[-2]) > 1:
        half = count // 2
        pairs = x[..., :half, :] + x[..., half : 2 * half, :]
        x = pairs if count == 2 * half else torch.cat([pairs, x[..., -1:, :]], dim=-2)
    return x[..., 0, :]


# ------------------------------------------------------------------------------------------------------------ on CUDA


def convolve_triton(mixed: Tensor, taps: Tensor, starts: Tensor, cache: DeltaCache) -> Tensor:
    """`convolve_torch`. A program walks over the tokens of a sequence, so only it reads and writes its channels of the window."""
    out, (channels, width), windows = mixed.new_zeros(mixed.shape), taps.shape, cache.windows
    with on_device_of(mixed):
        convolve_kernel[(len(cache.slots), triton.cdiv(channels, BLOCK_CHANNELS))](
            mixed, taps.contiguous(), out, windows, *_sequence_arguments(starts, cache),
            channels, mixed.stride(0), *windows.stride(), int(cache.slots.shape[1] > 1), TAPS=width, BLOCK=BLOCK_CHANNELS,
        )  # fmt: skip
    return out


def recur_triton(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, weights: DeltaWeights, starts: Tensor, cache: DeltaCache
) -> Tensor:
    """`recur_torch`. A program holds some value channels of a head's state."""
    out, (_tokens, heads, width), depth = v.new_zeros(v.shape), v.shape, q.shape[2]
    q, k, alpha, beta = (x.contiguous() for x in (q, k, alpha, beta))
    assert v.stride(1) == width and cache.states.stride()[1:] == (depth * width, width, 1)
    with on_device_of(v):
        recurrence_kernel[(triton.cdiv(width, BLOCK_VALUES), heads, len(cache.slots))](
            q, k, v, alpha, beta, weights.decay.float(), weights.bias.float(), out, cache.states, *_sequence_arguments(starts, cache),
            v.stride(0), cache.states.stride(0), int(cache.slots.shape[1] > 1),
            HEADS=heads, SHARED=heads // q.shape[1], DEPTH=depth, WIDTH=width,
            BLOCK_DEPTH=triton.next_power_of_2(depth), BLOCK_WIDTH=BLOCK_VALUES, num_warps=4,
        )  # fmt: skip
    return out


def _sequence_arguments(starts: Tensor, cache: DeltaCache) -> tuple[Tensor, Tensor, Tensor, int]:
    """Arguments of both kernels, as int32: starts, slots, accepted, and the stride of `slots`."""
    starts, slots, accepted = (x.int().contiguous() for x in (starts, cache.slots, cache.accepted))
    return starts, slots, accepted, slots.stride(0)


# Engine and trainer must run the same binary: specialization on sizes or alignment could change the order of a sum.
@triton.jit(
    do_not_specialize=["channels", "x_stride", "slots_stride", "window_slot", "window_channel", "window_stride", "drafted"],
    do_not_specialize_on_alignment=["x_ptr", "taps_ptr", "out_ptr", "window_ptr", "starts_ptr", "slots_ptr", "accepted_ptr"],
)
@no_type_check
def convolve_kernel(
    x_ptr,  # [T, C]
    taps_ptr,  # [C, TAPS]
    out_ptr,  # [T, C]
    window_ptr,  # [slots, C, TAPS - 1 + drafts]
    starts_ptr,
    slots_ptr,  # [n, 1 + drafts]
    accepted_ptr,  # [n]
    slots_stride,
    channels,
    x_stride,
    window_slot,
    window_channel,
    window_stride,
    drafted,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    count = tl.load(starts_ptr + sequence + 1).to(tl.int64) - start
    if count > 0:
        inside, first = channel < channels, tl.load(accepted_ptr + sequence) - 1
        window = window_ptr + tl.load(slots_ptr + sequence * slots_stride).to(tl.int64) * window_slot + channel * window_channel
        for token in range(count):
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for tap in tl.static_range(TAPS):
                total += _input(x_ptr, window, start, token + tap, first, channel, inside, x_stride, window_stride, TAPS) * tl.load(
                    taps_ptr + channel * TAPS + tap, mask=inside, other=0.0
                ).to(tl.float32)
            out = total / (1.0 + tl.exp(-total))
            tl.store(out_ptr + (start + token) * channels + channel, out.to(out_ptr.dtype.element_ty), mask=inside)
        # After drafts, the next step's window may begin after any of them; otherwise it begins with the last inputs.
        skipped = tl.where(drafted != 0, 1, count)
        for entry in range(TAPS - 1 + count - skipped):
            x = _input(x_ptr, window, start, skipped + entry, first, channel, inside, x_stride, window_stride, TAPS)
            tl.debug_barrier()  # an entry is read before it is overwritten
            tl.store(window + entry * window_stride, x.to(window_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _input(x_ptr, window, start, index, first, channel, inside, x_stride, window_stride, TAPS: tl.constexpr):
    """The convolution's input `index` in fp32. Inputs are the window's TAPS - 1 entries from `first` on, followed by the step's."""
    earlier = tl.load(window + (first + index) * window_stride, mask=inside & (first >= 0) & (index < TAPS - 1), other=0.0)
    now = tl.load(x_ptr + (start + index - TAPS + 1) * x_stride + channel, mask=inside & (index >= TAPS - 1), other=0.0)
    return earlier.to(tl.float32) + now.to(tl.float32)


@triton.jit(
    do_not_specialize=["v_stride", "state_slot", "slots_stride", "drafted"],
    do_not_specialize_on_alignment=[
        "q_ptr", "k_ptr", "v_ptr", "alpha_ptr", "beta_ptr", "decay_ptr", "bias_ptr", "out_ptr", "state_ptr", "starts_ptr", "slots_ptr",
        "accepted_ptr",
    ],
)  # fmt: skip
@no_type_check
def recurrence_kernel(
    q_ptr,  # [T, HEADS / SHARED, DEPTH]
    k_ptr,
    v_ptr,  # [T, HEADS, WIDTH]
    alpha_ptr,  # [T, HEADS]
    beta_ptr,
    decay_ptr,  # [HEADS]
    bias_ptr,
    out_ptr,  # [T, HEADS, WIDTH]
    state_ptr,  # fp32 [slots, HEADS, DEPTH, WIDTH]
    starts_ptr,
    slots_ptr,  # [n, 1 + drafts]
    accepted_ptr,  # [n]
    slots_stride,
    v_stride,
    state_slot,
    drafted,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    count = tl.load(starts_ptr + sequence + 1).to(tl.int64) - start
    if count > 0:
        row, column = tl.arange(0, BLOCK_DEPTH), tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        inside = (row < DEPTH)[:, None] & (column < WIDTH)[None, :]
        states = state_ptr + (head * DEPTH + row[:, None]) * WIDTH + column[None, :]
        slots = slots_ptr + sequence * slots_stride
        accepted = tl.load(accepted_ptr + sequence)
        slot = tl.load(slots + tl.maximum(accepted - 1, 0)).to(tl.int64)
        state = tl.load(states + slot * state_slot, mask=inside & (accepted > 0), other=0.0)
        speed = tl.exp(tl.load(decay_ptr + head).to(tl.float32))
        bias = tl.load(bias_ptr + head).to(tl.float32)
        for step in range(count):
            token = start + step
            shared = (token * (HEADS // SHARED) + head // SHARED) * DEPTH + row
            query = tl.load(q_ptr + shared, mask=row < DEPTH, other=0.0).to(tl.float32)[:, None]
            key = tl.load(k_ptr + shared, mask=row < DEPTH, other=0.0).to(tl.float32)[:, None]
            value = tl.load(v_ptr + token * v_stride + head * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            x = tl.load(alpha_ptr + token * HEADS + head).to(tl.float32) + bias
            softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
            rate = 1.0 / (1.0 + tl.exp(-tl.load(beta_ptr + token * HEADS + head).to(tl.float32)))
            state = state * tl.exp(-speed * softplus)
            change = (value - tl.sum(state * key, 0)) * rate
            state = state + key * change[None, :]
            out = tl.sum(state * query, 0)
            tl.store(out_ptr + (token * HEADS + head) * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=column < WIDTH)
            target = tl.load(slots + tl.where(drafted != 0, step, 0)).to(tl.int64)
            tl.store(states + target * state_slot, state, mask=inside & ((drafted != 0) | (step == count - 1)))
