"""Recipes with FP8 rollout: what does not fit is refused in one line, and samples are corrected by default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.errors import UserError
from mtpctl.families.quantization import select_fp8_names
from mtpctl.families.reading import shape_of
from mtpctl.plan.buckets import plan_quantization, wire_tensors
from mtpctl.recipe.checks import cautions_of, list_complaints, validate
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.model import hf_config, read_config
from mtpctl.recipe.numerics import sent_in_fp8
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout.vllm.fp8_loading import find_quantized_names
from tests.fakes.convert_models import change_config, tensors, write
from tests.fakes.fp8_models import fp8_model
from tests.fakes.toys import NEMOTRON_H

BLOCKS = [
    "model.config.hidden_size=256",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "model.config.head_dim=64",
]
FP8 = [*BLOCKS, "rollout.quantization=fp8", "train.precision=bf16"]


def recipe(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=sets).recipe


def test_fp8_rollout_is_accepted_and_corrected_by_default() -> None:
    created = recipe(*FP8)
    validate(created)
    assert created.rl.correction.mode == "truncate" and created.old_logprobs == "recompute"
    assert created.rl.correction.high == 2.0
    assert not [caution for caution in cautions_of(created) if "correction" in caution]
    assert recipe(*BLOCKS).rl.correction.mode == "off"


def test_default_of_the_correction_follows_a_key_that_is_set_later() -> None:
    """A run's stored recipe has every default, and `--set` changes it."""
    for stored, sets, mode in (([], {"quantization": "fp8"}, "truncate"), (["rollout.quantization=fp8"], {"quantization": "none"}, "off")):
        data = recipe(*BLOCKS, "train.precision=bf16", *stored).model_dump(mode="json", by_alias=True)
        data["rollout"] |= sets
        assert Recipe.model_validate(data).rl.correction.mode == mode


def test_correction_set_by_the_recipe_overrides_the_default_of_fp8() -> None:
    assert recipe(*FP8, "train.rl.correction.mode=mask").rl.correction.mode == "mask"
    bounded = recipe(*FP8, "train.rl.correction.high=3").rl.correction
    assert (bounded.mode, bounded.high) == ("truncate", 3.0)
    behaviour = recipe(*FP8, "train.rl.old_logprobs=behaviour")
    assert behaviour.rl.correction.mode == "off"
    validate(behaviour)
    assert not [caution for caution in cautions_of(behaviour) if "rollout.quantization" in caution]


@pytest.mark.parametrize("old_logprobs", ["auto", "recompute"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_recipe_without_correction_is_cautioned(old_logprobs: str, staleness: int) -> None:
    created = recipe(
        *FP8, "train.rl.correction.mode=off", f"train.rl.old_logprobs={old_logprobs}", f"async.staleness_threshold={staleness}"
    )
    validate(created)
    (caution,) = [caution for caution in cautions_of(created) if "rollout.quantization" in caution]
    assert caution.startswith("train.rl.correction.mode: off, but rollout.quantization: fp8 samples from other probabilities")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["rollout.quantization=int4"], "rollout.quantization"),
        (
            ["numerics=bitwise"],
            "rollout.quantization: fp8 rounds weights, which numerics: bitwise excludes; set numerics: default",
        ),
        (
            ["train.lora={rank: 4, alpha: 8}", "sync.sections=[adapter, draft]"],
            "rollout.quantization: fp8 needs merged adapters; set sync.sections: [target, draft], or roll",
        ),
        (["train.precision=fp32"], "rollout.quantization: fp8 needs activations in bf16, got fp32; set train.precision: bf16, or rol"),
        (
            [f"model.config.{field}" for field in ("hidden_size=192", "head_dim=32", "num_attention_heads=6", "intermediate_size=576")],
            "rollout.quantization: fp8: no matrix of the model fits blocks of 128 x 128 (hidden size 192, MLP 576); set rollout",
        ),
        (
            ["rollout.tp=2"],
            "rollout.tp: 2 ranks cut the FP8 blocks of model.layers.0.mlp.down_proj.weight (320 of 640 columns per rank); lower it",
        ),
        (["rollout.engine_args.load_format=dummy"], "rollout.engine_args.load_format: rollout.quantization: fp8 sets it; leave it out"),
        (
            ["sync={transport: storage, url: 's3://bucket/run'}", "logprob.standalone=true"],
            "rollout.quantization: fp8 with a log-prob server stores each version twice, which sync.transport: storage does not support",
        ),
        (
            ["rollout.quantization=none", "rollout.speculation.quantization=fp8"],
            "rollout.speculation.quantization: fp8 needs rollout.quantiz",
        ),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(sets: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(recipe(*FP8, "model.config.intermediate_size=640", *sets))
    lines = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any(message in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_sglang_is_refused() -> None:
    sets = [*FP8, "rollout.eager=null", "rollout.engine=sglang", "cluster.device=cuda", "sync.transport=nccl", "rollout.python=/bin/sh"]
    data = recipe(*FP8).model_dump(mode="json", by_alias=True)
    data["rollout"] = {"engine": "sglang", "quantization": "fp8"}
    data["cluster"]["device"], data["sync"]["transport"] = "cuda", "nccl"
    lines = list(list_complaints(Recipe.model_validate(data)))
    assert "rollout.quantization: fp8 works only with vLLM; set rollout.engine: vllm, or rollout.quantization: none" in lines, (sets, lines)


def test_folder_with_packed_experts_is_refused(tmp_path: Path) -> None:
    fp8_model("qwen3-moe", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    names = {"weight_map": {"model.layers.0.mlp.experts.gate_up_proj": "model.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(names))
    lines = list(list_complaints(recipe(*FP8[-2:], "model={path: " + str(tmp_path / "hf") + "}", "mtp.mode=off")))
    expected = (
        f"rollout.quantization: fp8 needs one tensor per expert, but {tmp_path / 'hf'} packs its experts (it has no "
        "model.layers.0.mlp.experts.0.down_proj.weight); to unpack them, which also rounds them to FP8, run "
        f"`mtpctl convert-hf {tmp_path / 'hf'} packed-checkpoint && mtpctl convert-hf packed-checkpoint fp8-folder --dtype fp8 && "
        "mtpctl convert-hf fp8-folder unpacked-checkpoint && mtpctl convert-hf unpacked-checkpoint unpacked-folder`, and set "
        "model.path: unpacked-folder"
    )
    assert expected in lines, lines
    with pytest.raises(UserError, match="packs its experts"):
        find_quantized_names(tmp_path / "hf", drafter=True)


def test_folder_without_a_matrix_is_refused(tmp_path: Path) -> None:
    folder, name = tmp_path / "hf", "model.layers.0.mlp.down_proj.weight"
    fp8_model("mimo", folder)
    write(folder, {each: value for each, value in tensors(folder).items() if each != name})
    lines = list(list_complaints(recipe(*FP8[-2:], "model={path: " + str(folder) + "}")))
    assert f"rollout.quantization: fp8 needs the tensor {name}, which {folder} lacks; set rollout.quantization: none" in lines, lines


def test_folder_to_which_the_run_adds_mtp_layers_is_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    fp8_model("mimo", folder)
    change_config(folder, num_nextn_predict_layers=0)
    write(folder, {name: value for name, value in tensors(folder).items() if ".mtp_layers." not in name})
    created = recipe(*FP8[-2:], "model={path: " + str(folder) + ", drafter: {kind: mtp}}", "train.stages=[draft, rl]")
    assert not [line for line in list_complaints(created) if "FP8" in line or "fp8" in line]
    shape = shape_of(hf_config(created.model) or {})
    assert sent_in_fp8(created, shape) == select_fp8_names(shape) != select_fp8_names(shape, mtp=False)


@pytest.mark.parametrize("stages", ["[sft]", "[rl]"])
def test_folder_with_fp8_weights_is_refused_for_every_stage(stages: str, tmp_path: Path) -> None:
    fp8_model("mimo", tmp_path / "hf")
    change_config(tmp_path / "hf", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    lines = list(list_complaints(recipe(*FP8[-2:], "model={path: " + str(tmp_path / "hf") + "}", f"train.stages={stages}")))
    assert any(line.startswith("model.path: its weights are quantized, and rollout.quantization: fp8 quantizes") for line in lines), lines
    with pytest.raises(UserError, match=r"hf: its weights are quantized, and rollout.quantization: fp8 quantizes unquantized ones"):
        find_quantized_names(tmp_path / "hf", drafter=True)


def test_folder_without_its_mtp_layers_is_accepted_if_mtp_is_off(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    fp8_model("mimo", folder)
    stored = {name: value for name, value in tensors(folder).items() if ".mtp_layers." not in name}
    write(folder, stored)
    created = recipe(*FP8[-2:], "model={path: " + str(folder) + "}", "mtp.mode=off", "rollout.speculation.num_tokens=0")
    assert not [line for line in list_complaints(created) if "FP8" in line or "fp8" in line]
    shape = shape_of(read_config(folder))
    names = find_quantized_names(folder, drafter=True)
    assert names == sent_in_fp8(created, shape) == select_fp8_names(shape, mtp=False) and names <= stored.keys()
    plan = plan_quantization(created, shape)
    assert plan is not None and plan.matrices == len(names)


def test_plan_counts_the_sections_that_are_synced() -> None:
    created = recipe(*FP8, "logprob.standalone=true")
    shape = shape_of(created.model.config or {})
    both = plan_quantization(created, shape)
    trunk = plan_quantization(created.model_copy(update={"mtp": created.mtp.model_copy(update={"mode": "off"})}), shape)
    assert both is not None and trunk is not None
    assert both.matrices == len(select_fp8_names(shape)) and trunk.matrices == len(select_fp8_names(shape, mtp=False))
    draft = sum(spec.nbytes for spec in wire_tensors(shape, "draft", "bfloat16"))
    assert draft and both.bytes_to_logprob - trunk.bytes_to_logprob == draft


def test_experts_without_a_gate_are_refused_on_a_cpu() -> None:
    lines = list(list_complaints(recipe(*FP8[-2:], f"model.config={json.dumps(NEMOTRON_H)}")))
    assert any(
        "rollout.quantization: fp8 has no kernel for experts without a gate on a CPU; set cluster.device: cuda" in line for line in lines
    ), lines


def test_drafter_stays_unquantized_if_the_recipe_disables_its_quantization() -> None:
    both, trunk = recipe(*FP8), recipe(*FP8, "rollout.speculation.quantization=none")
    shape = shape_of(both.model.config or {})
    only = sent_in_fp8(both, shape) - sent_in_fp8(trunk, shape)
    assert only and all(".mtp_layers." in name for name in only)
    assert not sent_in_fp8(recipe(*BLOCKS), shape)
