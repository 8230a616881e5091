"""What surrounds a vLLM engine: variables that must be set before vLLM is imported, by device."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any, Literal

import pytest
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from mtpctl.convert.hf_folder import write_config
from mtpctl.errors import UserError
from mtpctl.plan.memory import GIB
from mtpctl.plan.placement import ENGINE_MEMORY_SHARE
from mtpctl.recipe.numerics import Numerics
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.vllm import engine
from mtpctl.rollout.vllm.engine import VllmEngine, compute_kv_cache_option
from mtpctl.rollout.vllm.settings import VllmSettings, build_engine_settings
from mtpctl.samples import GenerationRequest, Sample
from tests.fakes.toys import LLAMA_DFLASH, LLAMA_EAGLE3


def environment(device: Literal["cpu", "cuda"], **rollout: int) -> dict[str, str]:
    return build_engine_settings(VllmConfig(**rollout), model="m", precision="fp32", device=device).environment  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("device", "tp", "backend"), [("cuda", 1, "mp"), ("cuda", 2, "mp"), ("cpu", 1, None), ("cpu", 2, "mp")])
def test_ranks_of_an_engine_are_processes_of_its_own_host(device: Literal["cpu", "cuda"], tp: int, backend: str | None) -> None:
    """In a placement group, vLLM would choose Ray, which may place them on other hosts. A single rank on a CPU runs in the actor."""
    args = build_engine_settings(VllmConfig(tp=tp), model="m", precision="fp32", device=device).args
    assert args.get("distributed_executor_backend") == backend


def test_a_request_ends_at_its_own_end_tokens_whatever_the_engines_tokenizer_names() -> None:
    engine = VllmEngine.__new__(VllmEngine)
    engine._settings = build_engine_settings(VllmConfig(stop=["#"]), model="m", precision="fp32", device="cpu", tokenizer="t")
    params = engine._sampling_params(GenerationRequest(Sample("p", "g", [1]), 8, stop=["#"], stop_token_ids=[5, 6]), 8)
    assert (params.ignore_eos, params.stop_token_ids, params.stop) == (True, [5, 6], ["#"])


def settings_of(outside: int | None, **rollout: object) -> VllmSettings:
    config = VllmConfig(**rollout)  # type: ignore[arg-type]
    return build_engine_settings(config, model="m", precision="bf16", device="cuda", outside_cache=outside)


def test_the_cache_of_an_engine_that_shares_its_gpu_is_the_rest_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", classmethod(lambda cls, device_id=0: 80 * GIB))
    assert compute_kv_cache_option(settings_of(3 * GIB, gpu_memory=0.25)) == {"kv_cache_memory_bytes": 17 * GIB}
    assert compute_kv_cache_option(settings_of(None, gpu_memory=0.25)) == {}, "vLLM measures the memory of an engine that is alone"
    assert compute_kv_cache_option(settings_of(3 * GIB, kv_cache_bytes=GIB)) == {}
    with pytest.raises(UserError, match=r"rollout.gpu_memory: 0.03 of the GPU leaves no memory for a KV cache after 3.0 GiB of weights"):
        compute_kv_cache_option(settings_of(3 * GIB, gpu_memory=0.03))
    assert settings_of(None).args["gpu_memory_utilization"] == ENGINE_MEMORY_SHARE


@pytest.mark.parametrize(("method", "has_drafter"), [("model", True), ("ngram", False)])
def test_only_a_drafter_with_weights_receives_them(method: Literal["model", "ngram"], has_drafter: bool) -> None:
    config = VllmConfig(speculation=SpeculationConfig(method=method, num_tokens=3))
    settings = build_engine_settings(config, model="m", precision="fp32", device="cpu")
    assert settings.args["speculative_config"]["num_speculative_tokens"] == 3
    assert settings.has_drafter == has_drafter


@pytest.mark.parametrize(("method", "config"), [("eagle3", LLAMA_EAGLE3), ("dflash", LLAMA_DFLASH)])
def test_folder_with_its_own_drafter_is_served_with_it(method: str, config: dict[str, Any], tmp_path: Path) -> None:
    write_config(config, tmp_path)
    settings = build_engine_settings(VllmConfig(), model=str(tmp_path), precision="fp32", device="cpu")
    assert settings.args["speculative_config"] | {"num_speculative_tokens": 1} == {
        "method": method,
        "model": str(tmp_path / "drafter"),
        "num_speculative_tokens": 1,
        "draft_sample_method": "greedy",
    }


def graphs_of(*, host_limited: bool = True, k: int = 0, auto: bool = False, **rollout: object) -> list[int] | None:
    config = VllmConfig(**rollout, speculation=SpeculationConfig(num_tokens=k, auto=auto))  # type: ignore[arg-type]
    args = build_engine_settings(config, model="m", precision="bf16", device="cuda", host_limited=host_limited).args
    return args.get("compilation_config", {}).get("cudagraph_capture_sizes")


def test_a_small_models_steps_are_replayed_beyond_vllms_512_tokens() -> None:
    """All decoding steps of the engine's slots, with their drafts, and steps with prefill."""
    sizes = graphs_of(max_in_flight=1024)
    assert sizes is not None and {1, 256, 512, 1024, 2048} <= set(sizes) and max(sizes) == 2048
    assert max(larger - size for size, larger in itertools.pairwise(sizes)) <= 128
    drafted = graphs_of(max_in_flight=1000, k=2)
    assert drafted is not None and {3, 3 * 256, 3 * 1000} <= set(drafted), "vLLM needs multiples of a request's tokens"
    assert graphs_of(host_limited=False, max_in_flight=1024) is None
    assert graphs_of(eager=True) is None
    assert graphs_of(engine_args={"compilation_config": {"mode": 0}}) is None, "the recipe's own options win"
    for option in ({"cudagraph_capture_sizes": [1, 2]}, {"max_cudagraph_capture_size": 2}):
        assert graphs_of(engine_args=option) is None, "vLLM rejects sizes in two places"
        assert graphs_of(engine_args=option, k=2, auto=True) is None
    limited = graphs_of(max_in_flight=64, engine_args={"max_num_batched_tokens": 1024})
    assert limited is not None and max(limited) == 1024


@pytest.mark.parametrize("eager", [False, True])
def test_bitwise_engine_on_a_gpu_is_not_compiled(eager: bool) -> None:
    config = VllmConfig(eager=eager)
    settings = build_engine_settings(config, model="m", precision="bf16", device="cuda", numerics="bitwise", host_limited=True)
    compilation = settings.args["compilation_config"]
    assert compilation["mode"] == 0
    assert compilation.get("cudagraph_mode") == (None if eager else "FULL_AND_PIECEWISE")
    assert settings.environment.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == (None if eager else "1")
    assert ("cudagraph_capture_sizes" in compilation) == (not eager)
    assert settings.args["attention_backend"] == "FLASH_ATTN" and settings.args["moe_backend"] == "triton"
    assert settings.args["mamba_ssm_cache_dtype"] == "float32"
    assert settings.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert {settings.environment[f"VLLM_ALLREDUCE_USE_{name}"] for name in ("FLASHINFER", "SYMM_MEM")} == {"0"}
    usual = build_engine_settings(config, model="m", precision="bf16", device="cuda")
    assert "compilation_config" not in usual.args
    assert not {"VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH"} & usual.environment.keys()


def test_default_engine_after_a_bitwise_one_has_none_of_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def stop() -> None:
        raise Started

    monkeypatch.setattr(os, "environ", dict(os.environ) | {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "INFO"})
    monkeypatch.setattr(engine, "_replaced_variables", {}, raising=False)
    monkeypatch.setattr(engine, "check_plugin", stop)
    switches = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_LOGGING_LEVEL"

    def start(numerics: Numerics) -> list[str | None]:
        settings = build_engine_settings(VllmConfig(), model="m", precision="bf16", device="cuda", numerics=numerics)
        with pytest.raises(Started):
            asyncio.run(engine.VllmEngine.start(settings))
        return [os.environ.get(name) for name in switches]

    assert start("bitwise") == ["1", "1", "WARNING"]
    assert start("bitwise") == ["1", "1", "WARNING"]
    assert start("default") == ["0", None, "WARNING"]
    assert start("bitwise") == ["1", "1", "WARNING"]
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"
    assert start("default") == ["0", "0", "WARNING"], "what others set since is kept"


def test_bitwise_engine_checks_its_gpu_and_dtype_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(engine, "_replaced_variables", {})
    monkeypatch.setattr(engine.cores, "start_fork_server", lambda: None)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_name", classmethod(lambda cls: "a GPU"))
    for capability, precision, message in (((8, 9), "bf16", r"got a GPU \(8\.9\)"), ((9, 0), "fp32", "on a GPU, got float32")):
        monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda cls, c=capability: DeviceCapability(*c)))
        settings = build_engine_settings(VllmConfig(), model="m", precision=precision, device="cuda", numerics="bitwise")  # type: ignore[arg-type]
        with pytest.raises(UserError, match=message):
            asyncio.run(VllmEngine.start(settings))
