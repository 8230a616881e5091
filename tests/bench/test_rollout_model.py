"""`bench rollout --model FOLDER`: loads of fixed lengths, CPU time of process trees, and a whole run at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mtpctl.bench.rollout_engines import TINY, write_cycle_model
from mtpctl.bench.rollout_model import (
    OFFLINE,
    Arm,
    Measurement,
    ModelBench,
    Options,
    _make_result,
    cpu_seconds,
    default_arms,
    format_row,
    make_prompts,
    make_workload,
    run_benchmark,
)
from mtpctl.data.tokenizers import load_plain_tokenizer, make_byte_tokenizer
from mtpctl.errors import UserError
from tests.fakes.commands import mtpctl as mtpctl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = write_cycle_model(tmp_path_factory.mktemp("model"), TINY, acceptance=0.75, device="cpu")
    make_byte_tokenizer(created)
    return created


def test_prompts_are_ordinary_tokens_or_texts_of_a_file(folder: Path) -> None:
    tokenizer = load_plain_tokenizer(folder)
    prompts = make_prompts(Options(folder, "cpu", 200), 20)
    assert {len(prompt) for prompt in prompts} == {200} and len(set(map(tuple, prompts))) == 20
    assert not {token for prompt in prompts for token in prompt} & tokenizer.special_ids
    texts = make_prompts(Options(folder, "cpu", prompts=("one", "two more")), 3)
    assert [tokenizer.decode(ids) for ids in texts] == ["one", "two more", "one"]


def test_a_load_fills_all_slots_and_repeats_the_prompt_of_a_group(folder: Path) -> None:
    options = Options(folder, "cpu", 8, 40, group=4, requests=3)
    prompts = make_prompts(options, 48)
    workload = make_workload(options, prompts, 32, 2)
    assert len(workload.prompts) == len(workload.lengths) == 32 * 3 * 2
    assert [workload.prompts[number] for number in range(4)] == [prompts[0]] * 4 and workload.prompts[4] == prompts[1]
    assert min(workload.lengths) >= 10 and max(workload.lengths) <= options.max_response_tokens == 70
    assert sum(workload.lengths) / len(workload.lengths) == pytest.approx(40, rel=0.15)
    assert workload == make_workload(options, prompts, 32, 2), "each way gets the same requests"


def test_cpu_time_includes_descendants_and_no_others() -> None:
    spin = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nprint(flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds([process.pid]) >= 0.5
        assert cpu_seconds([os.getpid()]) >= cpu_seconds([process.pid]), "it is a descendant of this process"
        assert cpu_seconds([]) == 0
    finally:
        process.communicate(b"\n", timeout=60)


def test_a_row_compares_with_vllm_in_the_same_round() -> None:
    arm = Arm("3 engines", 3, 256)
    rounds = [Measurement(2.0, 400, loop_cpu_s=0.2, engines_cpu_s=9.0), Measurement(4.0, 400, loop_cpu_s=0.4, engines_cpu_s=18.0)]
    result = _make_result(arm, rounds, [Measurement(8.0, 400), Measurement(8.0, 400)])
    assert (result.rates, result.ratios) == ((200.0, 100.0), (4.0, 2.0))
    assert (result.loop, result.busy) == (pytest.approx(0.1), pytest.approx(1.5))
    assert format_row(result) == "| 3 engines | 256 | 150 (100 – 200) | 3.00 | 0.10 | 1.50 |"
    assert format_row(_make_result(Arm(OFFLINE, 0, 8), [Measurement(1.0, 5)], None)) == "| vLLM LLM.generate | 8 | 5 (5 – 5) | – | – | – |"


def test_arms_with_the_same_engines_share_them_and_the_gpu(folder: Path) -> None:
    arms = [*default_arms([64, 256], 3), Arm("one engine, at once", 1, 256, immediate_admission=True)]
    assert [(arm.name, arm.in_flight) for arm in arms[:3]] == [(OFFLINE, 64), ("one engine", 64), ("3 engines", 64)]
    bench = ModelBench(Options(folder, "cuda", 8, 12), arms)
    assert bench.num_engines == 10 and bench.share == 0.1
    recipe = bench.recipe((3, 256, '{"distributed_executor_backend": "mp"}'))
    assert recipe.rollout.replica_range.min == 3 and recipe.rollout.gpus == 0.1
    assert recipe.rollout.engine_args == {"distributed_executor_backend": "mp"}


def test_prompts_and_responses_must_fit_the_model(folder: Path) -> None:
    with pytest.raises(UserError, match=r"--prompt: prompts and responses of up to 700 tokens take 1108 positions, the model has 1024"):
        ModelBench(Options(folder, "cpu", 400, 400), default_arms([8], 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "USERS", "--part", "path"], "--part: applies to the benchmark's own model"),
        (["--model", "USERS", "--prompts", "USERS/none.txt"], "--prompts: "),
        (["--model", "USERS", "--prompts", "USERS/empty.txt"], "--prompts: "),
        (["--model", "USERS", "--prompt", "3000"], "--prompt: prompts and responses of up to "),
        (["--engines", "2"], "--engines: needs --model with your model's folder"),
    ],
)
def test_options_of_a_users_model_are_checked_before_anything_starts(
    mtpctl: Any, folder: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "mtpctl_cycle"}))
    (tmp_path / "empty.txt").write_text("\n")
    result = mtpctl("bench", "rollout", *(each.replace("USERS", str(tmp_path)) for each in options))
    assert result.code == 2 and result.err.startswith(f"error: {message}"), result.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_is_measured_with_one_engine_and_without_mtpctl(folder: Path) -> None:
    lines: list[str] = []
    began = time.monotonic()
    results = run_benchmark(Options(folder, "cpu", 8, 12, group=4, requests=2, rounds=1), default_arms([8], 1), lines.append)
    assert [result.what for result in results] == [OFFLINE, "one engine"] and lines[1:] == [format_row(result) for result in results]
    vllm, ours = results
    assert vllm.ratios == (1.0,) and ours.ratios == (ours.rates[0] / vllm.rates[0],)
    assert 0 < (ours.loop or 0) <= 1 and 0 < (ours.busy or 0) <= 2
    assert sum(12 * 16 / rate for result in results for rate in result.rates) < time.monotonic() - began
