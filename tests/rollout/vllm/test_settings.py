"""What surrounds a vLLM engine: variables that must be set before vLLM is imported, by device."""

from __future__ import annotations

from typing import Literal

import pytest

from mtpctl.recipe.rollout import VllmConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import engine_settings
from mtpctl.samples import GenerationRequest, Sample


def environment(device: Literal["cpu", "cuda"], **rollout: int) -> dict[str, str]:
    return engine_settings(VllmConfig(**rollout), model="m", precision="fp32", device=device).environment  # type: ignore[arg-type]


@pytest.mark.parametrize(("threads", "message"), [(0, "1"), (4, "4")])
def test_threads_set_by_a_launcher_are_ignored_on_gpus(threads: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert environment("cuda", threads=threads)["OMP_NUM_THREADS"] == message


def test_cpu_threads_default_to_torch_unless_set() -> None:
    assert "OMP_NUM_THREADS" not in environment("cpu")
    named = environment("cpu", threads=2)
    assert (named["OMP_NUM_THREADS"], named["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")


def test_gpu_workers_are_spawned_and_cpu_cores_run_in_the_actor() -> None:
    assert environment("cuda")["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment("cuda")
    assert environment("cpu")["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment("cpu")
    assert environment("cpu", tp=2)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind", "ranks share the NUMA node of a small machine"


def test_ranks_of_an_engine_are_processes_of_its_own_host() -> None:
    """vLLM would take Ray where the engine's actor sits in a placement group, and with it other hosts."""
    of = [engine_settings(VllmConfig(tp=tp), model="m", precision="fp32", device="cuda").args for tp in (1, 2)]
    assert [args.get("distributed_executor_backend") for args in of] == [None, "mp"]


def test_a_request_ends_at_its_own_end_tokens_whatever_the_engines_tokenizer_names() -> None:
    engine = VllmEngine.__new__(VllmEngine)
    engine._settings = engine_settings(VllmConfig(stop=["#"]), model="m", precision="fp32", device="cpu", tokenizer="t")
    params = engine._sampling(GenerationRequest(Sample("p", "g", [1]), 8, stop=["#"], stop_token_ids=[5, 6]), 8)
    assert (params.ignore_eos, params.stop_token_ids, params.stop) == (True, [5, 6], ["#"])
