"""A layer saves as many bytes for its backward pass as `mtpctl.plan.sharding` assumes.

A CPU runs norms and attention in pieces that keep more than a GPU's kernels do; stand-ins here keep what those keep.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from mtpctl.kernels.qkv import split_heads_torch
from mtpctl.model import attention, core_attention, layers
from mtpctl.plan.sharding import activation_width, head_widths, layer_widths
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.trainer.batch import Sequence, Totals
from mtpctl.trainer.objective import NextToken
from mtpctl.trainer.update_loss import UpdateLoss
from tests.fakes.kept import Kept
from tests.fakes.tiny import engine, mimo, sequences
from tests.fakes.trainer_cases import MODELS


class Norm(torch.autograd.Function):
    """Saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, rstd = ctx.saved_tensors
        return grads[0] * rstd * weight, (grads[0] * x * rstd).flatten(0, -2).sum(0)


class SplitHeads(torch.autograd.Function):
    """Saves the tensor that heads are split from if they are normed."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, layout: Any, norm: Any, angles: Any) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*([] if norm is None else [mixed]))
        ctx.shape = mixed.shape
        return tuple(x.clone() for x in split_heads_torch(mixed, layout, norm, angles))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].new_zeros(ctx.shape), None, None, None


class Flash(torch.autograd.Function):
    """Saves queries, keys, values and its output."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q[..., : v.shape[-1]].clone()
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, _out = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


WIDE = {"hidden_size": 64, "intermediate_size": 176, "head_dim": 16, "num_nextn_predict_layers": 0, "tie_word_embeddings": False}
CASES: dict[str, dict[str, Any]] = {
    "mimo": WIDE,
    "qwen3": {**WIDE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    "qwen3-moe": {**WIDE, **{k: v for k, v in MODELS["qwen3-moe"].items() if k != "num_hidden_layers"}},
    "deepseek": {**WIDE, **{k: v for k, v in MODELS["deepseek"].items() if k != "num_hidden_layers"}, "first_k_dense_replace": 0},
}


SHARED = {
    "mimo-sp2": ("mimo", ParallelConfig(tp=2, sequence_parallel=True)),
    "qwen3-moe-sp2": ("qwen3-moe", ParallelConfig(tp=2, sequence_parallel=True)),
    "deepseek-sp2": ("deepseek", ParallelConfig(tp=2, sequence_parallel=True)),
    "qwen3-moe-sp2-ep2": ("qwen3-moe", ParallelConfig(tp=2, sequence_parallel=True, dp=2, ep=2)),
}


def use_stand_ins(monkeypatch):
    monkeypatch.setattr(layers, "rms_norm", lambda x, weight, eps, offset: Norm.apply(x, weight))
    monkeypatch.setattr(attention, "split_heads", SplitHeads.apply)
    monkeypatch.setattr(core_attention.PackedAttention, "_attend_by_group", lambda self, q, k, v, packing, later: Flash.apply(q, k, v))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    use_stand_ins(monkeypatch)


def kept_bytes(folder, **fields) -> tuple[int, int]:
    """Bytes alive after a forward pass, and its number of tokens."""
    with engine(folder, mtp=MtpConfig(mode="off"), tokens_per_microbatch=8192, **fields) as trainer:
        (micro,) = trainer._micro_batches(sequences(40, low=60, high=100), 0)
        trainer.model.train()
        trainer.gradients.clear(1)
        with Kept(*trainer.module.parameters()) as memory:
            hidden = trainer.model(micro.input_ids, micro.packing)
        actual = memory.bytes
        hidden.trunk.sum().backward()
        return actual, len(micro.input_ids)


@pytest.mark.parametrize("case", CASES)
def test_layer_saves_the_planned_bytes(tmp_path, case):
    less, more = (mimo(tmp_path / str(count), **CASES[case], num_hidden_layers=count) for count in (1, 2))
    (first, tokens), (second, _) = kept_bytes(less), kept_bytes(more)
    a_token = (second - first) / tokens / 4
    expected = activation_width(less.shape, ParallelConfig())
    assert expected == pytest.approx(a_token, rel=0.05)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("depths", [0, 1, 2])
def test_states_around_the_head_take_the_planned_bytes(tmp_path, depths, recompute):
    """While the loss is computed, with layers whose widths the tests above check. `recompute: full` does not apply to a repeated layer."""
    folder = mimo(tmp_path, **WIDE | {"hidden_size": 128, "head_dim": 32, "num_nextn_predict_layers": min(depths, 1)}, num_hidden_layers=1)
    mtp = MtpConfig(mode="isolated", repeat=depths) if depths else MtpConfig(mode="off")
    batch = [Sequence(s.token_ids, 1, [1] * (len(s.token_ids) - 1)) for s in sequences(40, low=90, high=120)]
    with engine(folder, mtp=mtp, recompute=recompute, tokens_per_microbatch=8192) as trainer:
        trainer.model.train()
        (micro,) = trainer._micro_batches(batch, depths)
        loss = UpdateLoss(trainer.head, trainer.config, NextToken(), Totals.of(batch, depths), temperature=1.0)
        trainer.gradients.clear(1)
        with Kept(*trainer.module.parameters(), *(buffer.grad_data for buffer in trainer.model.buffers)) as memory:
            hidden = trainer.model(micro.input_ids, micro.packing, depths=depths)
            total, _ = loss(micro, hidden)
        actual = memory.bytes
        total.backward()
    layer = {"none": activation_width(folder.shape, ParallelConfig()), "full": folder.shape.hidden}
    in_loss, _ = head_widths(
        folder.shape, ParallelConfig(), depths, recomputes_drafts=recompute == "full" and depths < 2, has_candidates=False
    )
    planned = layer[recompute] + depths * layer["none" if depths > 1 else recompute] + in_loss
    assert planned == pytest.approx(actual / len(micro.input_ids) / 4, rel=0.06)


@pytest.mark.parametrize("letter", ["*", "E", "-"])
def test_layer_of_nemotron_saves_the_planned_bytes(tmp_path, letter):
    """Mamba-2 is left out: on a CPU its scan saves the matrices of every chunk."""
    sizes = {**WIDE, **MODELS["nemotron-h"]}
    patterns = "E*" + letter, "E*" + 2 * letter
    less, more = (
        mimo(tmp_path / pattern.replace("*", "A"), **sizes | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)})
        for pattern in patterns
    )
    (first, tokens), (second, _) = kept_bytes(less), kept_bytes(more)
    (expected,) = layer_widths(less.shape, ParallelConfig(), range(2, 3))
    assert expected == pytest.approx((second - first) / tokens / 4, rel=0.05)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "elements.json"
    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.fakes.model_ranks", str(out)], check=True, timeout=200)
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_layer_split_over_ranks_saves_the_planned_bytes(tmp_path, of_ranks, name):
    """The plan assumes evenly distributed experts, which is nearly true here."""
    case, parallel = SHARED[name]
    assert activation_width(mimo(tmp_path, **CASES[case]).shape, parallel) == pytest.approx(of_ranks[name], rel=0.05)
