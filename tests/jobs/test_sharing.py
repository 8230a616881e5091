"""The plan shows what shares a GPU, with memory, and warns of too few cores and of processes that take turns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtpctl.cluster.hosts import Host
from mtpctl.families.reading import shape_of
from mtpctl.jobs import sharing
from mtpctl.jobs.sharing import shared_gpu_lines, sharing_cautions
from mtpctl.plan.memory import GIB, engine_memory, trainer_memory
from mtpctl.plan.placement import place
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe

THREE = ["cluster.device=cuda", "sync.transport=ipc", "rollout.kv_cache_bytes=null", "cluster.gpu_gib=80", "cluster.num_gpus=1"]
THREE += ["train.gpus=0.1", "rollout.gpus=0.3", "rollout.replicas=3"]


def recipe(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=[*THREE, *sets]).recipe


def test_a_shared_gpu_is_listed_with_the_memory_of_each_process() -> None:
    shared = recipe()
    shape = shape_of(shared.model.config or {})
    (line,) = shared_gpu_lines(shared, shape, place(shared), [])
    assert "host 0, GPU 0: trainer-0" in line
    # 0.95 of 0.3 of 80 GiB for each engine.
    assert [f"rollout-{index} 22.8 GiB" in line for index in range(3)] == [True] * 3
    total = trainer_memory(shared, shape).total / GIB + 3 * 22.8
    assert line.endswith(f"; {total:.1f} GiB of 80 GiB")


def test_a_given_cache_is_listed_with_weights_and_reserve() -> None:
    shared = recipe(f"rollout.kv_cache_bytes={2 * GIB}")
    shape = shape_of(shared.model.config or {})
    memory = engine_memory(shared, shape)
    assert memory.reserve > 0
    (line,) = shared_gpu_lines(shared, shape, place(shared), ["10.0.0.1"])
    assert f"host 10.0.0.1, GPU 0: trainer-0 184.1 MiB, rollout-0 {(memory.weights + memory.reserve + 2 * GIB) / GIB:.1f} GiB" in line


def test_no_line_for_gpus_that_are_not_shared_or_of_unknown_size() -> None:
    alone = recipe("rollout.replicas=1", "rollout.gpus=1", "train.gpus=1", "cluster.num_gpus=2")
    shape = shape_of(alone.model.config or {})
    assert not list(shared_gpu_lines(alone, shape, place(alone), []))
    unknown = recipe("cluster.gpu_gib=null")
    assert not list(shared_gpu_lines(unknown, shape, place(unknown), []))


def test_cautions_name_missing_cores_and_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = recipe()
    placement = place(shared)
    assert sharing_cautions(shared, placement) == [], "without a GPU here, the plan is for another machine"
    monkeypatch.setattr(sharing, "gpu_memory_gib", lambda: 80.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    tool = tmp_path / "nvidia-cuda-mps-control"
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    cores, mps = sharing_cautions(shared, placement)
    assert "need 11 cores of host 0, which has 4" in cores
    assert mps.startswith("cluster: 4 processes share a GPU and take turns on it; with CUDA MPS")
    (tmp_path / "pipes").mkdir()
    (tmp_path / "pipes" / "control").write_text("")
    assert sharing_cautions(shared, placement) == [cores]
    assert sharing_cautions(shared, placement, [Host(64, 8)]) == []
