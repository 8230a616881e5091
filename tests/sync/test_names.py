"""Wire names find their place in what the live model really holds."""

from __future__ import annotations

import pytest

from mtpctl.sync.parameters import Slot, resolve

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
def test_finds_the_place(name: str, live: str, parts: tuple[int, ...] | None) -> None:
    assert resolve(name, {live, "model.norm.weight"}) == Slot(live, parts)


def test_an_unpacked_live_layer_is_taken_as_it_is() -> None:
    live = {f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight"}
    assert resolve(f"{LAYER}.self_attn.q_proj.weight", live) == Slot(f"{LAYER}.self_attn.q_proj.weight")


def test_the_models_own_renaming_comes_first() -> None:
    live = {"model.mtp_layers.36.mtp_block.self_attn.qkv_proj.weight", "model.mtp_layers.0.self_attn.qkv_proj.weight"}

    def rename(name: str) -> str:
        return name.replace("mtp_layers.0.", "mtp_layers.36.").replace(".self_attn.", ".mtp_block.self_attn.")

    found = resolve("model.mtp_layers.0.self_attn.q_proj.weight", live, rename)
    assert found == Slot("model.mtp_layers.36.mtp_block.self_attn.qkv_proj.weight", (0,))


def test_a_live_name_is_not_renamed_twice() -> None:
    def rename(name: str) -> str:
        return name.replace("a.", "a.a.")

    assert resolve("a.weight", {"a.a.weight", "a.a.a.weight"}, rename) == Slot("a.a.weight")


def test_nothing_is_found_for_a_stranger() -> None:
    assert resolve("model.layers.0.rotary.inv_freq", {"model.norm.weight"}) is None
