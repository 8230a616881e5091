"""Operations whose results depend neither on the order of summation nor on other rows: fp32 on a CPU, for `numerics: bitwise`.

An engine computes a token's row alone, among drafts, in a chunk of a prompt or in a batch; a trainer computes it in a packed sequence.
Matrix libraries select kernels by shape, and kernels sum in different orders, so the last bits of a row depend on the other rows of the
call.

Here only the factors of a sum are rounded, not the sum itself. Each row of factors becomes a row of integers times a power of two. The
integers have so few bits that all partial sums of their products are below 2⁵³. Float64 adds such integers without rounding, so the result
depends neither on the order nor on matrix library, threads and CPU. (Error-free matrix products by slicing: Ozaki et al., Numerical
Algorithms 59, 2012.) The result is rounded once, to its dtype. The row's largest element sets the power of two, and the number of terms
sets the number of bits: 19 to 24.

All other operations are elementwise: additions, products, quotients and square roots, which IEEE 754 defines to the last bit.
Exponentials, logarithms, sines and cosines are float64 polynomials, because libraries evaluate these functions differently at the end of
an array than in its middle.

Rows are independent, so results do not depend on the blocks in which they are computed. Blocks limit the memory of float64 temporaries.
Results do not depend on the number of ranks that share a row either, because ranks add their integers before the result is rounded.

These functions have no gradients; `mtpctl.kernels.exact_grad` adds those of PyTorch's operations.

A row's mass is Σ exp(z − max z) over its logits or scores z, the denominator of its softmax.

Shape legend: n samples, h query heads, g key-value heads, q queries, k keys, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mtpctl.kernels.qkv import rotate_pairs
from mtpctl.recipe.numerics import BLOCK_BYTES, MAX_CONTEXT

MANTISSA_BITS = 53
"""Float64 represents all integers up to 2^53 exactly."""
_MIN_EXPONENT = -400
"""Lower limit of exponents, so that powers stay normal."""


def _factor_bits(terms: int) -> int:
    """Bits of each factor of a sum of `terms` products."""
    return (MANTISSA_BITS - (terms - 1).bit_length()) // 2


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, for int64 exponents from -1022 to 1023. `torch.ldexp` calls `pow`, which may round."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _max_abs(x: Tensor) -> Tensor:
    """The largest absolute value of each row of x [..., c] → [..., 1], without a copy of x."""
    return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))


def _fixed_point(x: Tensor, bits: int, max_abs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round each row of x [..., c] to integers of at most 2^bits times a power of two. Returns both in float64: [..., c] and [..., 1].

    max_abs: maximum absolute value of each row [..., 1], set if other ranks have parts of the rows.
    """
    max_abs = _max_abs(x) if max_abs is None else max_abs
    exponent = torch.frexp(max_abs.double()).exponent.long().clamp(min=_MIN_EXPONENT)
    exponent.masked_fill_(max_abs == 0, _MIN_EXPONENT)  # frexp gives 0, and a step may be a factor of another sum
    return (x * _power_of_two(bits - exponent)).round_(), _power_of_two(exponent - bits)


def _blocks(count: int, width: int) -> Iterator[slice]:
    """Ranges of `count` rows of `width` elements in float64, of at most `BLOCK_BYTES` each."""
    step = max(1, BLOCK_BYTES // (8 * max(1, width)))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def linear(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """x [rows, in] · weightᵀ [out, in] → [rows, out], in the dtype of x.

    group: ranks that each hold a slice of the dimension `in`, of equal sizes. All get the product of the whole rows, which equals that of
    a single rank.
    """
    max_abs = torch.cat([_max_abs(x), _max_abs(weight)])
    if group is not None:
        dist.all_reduce(max_abs, dist.ReduceOp.MAX, group)
    row_max, column_max = max_abs.split([len(x), len(weight)])
    bits = _factor_bits(x.shape[-1] * (1 if group is None else group.size()))
    rows, row_step = _fixed_point(x, bits, row_max)
    out = x.new_empty(len(x), len(weight))
    for block in _blocks(len(weight), max(x.shape)):
        columns, column_step = _fixed_point(weight[block], bits, column_max[block])
        product = rows @ columns.T
        if group is not None:
            dist.all_reduce(product, group=group)
        out[:, block] = product.mul_(row_step).mul_(column_step.T)
    return out


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [rows, in] · weightᵀ [vocab, in] → [rows, vocab]."""
    return linear(hidden, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean x² + eps) · (offset + weight) over the last dimension, in the dtype of x."""
    width = x.shape[-1]
    units, step = _fixed_point(x, _factor_bits(width))
    squares = units.mul_(units).sum(-1, keepdim=True)
    inverse = (squares.mul_(step).mul_(step).mul_(1.0 / width).add_(eps)).sqrt_().reciprocal_()
    return x.double().mul_(inverse).mul_(weight.double() + offset).to(x.dtype)


def swiglu(gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up · scale for the halves gate and up of the last dimension, in the dtype of `gate_up`. scale: per row; None means 1."""
    rows = gate_up.flatten(0, -2)
    out = rows.new_empty(len(rows), rows.shape[1] // 2)
    for block in _blocks(*out.shape):
        gate, up = rows[block].double().chunk(2, dim=-1)
        product = gate / (1.0 + exp(-gate)) * up
        out[block] = product if scale is None else product * scale.flatten()[block, None]
    return out.unflatten(0, gate_up.shape[:-1])


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), in the dtype of x."""
    return exp(-x.double()).add_(1.0).reciprocal_().to(x.dtype)


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of fp32 angles, in fp32."""
    angles_fp64 = angles.double()
    turns = (angles_fp64 * (2 / math.pi)).round_()
    remainder = angles_fp64 - turns * _HALF_PI_HIGH - turns * _HALF_PI_LOW
    square = remainder * remainder
    cos, sin = _polynomial(square, _COSINE), _polynomial(square, _SINE).mul_(remainder)
    quadrant = turns.long() & 3
    odd = (quadrant & 1).bool()
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    cos, sin = torch.where((quadrant == 1) | (quadrant == 2), -cos, cos), torch.where(quadrant >= 2, -sin, sin)
    return cos.to(angles.dtype), sin.to(angles.dtype)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [t, heads, d] by the rows `positions` [t] of cos and sin [limit, n]."""
    return rotate_pairs(x, cos[positions], sin[positions])


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of query [n, h, q, d] to key and value [n, g, k, d], in the dtype of the query.

    visible: bool, broadcast to [n, q, k]; every query must see a key. Other keys do not affect the query's result if they are finite.

    k must be at most `MAX_CONTEXT`. This maximum, not k, determines the bits of the factors, so a result does not depend on the number of
    invisible keys.
    """
    keys, (samples, heads, queries, width), groups = key.shape[2], query.shape, key.shape[1]
    assert keys <= MAX_CONTEXT, f"{keys} keys, at most {MAX_CONTEXT}"
    visible = visible.expand(samples, queries, keys)
    bits, weight_bits = _factor_bits(width), _factor_bits(MAX_CONTEXT)
    (columns, column_step), (values, value_step) = _fixed_point(key, bits), _fixed_point(value, weight_bits)
    out = query.new_empty(samples, heads, queries, value.shape[-1])
    for block in _blocks(queries, samples * heads * keys):
        query_block, is_masked = query[:, :, block], ~visible[:, None, block]
        rows, row_step = _fixed_point(query_block.reshape(samples, groups, -1, width), bits)
        scores = (rows @ columns.transpose(2, 3)).mul_(row_step).mul_(column_step.transpose(2, 3)).mul_(scale)
        scores = scores.view(*query_block.shape[:3], keys).masked_fill_(is_masked, float("-inf"))
        weights = exp(scores.sub_(scores.amax(-1, keepdim=True))).masked_fill_(is_masked, 0.0)
        mass = fixed_point_sum(weights, MAX_CONTEXT)
        # Each value has its own step, which cannot be factored out of the sum over keys, so it is multiplied into the key's weight. Masked
        # keys have weight 0, so they do not affect the rounding.
        weights = weights.view(samples, groups, -1, keys).mul_(value_step.transpose(2, 3))
        weights, weight_step = _fixed_point(weights, weight_bits)
        out[:, :, block] = (weights @ values).mul_(weight_step).view(*query_block.shape[:3], -1).div_(mass)
    return out


def log_mass(logits: Tensor, vocab: int | None = None, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """The largest of each row's logits [n, columns], and log Σ exp(logit − largest), both [n, 1] in the dtype of the logits.

    group: ranks that share `vocab` columns. All get the results of the whole rows.
    """
    top = logits.amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
    mass = torch.empty_like(top, dtype=torch.float64)
    for block in _blocks(*logits.shape):
        mass[block] = fixed_point_sum(exp((logits[block] - top[block]).double()), vocab or logits.shape[1])
    if group is not None:
        dist.all_reduce(mass, group=group)
    return top, log(mass).to(top.dtype)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax of each row of logits [n, vocab], in fp32."""
    logits = logits.float()
    top, log_sum = log_mass(logits)
    return (logits - top).sub_(log_sum)


def exp(x: Tensor) -> Tensor:
    """e^x of float64 x with a relative error below 1e-11; x is limited to ±700."""
    x = x.clamp(-700.0, 700.0)
    power = (x * (1 / math.log(2))).round_()
    remainder = x.sub_(power * _LOG_2_HIGH).sub_(power * _LOG_2_LOW)
    return _polynomial(remainder, _EXPONENTIAL).mul_(_power_of_two(power.long()))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of float64 x ≥ 1, with an absolute error below 1e-11; 0 for 1."""
    fraction, exponent = torch.frexp(x)
    is_low = fraction < math.sqrt(0.5)
    fraction, exponent = torch.where(is_low, fraction * 2, fraction), exponent - is_low.to(exponent.dtype)
    ratio = (fraction - 1) / (fraction + 1)
    return _polynomial(ratio * ratio, _LOGARITHM) * ratio + exponent.double() * math.log(2)


def fixed_point_sum(weights: Tensor, terms: int) -> Tensor:
    """Sum of weights [..., c], each from 0 to 1, after rounding each to a multiple of a power of two → [..., 1].

    terms: maximum number of weights. It determines the power of two.
    """
    bits = MANTISSA_BITS - 1 - (terms - 1).bit_length()
    return (weights * 2.0**bits).round_().sum(-1, keepdim=True).mul_(2.0**-bits)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's scheme; the highest power's coefficient is first. Products and sums are rounded separately."""
    out = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        out.mul_(x).add_(coefficient)
    return out


_HALF_PI_HIGH = 1.5707963267341256
"""π / 2 with 33 bits, so that its product with a number of quarter turns up to 2²⁰ is exact."""
_HALF_PI_LOW = 6.077100506506192e-11
_LOG_2_HIGH = 0.6931471803691238
"""log 2 with 32 bits."""
_LOG_2_LOW = 1.9082149292705877e-10
_EXPONENTIAL = tuple(1 / math.factorial(n) for n in range(10, -1, -1))
_COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(7, -1, -1))
_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(7, -1, -1))
_LOGARITHM = tuple(2 / (2 * n + 1) for n in range(9, -1, -1))
