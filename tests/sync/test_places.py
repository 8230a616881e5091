"""Every element of a whole tensor reaches the rank that holds it, however it is cut and however it travels; sums tell it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mtpctl.sync.checksums import checksum, combined
from mtpctl.sync.parameters import Misfit, Place, Ranks, Run, Slot, find_place, resolve


def layer(weight: torch.Tensor, **attributes: Any) -> nn.Module:
    """A layer as an engine has it."""
    found = nn.Module()
    found.weight = nn.Parameter(weight, requires_grad=False)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def holding(path: str, module: nn.Module, **parent: Any) -> nn.Module:
    """A model with one layer at `path`, whose direct parent has these attributes."""
    root = at = nn.Module()
    *names, last = path.split(".")
    for name in names:
        at.add_module(name, nn.Module())
        at = at.get_submodule(name)
    at.add_module(last, module)
    for name, value in parent.items():
        setattr(at, name, value)
    return root


def qkv(rank: int, size: int, *, heads: int = 4, kv: int = 2, dim: int = 3, hidden: int = 5) -> nn.Module:
    local = max(1, kv // size)
    sizes = [heads * dim, local * size * dim, local * size * dim]
    weight = torch.full((sum(sizes) // size, hidden), -1.0)
    return layer(weight, output_sizes=sizes, tp_size=size, tp_rank=rank, num_kv_head_replicas=max(1, size // kv))


CASES: dict[str, Any] = {
    # name on the wire, its shape, the live layer of a rank, where it is, what the parent of the layer is
    "columns": ("m.up", (8, 3), lambda r, n: layer(torch.zeros(8 // n, 3), tp_size=n, tp_rank=r), "m.up", {}),
    "rows": ("m.down", (3, 8), lambda r, n: layer(torch.zeros(3, 8 // n), tp_size=n, tp_rank=r), "m.down", {}),
    "everywhere": ("m.norm", (7,), lambda r, n: layer(torch.zeros(7)), "m.norm", {}),
    "query": ("a.q_proj", (12, 5), qkv, "a.qkv_proj", {}),
    "key": ("a.k_proj", (6, 5), qkv, "a.qkv_proj", {}),
    "value": ("a.v_proj", (6, 5), qkv, "a.qkv_proj", {}),
    "delta q, k, v": (
        "g.in_proj_qkv",
        (16, 3),
        lambda r, n: layer(torch.zeros(24 // n, 3), output_sizes=[4, 4, 8, 8], tp_size=n, tp_rank=r),
        "g.in_proj_qkvz",
        {},
    ),
    "delta z": (
        "g.in_proj_z",
        (8, 3),
        lambda r, n: layer(torch.zeros(24 // n, 3), output_sizes=[4, 4, 8, 8], tp_size=n, tp_rank=r),
        "g.in_proj_qkvz",
        {},
    ),
    "delta convolution": (
        "g.conv1d",
        (16, 1, 4),
        lambda r, n: layer(torch.zeros(16 // n, 1, 4), tp_size=n, tp_rank=r),
        "g.conv1d",
        {"key_dim": 4, "value_dim": 8},
    ),
    "packed on the wire too": (
        "g.in_proj_qkv",
        (16, 3),
        lambda r, n: layer(torch.zeros(16 // n, 3), output_sizes=[4, 4, 8], tp_size=n, tp_rank=r),
        "g.in_proj_qkv",
        {},
    ),
    "vocabulary": (
        "embed",
        (10, 3),
        lambda r, n: layer(
            torch.zeros(16 // n, 3),
            org_vocab_size=10,
            shard_indices=SimpleNamespace(org_vocab_start_index=min(r * 16 // n, 10), org_vocab_end_index=min((r + 1) * 16 // n, 10)),
        ),
        "embed",
        {},
    ),
}


def place(case: str, rank: int, size: int) -> Place:
    name, shape, make, path, parent = CASES[case]
    model = holding(path, make(rank, size), **parent)
    slot = resolve(f"{name}.weight", dict(model.named_parameters()))
    assert slot is not None
    return find_place(model, model.get_parameter(slot.parameter).data, slot, shape, Ranks(rank, size))


@pytest.mark.parametrize("step", [1, 5, 8, 24, 1000])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_together_hold_the_tensor(case: str, size: int, step: int) -> None:
    whole = torch.randn(CASES[case][1])
    places = [place(case, rank, size) for rank in range(size)]
    for start in range(0, whole.numel(), step):
        stop = min(start + step, whole.numel())
        for each in places:
            each.write(whole.view(-1)[start:stop], start, stop)
    matrix = whole.view(places[0].outer, -1)
    for each in places:
        for column, block in each.blocks():
            assert torch.equal(block, matrix[:, column : column + block.shape[1]])
    assert combined(part for each in places for part in each.sums()) == checksum(whole)


def test_a_rank_that_differs_is_told() -> None:
    places = [place("everywhere", rank, 2) for rank in range(2)]
    for rank, each in enumerate(places):
        each.write(torch.full((7,), float(rank)), 0, 7)
    assert combined(part for each in places for part in each.sums()) == "ranks that hold the same part differ in it"


def test_a_part_that_nobody_holds_is_told() -> None:
    one = place("columns", 1, 2)
    assert combined(one.sums()) == "columns 0 to 12 of 24 are held by no rank"


def experts(rank: int, size: int, *, local: tuple[int, ...] = (0, 1, 2)) -> nn.Module:
    found = nn.Module()
    found.w13_weight = nn.Parameter(torch.zeros(len(local), 2 * 4 // size, 5), requires_grad=False)
    found.w2_weight = nn.Parameter(torch.zeros(len(local), 5, 4 // size), requires_grad=False)
    found.global_num_experts = 3
    found.expert_map = None if len(local) == 3 else torch.tensor([local.index(e) if e in local else -1 for e in range(3)])
    found.moe_config = SimpleNamespace(tp_size=size, tp_rank=rank)
    return found


@pytest.mark.parametrize(("proj", "shape"), [("gate_proj", (4, 5)), ("up_proj", (4, 5)), ("down_proj", (5, 4))])
@pytest.mark.parametrize("layout", ["tensor parallel", "expert parallel"])
def test_experts_lie_in_one_tensor(layout: str, proj: str, shape: tuple[int, ...]) -> None:
    if layout == "tensor parallel":
        models = [holding("mlp.experts", experts(rank, 2)) for rank in range(2)]
    else:
        models = [holding("mlp.experts", experts(0, 1, local=local)) for local in ((0, 2), (1,))]
    for expert in range(3):
        whole, places = torch.randn(shape), []
        for model in models:
            live = dict(model.named_parameters())
            slot = resolve(f"mlp.experts.{expert}.{proj}.weight", live)
            assert slot is not None and slot.expert == expert
            places.append(find_place(model, live[slot.parameter].data, slot, shape, Ranks()))
        for each in places:
            each.write(whole.view(-1), 0, whole.numel())
        assert combined(part for each in places for part in each.sums()) == checksum(whole)


def test_a_shape_that_no_cut_explains_is_refused() -> None:
    model = holding("m.up", layer(torch.zeros(4, 3), tp_size=2, tp_rank=0))
    with pytest.raises(Misfit, match=r"has shape \(9, 3\), its place in m.up.weight \(4, 3\)"):
        find_place(model, torch.zeros(4, 3), Slot("m.up.weight"), (9, 3), Ranks(0, 2))


def test_runs_of_rows_and_columns() -> None:
    target = torch.zeros(2, 4)
    Place(target, (2, 6), 1, (Run(1, 0, 2), Run(4, 2, 2))).write(torch.arange(12.0), 0, 12)
    assert target.tolist() == [[1, 2, 4, 5], [7, 8, 10, 11]]
