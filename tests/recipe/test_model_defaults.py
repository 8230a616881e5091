"""Defaults that follow the model and the machine, and hints for targets that are no recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import ClusterResources, UserError
from mtpctl.recipe import loading
from mtpctl.recipe.checks import validate
from mtpctl.recipe.loading import LoadedRecipe, dump_resolved, load_recipe
from tests.fakes.tiny import MIMO
from tests.fakes.toys import TOYS

HEADLESS = {**MIMO, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 0, "vocab_size": 320}


def loaded(folder: Path, config: dict[str, Any] = HEADLESS, sets: tuple[str, ...] = (), **sections: Any) -> LoadedRecipe:
    recipe = {
        "model": {"config": config, "tokenizer": "bytes"},
        "data": {"task": {"name": "addition", "train_size": 8, "eval_size": 2, "max_digits": 2}},
        "train": {"rl": {"steps": 1}},
        "rollout": {"max_tokens": 8},
        **sections,
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return load_recipe(folder / "recipe.yaml", sets=sets)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a CPU without AMX states its flags."""
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n")
    monkeypatch.setattr(loading, "CPU_INFO", file)
    return file


def test_model_without_a_head_runs_with_default_settings(tmp_path: Path) -> None:
    created = loaded(tmp_path)
    assert (created.recipe.mtp.mode, created.recipe.rollout.speculation.num_tokens) == ("off", 0)
    assert created.notes[0] == "rollout.speculation.num_tokens: 0, because the model has no MTP head: speculation is off"
    assert created.origins["mtp.mode"] == created.origins["rollout.speculation.num_tokens"] == "default"
    validate(created.recipe)


def test_defaults_that_were_filled_in_are_resolved_for_a_resumed_run(tmp_path: Path) -> None:
    created = loaded(tmp_path, cluster={"device": "cpu"})
    (tmp_path / "resolved.yaml").write_text(dump_resolved(created.recipe))
    again = load_recipe(tmp_path / "resolved.yaml")
    assert again.recipe == created.recipe and not again.notes
    validate(again.recipe)


def test_model_with_a_head_keeps_the_defaults(tmp_path: Path) -> None:
    created = loaded(tmp_path, {**MIMO, "vocab_size": 320})
    assert (created.recipe.mtp.mode, created.recipe.rollout.speculation.num_tokens) == ("isolated", 1)


def test_mode_off_turns_speculation_off(tmp_path: Path) -> None:
    created = loaded(tmp_path, {**MIMO, "vocab_size": 320}, mtp={"mode": "off"})
    assert created.recipe.rollout.speculation.num_tokens == 0
    validate(created.recipe)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"mtp": {"mode": "isolated"}}, "mtp.mode: isolated needs an MTP head, but the model has none; leave mtp.mode out"),
        ({"rollout": {"max_tokens": 8, "speculation": {"num_tokens": 2}}}, "num_tokens: 2 needs an MTP head, but the model has none"),
    ],
)
def test_required_head_that_the_model_lacks_is_an_error(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        validate(loaded(tmp_path, **sections).recipe)
    assert not getattr(caught.value, "__notes__", [])


def test_head_that_is_only_in_the_weights_is_used(tmp_path: Path) -> None:
    from mtpctl.families.reading import shape_of
    from mtpctl.families.tensors import tensor_shapes

    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MIMO, "num_nextn_predict_layers": 0}))
    names = dict.fromkeys(tensor_shapes(shape_of(MIMO)), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert loaded(tmp_path, model={"path": str(folder)}).recipe.mtp.mode == "isolated"


def test_transport_follows_the_device(tmp_path: Path) -> None:
    for sections in ({}, {"sync": {"bucket_bytes": 4096}}):
        created = loaded(tmp_path, cluster={"device": "cpu"}, **sections).recipe
        assert (created.sync.transport, created.device) == ("shm", "cpu")
        validate(created)
    assert loaded(tmp_path).recipe.sync.transport == "nccl"
    assert loaded(tmp_path, sets=("cluster.device=cpu",)).recipe.sync.transport == "shm"
    with pytest.raises(UserError, match=r"sync.transport: nccl needs CUDA; set shm for cluster.device: cpu, or leave it out"):
        validate(loaded(tmp_path, cluster={"device": "cpu"}, sync={"transport": "nccl"}).recipe)


def test_precision_follows_the_device(tmp_path: Path, flags: Path) -> None:
    on_cpu = {"cluster": {"device": "cpu"}}
    created = loaded(tmp_path, **on_cpu)
    assert created.recipe.train.precision == "fp32"
    assert created.notes[-1] == "train.precision: fp32, because this CPU has no AMX, without which bf16 is slower"
    assert loaded(tmp_path).recipe.train.precision == "bf16"
    assert loaded(tmp_path, TOYS["qwen3.5"] | {"vocab_size": 331}, **on_cpu).recipe.train.precision == "bf16"
    assert loaded(tmp_path, sets=("train.precision=bf16",), **on_cpu).recipe.train.precision == "bf16"
    flags.write_text("flags\t\t: fpu avx2 amx_bf16 amx_tile amx_int8\n")
    created = loaded(tmp_path, **on_cpu)
    assert created.recipe.train.precision == "bf16" and not any("precision" in note for note in created.notes)


def test_machine_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtpctl.cluster.local import check_capacity
    from mtpctl.recipe.schema import ClusterConfig

    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ClusterResources, match=r"cluster.device: this machine has no GPU; set cluster.device: cpu"):
        check_capacity(ClusterConfig(), cpus=1, gpus=1)


def test_folder_of_weights_in_place_of_a_recipe_is_named(tmp_path: Path) -> None:
    from mtpctl.jobs.targets import load_target

    with pytest.raises(UserError, match="is neither a run"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is a folder of weights, not a recipe; name a recipe, and this folder by --set model.path="):
        load_target(tmp_path)


def test_gguf_file_is_named_with_the_way_to_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "SmolLM2.gguf"
    with pytest.raises(UserError, match=r"SmolLM2.gguf is a model file, not a recipe; name a recipe"):
        load_recipe(file)
    with pytest.raises(UserError, match=r"there is no file .*SmolLM2.gguf, and GGUF files are not supported"):
        validate(loaded(tmp_path, model={"path": str(file)}).recipe)
    file.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r'is a GGUF file.*gguf_file="SmolLM2.gguf"\)\.save_pretrained'):
        validate(loaded(tmp_path, model={"path": str(file)}).recipe)


def test_file_in_a_set_is_found_next_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "reward.py").write_text("def reward(response: str) -> float:\n    return 1.0\n")
    monkeypatch.chdir(elsewhere)
    created = loaded(tmp_path, sets=("reward.function=reward.py:reward",)).recipe
    assert created.reward.function == f"{tmp_path / 'reward.py'}:reward"
    (elsewhere / "reward.py").write_text("")
    assert loaded(tmp_path, sets=("reward.function=reward.py:reward",)).recipe.reward.function == f"{elsewhere / 'reward.py'}:reward"
