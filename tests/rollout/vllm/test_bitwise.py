"""`numerics: bitwise`: a real engine's log-probs equal the trainer's to the last bit, whatever steps computed them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtpctl.recipe.section import ParallelConfig
from tests.fakes.bitwise import FAMILIES, differences, folder_of, generate, versions
from tests.fakes.engines import Loop
from tests.fakes.interpreted import run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_linear_attention_is_exact_after_an_engine_with_default_numerics(run: Loop, tmp_path: Path) -> None:
    """vLLM loads plugins once per process, here for the first engine. The first test of this file, so that no other one loads them."""
    run(generate(versions(tmp_path / "first", 1), tmp_path / "store", 4, k=0, numerics="default"), 140)
    folders = versions(tmp_path / "second", 1, "qwen3.5")
    samples, _counts = run(generate(folders, tmp_path / "other", 4, k=1), 140)
    assert differences(folders, samples).max() == 0.0


def test_log_probs_equal_the_trainers_through_chunks_drafts_cache_hits_preemption_aborts_and_syncs(run: Loop, tmp_path: Path) -> None:
    folders = versions(tmp_path, 3)
    samples, counts = run(generate(folders, tmp_path / "store", 24, k=3), 200)
    assert counts.preempted and counts.cached and counts.aborted and counts.chunked and counts.accepted, counts
    assert {span.version for sample in samples for span in sample.version_spans} == {0, 1, 2}
    errors = differences(folders, samples)
    assert len(errors) == 2 * sum(len(sample.response_ids) for sample in samples)
    assert errors.max() == 0.0
    assert differences(folders[:1], samples, numerics="default").max() > 0.0, "the default sums round differently"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("mimo", "qwen3.5")])
def test_log_probs_and_routes_equal_the_trainers_in_fp32(family: str, run: Loop, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    samples, counts = run(generate([folder], tmp_path / "store", 24, k=3 if folder.shape.mtp_layers else 0), 200)
    assert counts.cached and counts.chunked, counts
    assert all((sample.routes is not None) == (folder.shape.moe is not None) for sample in samples)
    assert differences([folder], samples).max() == 0.0
    assert differences([folder], samples, numerics="default").max() > 0.0, "the default sums round differently"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_experts_equal_the_trainers_after_syncs(run: Loop, tmp_path: Path) -> None:
    folders = versions(tmp_path, 3, "qwen3-moe")
    samples, _counts = run(generate(folders, tmp_path / "store", 24, k=3), 200)
    assert {span.version for sample in samples for span in sample.version_spans} == {0, 1, 2}
    assert differences(folders, samples).max() == 0.0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("k", range(4))
def test_linear_attention_equals_the_trainers_with_drafts_preemption_aborts_and_syncs(k: int, run: Loop, tmp_path: Path) -> None:
    folders = versions(tmp_path, 3, "qwen3.5")
    samples, counts = run(generate(folders, tmp_path / "store", 48, k=k), 280)
    assert counts.aborted and counts.chunked and (counts.accepted and counts.preempted if k else counts.cached), counts
    assert differences(folders, samples).max() == 0.0
    assert differences(folders[:1], samples, numerics="default").max() > 0.0, "the default sums round differently"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "k"), [*(("mimo", k) for k in range(4)), ("qwen2", 0), ("qwen3", 3), ("llama", 1)])
def test_log_probs_of_an_engine_of_two_ranks_equal_those_of_one_process(
    family: str, k: int, run: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the core forks its ranks
    # MiMo's ranks share a key-value head.
    folders = versions(tmp_path, 3 if family == "mimo" else 1, family, even=family != "mimo")
    samples, counts = run(generate(folders, tmp_path / "store", 24, k=k, tp=2), 500)
    assert counts.cached and (family != "mimo" or (counts.aborted and (counts.accepted or not k))), counts
    errors = differences(folders, samples)
    assert len(errors) == 2 * sum(len(sample.response_ids) for sample in samples)
    assert errors.max() == 0.0
    assert differences(folders[:1], samples, parallel=ParallelConfig(tp=2, sequence_parallel=True)).max() == 0.0
    assert differences(folders, samples, numerics="default").max() > 0.0, "the default sums round differently"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "k", "splits_tokens"), [("mimo", 0, False), ("mimo", 3, True), ("qwen2", 0, True), ("llama", 3, True)])
def test_log_probs_of_engine_and_trainer_on_two_gpus_are_equal(family: str, k: int, splits_tokens: bool, run: Loop, tmp_path: Path) -> None:
    folders = versions(tmp_path, 1, family, even=True)
    samples, counts = run(generate(folders, tmp_path / "store", 200, k=k, device="cuda", tp=2), 800)
    assert counts.cached and (not k or counts.drafted), counts
    parallel = ParallelConfig(tp=2, sequence_parallel=splits_tokens)
    assert differences(folders, samples, device="cuda", parallel=parallel).max() == 0.0
    default = differences(folders, samples, numerics="default", device="cuda", parallel=parallel)
    assert default.max() > 0.0, "the default kernels round differently"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_the_trainers_in_bf16_in_the_interpreter(family: str) -> None:
    file = Path(__file__).with_name("interpreted_bitwise.py")
    run_interpreted(f"{file}::test_log_probs_equal_the_trainers[{family}]", seconds=880)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "k", "method"),
    [
        ("mimo", 0, "greedy"),
        ("mimo", 1, "greedy"),
        ("mimo", 3, "greedy"),
        ("mimo", 3, "probabilistic"),
        ("qwen2", 0, "greedy"),
        ("qwen3", 3, "greedy"),
        ("qwen3-moe", 3, "greedy"),
        ("llama", 3, "greedy"),
        ("qwen3.5", 0, "greedy"),
        ("qwen3.5", 3, "greedy"),
    ],
)
def test_log_probs_equal_the_trainers_in_bf16_with_cuda_graphs(family: str, k: int, method: str, run: Loop, tmp_path: Path) -> None:
    folders = versions(tmp_path, 1, family)
    samples, counts = run(generate(folders, tmp_path / "store", 200, k=k, method=method, device="cuda"), 800)
    assert counts.cached and (not k or counts.drafted) and (family != "mimo" or not k or counts.accepted), counts
    assert differences(folders, samples, device="cuda").max() == 0.0
    assert differences(folders, samples, numerics="default", device="cuda").max() > 0.0, "the default kernels round differently"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("k", "method"), [*((k, "greedy") for k in range(4)), (1, "probabilistic"), (3, "probabilistic")])
def test_hundreds_of_responses_with_all_numbers_of_drafts(k: int, method: str, run: Loop, tmp_path: Path) -> None:
    folders = versions(tmp_path, 4)
    samples, counts = run(generate(folders, tmp_path / "store", 350, k=k, method=method), 600)
    assert counts.preempted and counts.cached and counts.aborted and counts.chunked and (not k or counts.accepted), counts
    assert differences(folders, samples).max() == 0.0
