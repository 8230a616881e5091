"""`mtpctl convert-hf`: what it prints, what it refuses in one line, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtpctl.checkpoint.listing import write_listing
from mtpctl.cli.app import main
from tests.fakes.convert_models import assert_same_tensors, change_config, tensors, write
from tests.fakes.tiny import MIMO, mimo


class CommandOutput:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error(self) -> str:
        """The one line that a mistake gives."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err, self.err
        return lines[0].removeprefix("error: ")


@pytest.fixture
def convert(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., CommandOutput]]:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")

    def call(*arguments: Any) -> CommandOutput:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["convert-hf", *map(str, arguments)])
        printed = capfd.readouterr()
        return CommandOutput(int(ended.value.code or 0), printed.out, printed.err)

    yield call
    if devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return mimo(tmp_path / "hf").path


def shards(folder: Path, count: int = 3) -> dict[str, str]:
    """Split the weights into files with an index; returns tensor → file."""
    from safetensors.torch import save_file

    stored = tensors(folder)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number % count + 1:05d}-of-{count:05d}.safetensors" for number, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        save_file({name: stored[name] for name in stored if files[name] == file}, folder / file)
    index(folder, files)
    return files


def index(folder: Path, files: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


# ------------------------------------------------------------------------------------------------------ what it prints


def test_output_has_size_and_verification(convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path) -> None:
    shards(folder)
    message = convert(folder, tmp_path / "checkpoint", "--to", "megatron", "--verify")
    assert message.code == 0
    first, second = message.out.splitlines()[-2:]
    assert f"{tmp_path / 'checkpoint'}: Megatron checkpoint of 43 tensors" in first
    assert second.startswith("verified: 43 tensors bit-equal; logits differ by 0.0e+00, MTP logits by 0.0e+00")
    message = convert(tmp_path / "checkpoint", tmp_path / "back", "--json")
    assert message.code == 0 and json.loads(message.out)["to"] == "hf"
    assert_same_tensors(tmp_path / "back", folder)


def test_inspect_prints_the_contents(convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path) -> None:
    result = json.loads(convert("--inspect", folder, "--json").out)
    assert result["family"] == "mimo (MiMoForCausalLM)" and result["MTP layers"].startswith("1, 9,952")
    assert result["dtype"] == ["float32"] and result["missing"] == "nothing"
    assert convert(folder, tmp_path / "checkpoint").code == 0
    message = convert("--inspect", tmp_path / "checkpoint").out
    assert "Megatron checkpoint" in message and "mimo (MiMoForCausalLM)" in message
    write(folder, {name: value for name, value in tensors(folder).items() if "mtp" not in name})
    assert "mtp_layers.0" in json.loads(convert("--inspect", folder, "--json").out)["missing"]


def test_force_replaces_the_folder_behind_a_link_each_time(convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path) -> None:
    """The link stays, and nothing else is left next to it or next to the folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    link = tmp_path / "link"
    link.symlink_to(disk / "checkpoint")
    assert convert(folder, link).code == 0
    marker = disk / "checkpoint" / "marker"
    for _ in range(2):
        marker.write_text("")
        assert convert(folder, link, "--force").code == 0
        assert link.is_symlink() and not marker.exists() and (disk / "checkpoint" / "metadata.json").is_file()
    assert [path.name for path in disk.iterdir()] == ["checkpoint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "hf", "link"]


# ---------------------------------------------------------------------------------------------------------- bad input


def cut(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    size = file.stat().st_size
    return f"{file}: model.norm.weight: its data ends at byte {size + 100}, but the file at {size}; fetch it again"


def no_header(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 4000)
    return f"{file}: byte 0: states a header of"


def broken_header(folder: Path) -> str:
    file = folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[40] = 0
    file.write_bytes(whole)
    return f"{file}: byte 40: the header is not valid JSON"


def wrong_size(folder: Path) -> str:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"model.norm.weight":{"dtype":"F32","shape":[32]', b'"model.norm.weight":{"dtype":"F32","shape":[31]'))
    return "model.norm.weight: byte"


def missing_shard(folder: Path) -> str:
    shards(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "lists model-00002-of-00003.safetensors, which"


def climbing_index(folder: Path) -> str:
    files = shards(folder)
    index(folder, files | {"lm_head.weight": "../elsewhere.safetensors"})
    return "'../elsewhere.safetensors' leads out of the folder"


def index_of_other_files(folder: Path) -> str:
    files = shards(folder)
    index(folder, files | {"model.extra.weight": "model-00001-of-00003.safetensors"})
    return "model.extra.weight is listed in model-00001-of-00003.safetensors, which does not contain it"


def other_width(folder: Path) -> str:
    change_config(folder, intermediate_size=40)
    return "config.json requires model.layers.0.mlp.gate_proj.weight as [40, 32], it is [48, 32]"


def fewer_layers(folder: Path) -> str:
    change_config(folder, num_hidden_layers=1)
    return "config.json says num_hidden_layers 1, but the weights have a layer 1"


def more_layers(folder: Path) -> str:
    change_config(folder, num_hidden_layers=3)
    return "the config requires model.layers.2.input_layernorm.weight"


def unknown_architecture(folder: Path) -> str:
    change_config(folder, architectures=["OtherForCausalLM"])
    return "architectures ['OtherForCausalLM'] is not a known family; known are mimo (MiMoForCausalLM), qwen2"


class Ran:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (99,)


def code_in_a_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Ran()}, folder / "pytorch_model.bin")
    return "pytorch_model.bin: not readable as a pickle of tensors only"


def no_object(folder: Path) -> str:
    (folder / "config.json").write_text("[]")
    return f"{folder / 'config.json'}:1: must be a JSON object"


def not_utf8(folder: Path) -> str:
    (folder / "config.json").write_bytes(b'{"name": "\xff"}')
    return f"{folder / 'config.json'} cannot be read: 'utf-8' codec"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "contains no weights"


MISTAKES = [
    cut,
    no_header,
    broken_header,
    wrong_size,
    missing_shard,
    climbing_index,
    index_of_other_files,
    other_width,
    fewer_layers,
    more_layers,
    unknown_architecture,
    code_in_a_pickle,
    no_object,
    not_utf8,
    no_weights,
]


@pytest.mark.parametrize("spoil", MISTAKES, ids=lambda spoil: spoil.__name__)
def test_bad_folders_are_rejected(
    convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    expected = spoil(folder)
    message = convert(folder, tmp_path / "checkpoint")
    assert message.code == 2 and expected in message.error, message.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_bad_targets_are_rejected(convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").write_text("mine")
    for target, expected in (
        (there, "exists; name another DST, or replace it with --force"),
        (folder / "inside", "or is inside it"),
        (folder, "or is inside it"),
        (tmp_path, "or is inside it"),
        (there / "mine", "is a file; name a folder"),
    ):
        message = convert(folder, target)
        assert message.code == 2 and expected in message.error
    assert (there / "mine").read_text() == "mine" and not (folder / "inside").exists()
    assert convert(folder, there, "--force").code == 0
    assert not (there / "mine").exists() and (there / "engine.json").exists()


def test_bad_command_lines_are_rejected(convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path) -> None:
    for arguments, expected in (
        ((folder, tmp_path / "dst", "--to", "hf"), f"--to hf: {folder} is a Hugging Face folder already"),
        ((folder, tmp_path / "dst", "--to", "gguf"), "--to: 'gguf' is not one of megatron, hf"),
        ((folder, tmp_path / "dst", "--dtype", "int4"), "--dtype: 'int4' is not one of fp32, bf16, fp16"),
        ((folder,), "DST is missing"),
        ((tmp_path / "nowhere", tmp_path / "dst"), "there is no such folder"),
        ((tmp_path, tmp_path.parent / "dst"), "is neither a Hugging Face folder"),
    ):
        message = convert(*arguments)
        assert message.code == 2 and expected in message.error, message.err


def test_full_disk_is_a_one_line_error(
    convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    message = convert(folder, tmp_path / "checkpoint")
    assert message.code == 2
    needed = sum(value.nbytes for value in tensors(folder).values())
    assert f"needs {needed:,} bytes, but its disk has 1,000 free" in message.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_checkpoint_without_a_model_path_requires_the_option(convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path) -> None:
    assert convert(folder, tmp_path / "checkpoint").code == 0
    shutil.rmtree(tmp_path / "checkpoint" / "hf")
    message = convert(tmp_path / "checkpoint", tmp_path / "back")
    assert message.code == 2 and "/checkpoint/hf/config.json is missing; name another checkpoint" in message.error
    write_listing(tmp_path / "checkpoint", 1, {})
    message = convert(tmp_path / "checkpoint", tmp_path / "back")
    assert message.code == 2 and "does not name its model; name the model's folder with --model" in message.error
    wider = mimo(tmp_path / "wider", **{**MIMO, "intermediate_size": 64}).path
    message = convert(tmp_path / "checkpoint", tmp_path / "back", "--model", wider)
    assert (
        message.code == 2
        and "decoder.layers.mlp.linear_fc1.weight is [2, 96, 32], but the model's config requires [2, 128, 32]" in message.error
    )
    assert not (tmp_path / "back").exists() and not (tmp_path / "back.partial").exists()


# -------------------------------------------------------------------------------------------------------- interruption


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_interrupted_conversion_leaves_nothing_and_starts_over(
    convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    from mtpctl.convert import conversion, parts

    monkeypatch.setattr(parts, "PART_BYTES", 20_000)
    source, target = folder, tmp_path / "checkpoint"
    if to == "hf":
        assert convert(folder, tmp_path / "checkpoint").code == 0
        source, target = tmp_path / "checkpoint", tmp_path / "back"
    flushed = []

    def interrupt(*_: Any) -> None:
        flushed.append(1)
        if len(flushed) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion.PartWriter if to == "megatron" else conversion.HfWriter, "flush", interrupt)
        message = convert(source, target)
    assert message.code == 130 and len(flushed) == 3
    assert not target.exists() and not (tmp_path / f"{target.name}.partial").exists()
    assert convert(source, target).code == 0
    assert not (tmp_path / f"{target.name}.partial").exists()
    if to == "megatron":
        assert convert(target, tmp_path / "back", "--verify").code == 0
    assert_same_tensors(tmp_path / "back", folder)


def test_leftovers_of_a_killed_conversion_are_deleted_and_other_folders_are_not(
    convert: Callable[..., CommandOutput], folder: Path, tmp_path: Path
) -> None:
    work = tmp_path / "checkpoint.partial"
    work.mkdir()
    message = convert(folder, tmp_path / "checkpoint")
    assert message.code == 2 and "exists, and was not created by a conversion" in message.error
    (work / "conversion.lock").touch()
    (work / "__0_0.distcp").write_bytes(b"half a shard")
    assert convert(folder, tmp_path / "checkpoint", "--verify").code == 0
    assert not work.exists() and not (tmp_path / "checkpoint" / "conversion.lock").exists()


def test_existing_target_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "there").mkdir()
    code = (
        "import sys\nfrom mtpctl.cli.app import main\n"
        "try:\n    main(['convert-hf', *sys.argv[1:]])\nfinally:\n    assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "there")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'there'}: exists; name another DST, or replace it with --force\n"
