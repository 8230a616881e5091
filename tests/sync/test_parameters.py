"""Wire names resolve to live parameters, and every element of a tensor reaches the rank that holds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mtpctl.families.quantization import scale_shape
from mtpctl.kernels.block_fp8 import quantize, quantized_tensors
from mtpctl.plan.buckets import TensorSpec, plan_buckets
from mtpctl.sync.checksums import checksum, combine_sums
from mtpctl.sync.parameters import LiveSection, Run, Shard, Slot, TensorMismatch, TpRank, entry_view, find_shard, match_shards, resolve
from mtpctl.sync.protocol import SectionPlan

LAYER = "model.layers.0"


@pytest.mark.parametrize(
    ("name", "live", "parts"),
    [
        (f"{LAYER}.mlp.down_proj.weight", f"{LAYER}.mlp.down_proj.weight", None),
        (f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight", (0,)),
        (f"{LAYER}.self_attn.k_proj.bias", f"{LAYER}.self_attn.qkv_proj.bias", (1,)),
        (f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight", (1,)),
        (f"{LAYER}.mlp.down_proj.weight", f"{LAYER}.mlp.down_proj.base_layer.weight", None),
        (f"{LAYER}.mlp.down_proj.base_layer.weight", f"{LAYER}.mlp.down_proj.weight", None),
        (f"{LAYER}.self_attn.v_proj.weight", f"{LAYER}.self_attn.qkv_proj.base_layer.weight", (2,)),
    ],
)
def test_wire_names_resolve_to_packed_and_wrapped_parameters(name: str, live: str, parts: tuple[int, ...] | None) -> None:
    assert resolve(name, {live, "model.norm.weight"}) == Slot(live, parts)


def test_an_unpacked_live_layer_precedes_a_packed_one() -> None:
    live = {f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight"}
    assert resolve(f"{LAYER}.self_attn.q_proj.weight", live) == Slot(f"{LAYER}.self_attn.q_proj.weight")


def test_the_models_own_rename_rule_is_tried_first() -> None:
    live = {"model.mtp_layers.36.mtp_block.self_attn.qkv_proj.weight", "model.mtp_layers.0.self_attn.qkv_proj.weight"}

    def rename(name: str) -> str:
        return name.replace("mtp_layers.0.", "mtp_layers.36.").replace(".self_attn.", ".mtp_block.self_attn.")

    slot = resolve("model.mtp_layers.0.self_attn.q_proj.weight", live, rename)
    assert slot == Slot("model.mtp_layers.36.mtp_block.self_attn.qkv_proj.weight", (0,))


def test_a_live_name_is_not_renamed_twice() -> None:
    def rename(name: str) -> str:
        return name.replace("a.", "a.a.")

    assert resolve("a.weight", {"a.a.weight", "a.a.a.weight"}, rename) == Slot("a.a.weight")


def test_an_unknown_name_resolves_to_none() -> None:
    assert resolve("model.layers.0.rotary.inv_freq", {"model.norm.weight"}) is None


def layer(weight: torch.Tensor, **attributes: Any) -> nn.Module:
    """An engine's layer with a weight and these attributes."""
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def model_with(path: str, module: nn.Module, **attributes: Any) -> nn.Module:
    """A model with one layer at `path`, whose direct parent has these attributes."""
    root = parent = nn.Module()
    *names, last = path.split(".")
    for name in names:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(last, module)
    for name, value in attributes.items():
        setattr(parent, name, value)
    return root


def qkv(rank: int, size: int, *, heads: int = 4, kv: int = 2, dim: int = 3, hidden: int = 5) -> nn.Module:
    local = max(1, kv // size)
    sizes = [heads * dim, local * size * dim, local * size * dim]
    weight = torch.full((sum(sizes) // size, hidden), -1.0)
    return layer(weight, output_sizes=sizes, tp_size=size, tp_rank=rank, num_kv_head_replicas=max(1, size // kv))


CASES: dict[str, Any] = {
    # wire name, shape, the live layer of a rank, its path, attributes of its parent
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


def shard_of(case: str, rank: int, size: int) -> Shard:
    name, shape, make, path, parent = CASES[case]
    model = model_with(path, make(rank, size), **parent)
    slot = resolve(f"{name}.weight", dict(model.named_parameters()))
    assert slot is not None
    return find_shard(model, model.get_parameter(slot.parameter).data, slot, shape, TpRank(rank, size))


@pytest.mark.parametrize("step", [1, 5, 8, 24, 1000])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_shards_of_all_ranks_make_up_the_tensor(case: str, size: int, step: int) -> None:
    whole = torch.randn(CASES[case][1])
    shards = [shard_of(case, rank, size) for rank in range(size)]
    for start in range(0, whole.numel(), step):
        stop = min(start + step, whole.numel())
        for shard in shards:
            shard.write(whole.view(-1)[start:stop], start, stop)
    matrix = whole.view(shards[0].outer, -1)
    for shard in shards:
        for column, block in shard.blocks():
            assert torch.equal(block, matrix[:, column : column + block.shape[1]])
    assert combine_sums(part for shard in shards for part in shard.sums()) == checksum(whole)


@pytest.mark.parametrize("bucket_bytes", [256, 512, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_buckets_of_a_live_section_fill_the_shards(case: str, size: int, bucket_bytes: int) -> None:
    """Written twice, because the copies are prepared at the first write. `odd` and `widened` are not copied as words."""
    shapes = {"odd": (3,), "whole": CASES[case][1], "widened": (4, 2), "more": (64, 4)}
    dtypes = dict.fromkeys(shapes, torch.float32) | {"odd": torch.bfloat16, "widened": torch.bfloat16}
    buckets = plan_buckets([TensorSpec(name, shapes[name], str(dtypes[name]).removeprefix("torch.")) for name in shapes], bucket_bytes)
    plain = {name: Run(0, 0, shape[0]) for name, shape in shapes.items()}
    ranks = []
    for rank in range(size):
        shards = {name: Shard(torch.zeros(shapes[name]), shapes[name], 0, (plain[name],), dtypes[name]) for name in ("widened", "more")}
        shards["odd"] = Shard(torch.zeros(3, dtype=torch.bfloat16), (3,), 0, (plain["odd"],), torch.bfloat16)
        ranks.append(LiveSection(shards | {"whole": shard_of(case, rank, size)}))
    for _ in range(2):
        tensors = {name: torch.randn(shape).to(dtypes[name]) for name, shape in shapes.items()}
        for bucket in buckets:
            data = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for entry in bucket.entries:
                entry_view(entry, data).copy_(tensors[entry.name].view(-1)[entry.part_start : entry.part_stop])
            for live in ranks:
                live.write(bucket, data)
        for name, tensor in tensors.items():
            assert combine_sums(part for live in ranks for part in live.shards[name].sums()) == checksum(tensor)


def test_replicas_that_differ_have_no_checksum() -> None:
    shards = [shard_of("everywhere", rank, 2) for rank in range(2)]
    for rank, shard in enumerate(shards):
        shard.write(torch.full((7,), float(rank)), 0, 7)
    assert combine_sums(part for shard in shards for part in shard.sums()) == "ranks differ in the same part"


def test_a_tensor_with_a_missing_part_has_no_checksum() -> None:
    assert combine_sums(shard_of("columns", 1, 2).sums()) == "columns 0 to 12 of 24 are on no rank"


def experts(rank: int, size: int, *, local: tuple[int, ...] = (0, 1, 2)) -> nn.Module:
    module = nn.Module()
    module.w13_weight = nn.Parameter(torch.zeros(len(local), 2 * 4 // size, 5), requires_grad=False)
    module.w2_weight = nn.Parameter(torch.zeros(len(local), 5, 4 // size), requires_grad=False)
    module.global_num_experts = 3
    module.expert_map = None if len(local) == 3 else torch.tensor([local.index(e) if e in local else -1 for e in range(3)])
    module.moe_config = SimpleNamespace(tp_size=size, tp_rank=rank, is_act_and_mul=True)
    return module


@pytest.mark.parametrize(("proj", "shape"), [("gate_proj", (4, 5)), ("up_proj", (4, 5)), ("down_proj", (5, 4))])
@pytest.mark.parametrize("layout", ["tensor parallel", "expert parallel"])
def test_experts_are_written_into_the_packed_tensors(layout: str, proj: str, shape: tuple[int, ...]) -> None:
    if layout == "tensor parallel":
        models = [model_with("mlp.experts", experts(rank, 2)) for rank in range(2)]
    else:
        models = [model_with("mlp.experts", experts(0, 1, local=local)) for local in ((0, 2), (1,))]
    for expert in range(3):
        whole, shards = torch.randn(shape), []
        for model in models:
            live = dict(model.named_parameters())
            slot = resolve(f"mlp.experts.{expert}.{proj}.weight", live)
            assert slot is not None and slot.expert == expert
            shards.append(find_shard(model, live[slot.parameter].data, slot, shape, TpRank()))
        for shard in shards:
            shard.write(whole.view(-1), 0, whole.numel())
        assert combine_sums(part for shard in shards for part in shard.sums()) == checksum(whole)


def fp8_layer(weight: tuple[int, int], **attributes: Any) -> nn.Module:
    module = layer(torch.zeros(weight, dtype=torch.float8_e4m3fn), **attributes)
    module.weight_scale_inv = nn.Parameter(torch.zeros(scale_shape(*weight)), requires_grad=False)
    return module


def fp8_model(rank: int, size: int) -> nn.Module:
    """A rank's attention with 4 heads of 128, MLP and two experts, whose hidden size is 256."""
    tp = {"tp_rank": rank, "tp_size": size}
    model = nn.Module()
    model.qkv_proj = fp8_layer((3 * 512 // size, 256), output_sizes=[512] * 3, **tp)
    model.o_proj = fp8_layer((256, 512 // size), **tp)
    model.gate_up_proj = fp8_layer((2 * 256 // size, 256), output_sizes=[256] * 2, **tp)
    model.mlp = nn.Module()
    model.mlp.experts = experts(rank, size, local=(0, 1))
    model.mlp.experts.global_num_experts, model.mlp.experts.expert_map = 2, None
    for leaf, rows, columns in (("w13_weight", 2 * 256 // size, 256), ("w2_weight", 256, 256 // size)):
        values = torch.zeros(2, rows, columns, dtype=torch.float8_e4m3fn)
        model.mlp.experts.register_parameter(leaf, nn.Parameter(values, requires_grad=False))
        scales = nn.Parameter(torch.zeros(2, *scale_shape(rows, columns)), requires_grad=False)
        model.mlp.experts.register_parameter(f"{leaf}_scale_inv", scales)
    return model


def test_fp8_values_and_scales_of_each_rank_are_those_of_its_part() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{part}_proj": (512, 256) for part in "qkv"} | {"o_proj": (256, 512), "gate_proj": (256, 256), "up_proj": (256, 256)}
    shapes |= {f"mlp.experts.{e}.{part}_proj": (256, 256) for e in range(2) for part in ("gate", "up", "down")}
    spread = torch.logspace(-3, 0, 4).repeat_interleave(128)  # so that scales differ
    weights = {
        name: torch.randn(shape, generator=generator) * spread[: shape[0], None] * spread[None, : shape[1]]
        for name, shape in shapes.items()
    }
    sent = {key: value for name, weight in weights.items() for key, value in quantized_tensors(f"{name}.weight", weight)}
    specs = [TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in sent.items()]
    plan = SectionPlan(tuple(plan_buckets(specs, 1 << 20)))
    ranks = [fp8_model(rank, 2) for rank in range(2)]
    matched = [match_shards(model, plan, tp=TpRank(rank, 2)) for rank, model in enumerate(ranks)]
    for name, tensor in sent.items():
        for shards in matched:
            shards[name].write(tensor.view(-1), 0, tensor.numel())
        assert combine_sums(part for shards in matched for part in shards[name].sums()) == checksum(tensor)
    for rank, model in enumerate(ranks):

        def rows(*names: str, rank: int = rank) -> torch.Tensor:
            return torch.cat([weights[name].chunk(2)[rank] for name in names])

        parts = {"qkv_proj": rows("q_proj", "k_proj", "v_proj"), "o_proj": weights["o_proj"].chunk(2, 1)[rank]}
        parts["gate_up_proj"] = rows("gate_proj", "up_proj")
        live = dict(model.named_parameters())
        pairs = [(f"{name}.weight", live[f"{name}.weight"], live[f"{name}.weight_scale_inv"], part) for name, part in parts.items()]
        for e in range(2):
            whole = {
                "w13": rows(f"mlp.experts.{e}.gate_proj", f"mlp.experts.{e}.up_proj"),
                "w2": weights[f"mlp.experts.{e}.down_proj"].chunk(2, 1)[rank],
            }
            for leaf, part in whole.items():
                pairs.append((leaf, live[f"mlp.experts.{leaf}_weight"][e], live[f"mlp.experts.{leaf}_weight_scale_inv"][e], part))
        for name, values, scales, part in pairs:
            expected_values, expected_scales = quantize(part, name)
            assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8)), name
            assert torch.equal(scales, expected_scales), name


def test_a_shape_that_no_split_explains_is_an_error() -> None:
    model = model_with("m.up", layer(torch.zeros(4, 3), tp_size=2, tp_rank=0))
    with pytest.raises(TensorMismatch, match=r"has shape \(9, 3\), but m.up.weight takes \(4, 3\)"):
        find_shard(model, torch.zeros(4, 3), Slot("m.up.weight"), (9, 3), TpRank(0, 2))


def test_a_vector_that_is_stored_as_a_row_is_written() -> None:
    target = torch.zeros(3)
    shard = find_shard(model_with("m.gate", layer(target)), target, Slot("m.gate.weight"), (1, 3), TpRank())
    shard.write(torch.arange(3.0), 0, 3)
    assert target.tolist() == [0, 1, 2]
    assert combine_sums(shard.sums()) == checksum(torch.arange(3.0)[None])


def test_several_runs_of_columns_are_written() -> None:
    target = torch.zeros(2, 4)
    Shard(target, (2, 6), 1, (Run(1, 0, 2), Run(4, 2, 2))).write(torch.arange(12.0), 0, 12)
    assert target.tolist() == [[1, 2, 4, 5], [7, 8, 10, 11]]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("live_shape", [(), (1,)])
def test_a_scalar_is_written_in_either_form(shape: tuple[int, ...], live_shape: tuple[int, ...]) -> None:
    target = torch.zeros(live_shape)
    find_shard(model_with("m.scale", layer(target)), target, Slot("m.scale.weight"), shape, TpRank()).write(torch.ones(1), 0, 1)
    assert target.item() == 1
