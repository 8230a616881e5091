"""`mtpctl add-drafter`: what it creates, what it rejects in one line, and two commands from a folder to a server that speculates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpctl.convert.model_weights import ModelWeights
from mtpctl.data.tokenizers import make_byte_tokenizer
from mtpctl.families.tensors import section_of
from tests.fakes.commands import CommandResult, mtpctl
from tests.fakes.convert_models import change_config
from tests.fakes.full_disk import full_disk
from tests.fakes.toys import LLAMA_EAGLE3, MIMO, QWEN3_EAGLE3, SIZES, toy_folder

__all__ = ["mtpctl"]

Command = Callable[..., CommandResult]
ON_CPU = ("--set", "cluster.device=cpu", "--set", "cluster.num_cpus=2")


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


LLAMA = without(LLAMA_EAGLE3, "drafter")
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": without(QWEN3_EAGLE3, "drafter"),
    "qwen2": {
        **without(SIZES, "head_dim"),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
}


def write_rows(path: Path, count: int = 40, **fields: str) -> None:
    path.write_text("".join(json.dumps({"prompt": f"{number}+{number}=", **fields}) + "\n" for number in range(count)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama without a drafter, its tokenizer, and rows next to it."""
    path = toy_folder(LLAMA, tmp_path / "model", 0, "fp32")
    make_byte_tokenizer(path)
    write_rows(tmp_path / "rows.jsonl")
    return path


def test_untrained_drafter_and_commands_of_engines(mtpctl: Command, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "pair"
    result = mtpctl("add-drafter", str(folder), str(target), "--steps", "0")
    assert result.code == 0, result.err
    drafter = target / "drafter"
    settings = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    speculative = json.dumps(settings)
    assert result.out.splitlines() == [
        f"{target}: the model with its drafter; serve it with one of these commands:",
        f"  vllm serve {target} --speculative-config '{speculative}'",
        f"  python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 --speculative-draft-model-path {drafter} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    ]
    weights = ModelWeights(target)
    assert sum(section_of(name, weights.shape) == "draft" for name in weights) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "pair", "rows.jsonl"]
    assert (target / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_commands_of_a_model_with_mtp_layers(mtpctl: Command, tmp_path: Path) -> None:
    toy_folder(MODELS["qwen2"], tmp_path / "model", 0, "fp32")
    target = tmp_path / "pair"
    result = mtpctl("add-drafter", str(tmp_path / "model"), str(target), "--steps", "0", "--layers", "2", "--drafts", "2")
    assert result.code == 0 and ModelWeights(target).shape.mtp_layers == 2
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"})
    assert f"  vllm serve {target} --speculative-config '{speculative}'" in result.out
    assert f"--model-path {target} --speculative-algorithm NEXTN --speculative-num-steps 2" in result.out


def test_command_of_a_model_with_a_block_drafter(mtpctl: Command, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "pair"
    result = mtpctl("add-drafter", str(folder), str(target), "--steps", "0", "--kind", "dflash", "--layers", "2", "--drafts", "5")
    assert result.code == 0, result.err
    settings = {"method": "dflash", "model": str(target / "drafter"), "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}
    assert result.out.splitlines() == [
        f"{target}: the model with its drafter; serve it with this command:",
        f"  vllm serve {target} --speculative-config '{json.dumps(settings)}'",
    ]
    dflash = ModelWeights(target).shape.dflash
    assert dflash is not None and dflash.layers == 2


# ---------------------------------------------------------------------------------------------------------- bad input


def no_source(folder: Path) -> tuple[list[str], str]:
    return ["elsewhere", "pair"], "SRC: there is no folder elsewhere; name a Hugging Face folder"


def no_config(folder: Path) -> tuple[list[str], str]:
    (folder / "config.json").unlink()
    return ["model", "pair"], "SRC: model has no config.json; name a Hugging Face model folder"


def target_exists(folder: Path) -> tuple[list[str], str]:
    return ["model", "rows.jsonl"], "DST: rows.jsonl exists; name another folder"


def target_inside(folder: Path) -> tuple[list[str], str]:
    return ["model", "model/pair"], "DST: model/pair is inside SRC; name a folder outside of it"


def has_drafter(folder: Path) -> tuple[list[str], str]:
    toy_folder(LLAMA_EAGLE3, folder.parent / "pair", 0, "fp32")
    return ["pair", "another"], "SRC: pair has a drafter already; train it with mtpctl train"


def has_mtp_layers(folder: Path) -> tuple[list[str], str]:
    toy_folder(MIMO, folder.parent / "mimo", 0, "fp32")
    change_config(folder.parent / "mimo", num_nextn_predict_layers=None)
    return ["mimo", "pair"], "SRC: mimo has a drafter already; train it with mtpctl train"


def no_data(folder: Path) -> tuple[list[str], str]:
    return ["model", "pair"], "--data: is required for training; name a file with prompts, or set --steps 0 for an untrained drafter"


def missing_data(folder: Path) -> tuple[list[str], str]:
    return ["model", "pair", "--data", "row.jsonl"], "data.path: "


def empty_data(folder: Path) -> tuple[list[str], str]:
    (folder.parent / "rows.jsonl").write_text("")
    return ["model", "pair", "--data", "rows.jsonl"], "data.path: "


def unknown_architecture(folder: Path) -> tuple[list[str], str]:
    change_config(folder, architectures=["OtherForCausalLM"])
    return ["model", "pair", "--data", "rows.jsonl"], "model config: architectures ['OtherForCausalLM'] is not a known family"


def no_end_token(folder: Path) -> tuple[list[str], str]:
    change_config(folder, eos_token_id=None)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        fields = json.loads((folder / name).read_text())
        del fields["eos_token"]
        (folder / name).write_text(json.dumps(fields))
    return ["model", "pair", "--data", "rows.jsonl"], "model.tokenizer: "


def no_tokenizer(folder: Path) -> tuple[list[str], str]:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    return ["model", "pair", "--data", "rows.jsonl"], "model.tokenizer: "


def no_responses(folder: Path) -> tuple[list[str], str]:
    return ["model", "pair", "--data", "rows.jsonl", "--self-generate", "0"], "data.columns.answer: rows.jsonl has no column 'answer'"


def several_layers(folder: Path) -> tuple[list[str], str]:
    message = "model.drafter.layers: an EAGLE-3 drafter has 1 layer, not 2"
    return ["model", "pair", "--data", "rows.jsonl", "--kind", "eagle3", "--layers", "2", "--drafts", "2"], message


def too_many_layers(folder: Path) -> tuple[list[str], str]:
    message = "model.drafter.layers: 5 exceeds the model's 4 layers, from which the drafter's layers are copied"
    return ["model", "pair", "--data", "rows.jsonl", "--kind", "dflash", "--layers", "5"], message


def no_mask_token(folder: Path) -> tuple[list[str], str]:
    change_config(folder, eos_token_id=None)
    return ["model", "pair", "--steps", "0", "--kind", "dflash"], "model config: eos_token_id is missing; add it"


def too_many_drafts(folder: Path) -> tuple[list[str], str]:
    message = "--drafts: 3 draft tokens need one layer that repeats, or 3 layers; --layers is 2"
    return ["model", "pair", "--data", "rows.jsonl", "--layers", "2"], message


def no_mtp_layers(folder: Path) -> tuple[list[str], str]:
    message = "model.drafter.kind: vLLM has no MTP layers for llama; use eagle3"
    return ["model", "pair", "--data", "rows.jsonl", "--kind", "mtp"], message


def quantized(folder: Path) -> tuple[list[str], str]:
    change_config(folder, quantization_config={"quant_method": "awq"})
    return ["model", "pair", "--steps", "0"], "model/config.json: quantization_config.quant_method 'awq' is not supported"


def damaged(folder: Path) -> tuple[list[str], str]:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return ["model", "pair", "--data", "rows.jsonl"], f"{file}: model.norm.weight: its data ends at byte"


def wrong_setting(folder: Path) -> tuple[list[str], str]:
    return ["model", "pair", "--data", "rows.jsonl", "--set", "rollout.temperature=-1"], "--set: rollout.temperature must be greater than 0"


MISTAKES = [
    no_source,
    no_config,
    target_exists,
    target_inside,
    has_drafter,
    has_mtp_layers,
    no_data,
    missing_data,
    empty_data,
    unknown_architecture,
    no_end_token,
    no_tokenizer,
    no_responses,
    several_layers,
    too_many_layers,
    no_mask_token,
    too_many_drafts,
    no_mtp_layers,
    quantized,
    damaged,
    wrong_setting,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_one_line_and_create_nothing(
    mtpctl: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Path], tuple[list[str], str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = mistake(folder)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    result = mtpctl("add-drafter", *arguments, *ON_CPU)
    assert result.code == 2, result.err
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert line.removeprefix("error: ").startswith(message), line
    assert "Traceback" not in result.err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and path.name.startswith("pair") and mistake is not has_drafter]


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--data", "rows.jsonl"]], ids=["untrained", "trained"])
def test_full_disk_is_one_line_and_leaves_nothing(
    mtpctl: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with full_disk():
        result = mtpctl("add-drafter", "model", "pair", *arguments, *ON_CPU)
    assert result.code == 2 and "cannot be written" in result.err and "Traceback" not in result.err, result.err
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() or path.stat().st_size) == ["model", "rows.jsonl"]


# ------------------------------------------------------------------------------------- from a folder to a served engine

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(
    sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=64 << 20,
    disable_log_stats=False, speculative_config=json.loads(sys.argv[2]),
)
(found,) = llm.generate(["12+12="], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
counts = [metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")]
print(json.dumps([list(found.outputs[0].token_ids), counts]))
"""
RUN = ["--steps", "8", "--self-generate", "24", "--plain"]
SETTINGS = [
    "rollout.max_tokens=16",
    "rollout.context=64",
    "rollout.kv_cache_bytes=67108864",
    "rollout.max_in_flight=8",
    "rollout.eager=true",
    "train.draft.batch_size=8",
    "train.checkpoint_every=1",
    "train.precision=fp32",
    "train.threads=1",
    "cluster.num_cpus=2",
    "cluster.device=cpu",
]


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["step"] for row in rows if row.get("phase") == "draft"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "kind"), [*((name, None) for name in MODELS), ("llama", "dflash")])
def test_two_commands_lead_to_a_stock_engine_that_speculates(name: str, kind: str | None, tmp_path: Path) -> None:
    """The first command is stopped by SIGTERM and resumes when it is repeated. The trunk's tensors equal the model's bit for bit."""
    folder = toy_folder(MODELS[name], tmp_path / "model", 0, "fp32")
    make_byte_tokenizer(folder)
    write_rows(tmp_path / "rows.jsonl")
    target, run = tmp_path / "pair", tmp_path / "pair.run"
    sets = [part for each in SETTINGS for part in ("--set", each)]
    options = ["--data", str(tmp_path / "rows.jsonl"), *RUN, *sets, *(["--kind", kind] if kind else [])]
    command = [sys.executable, "-m", "mtpctl", "add-drafter", str(folder), str(target), *options]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            end = time.monotonic() + 240
            while not steps_of(run):
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 143, log.read_text()
        finally:
            process.kill()
    assert not target.exists()
    samples = (run / "draft_samples.jsonl").read_bytes()
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert (run / "draft_samples.jsonl").read_bytes() == samples and samples.count(b"\n") == 24
    assert steps_of(run) == list(range(1, 9))
    before, after = ModelWeights(folder), ModelWeights(target)
    assert all(torch.equal(after[tensor].view(torch.int32), before[tensor].view(torch.int32)) for tensor in before)
    assert not (run / "checkpoints").exists()
    (line,) = [line for line in resumed.stdout.splitlines() if line.startswith("  vllm serve")]
    speculative = line.split("--speculative-config '")[1].removesuffix("'")
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    served = subprocess.run(
        [sys.executable, "-c", STOCK, target, speculative], capture_output=True, text=True, timeout=300, env=environment
    )
    assert served.returncode == 0, served.stderr[-4000:]
    tokens, (drafted, accepted) = json.loads(served.stdout.splitlines()[-1])
    assert len(tokens) == 24 and drafted > 0 and 0 <= accepted <= drafted
