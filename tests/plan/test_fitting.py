"""Remedies for ranks that do not fit are reported with their gain, and suffice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtpctl.cluster.hosts import Host
from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.plan import fitting
from mtpctl.plan.fitting import Misfit, apply_change, find_misfits, gpu_gib_needed, shared_gpu_lines, sharing_cautions
from mtpctl.plan.memory import GIB, engine_memory, logprob_memory, teacher_memory, trainer_memory
from mtpctl.plan.placement import place
from mtpctl.recipe.checks import list_complaints
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.fits import check_fits

MIMO = shape_of(hub_config("XiaomiMiMo/MiMo-7B-RL"))
ONE_GPU = "train.parallel={tp: 1}"


def recipe(*sets: str) -> Recipe:
    return load_recipe("mimo7b_mtp", sets=sets).recipe


def only(created: Recipe) -> Misfit:
    (misfit,) = find_misfits(created, MIMO)
    return misfit


def test_the_gain_of_a_remedy_is_the_reduction_of_the_memory() -> None:
    created = recipe(ONE_GPU)
    needs = trainer_memory(created, MIMO).total
    for remedy in only(created).remedies:
        assert remedy.gain == needs - trainer_memory(apply_change(created, remedy.change), MIMO).total > 0
        assert remedy.fits == (needs - remedy.gain <= 139 * GIB)


def test_the_error_names_a_sufficient_remedy_without_more_gpus() -> None:
    misfit = only(recipe("cluster.gpu_gib=40", "rollout.gpu_memory=0.9"))
    gains = [remedy.gain for remedy in misfit.remedies]
    assert gains == sorted(gains, reverse=True) and len(gains) >= 6
    assert misfit.remedies[0].more_gpus, "tp=8 gains most, on twice as many GPUs"
    enough = next(remedy for remedy in misfit.remedies if remedy.fits and not remedy.more_gpus)
    assert str(misfit.error).endswith(f"set {enough}, which gains {enough.gain / GIB:.1f} GiB")


def test_remedies_pass_the_recipes_checks_and_report_further_gpus() -> None:
    sets = {str(remedy): remedy for remedy in only(recipe(ONE_GPU)).remedies}
    for text, remedy in sets.items():
        created = recipe(ONE_GPU, *text.split())
        assert not list(list_complaints(created)) and created == apply_change(recipe(ONE_GPU), remedy.change)
    assert sets["train.parallel.tp=2 train.parallel.sequence_parallel=true"].more_gpus
    assert not sets["train.recompute=full"].more_gpus and not sets["train.offload.optimizer=true"].more_gpus


@pytest.mark.parametrize("gpu", [90, 60, 50])
def test_remedies_are_combined_if_no_single_one_suffices(gpu: int) -> None:
    created = recipe(ONE_GPU, f"cluster.gpu_gib={gpu}", "rollout.gpu_memory=0.5")
    misfit = only(created)
    assert not any(remedy.fits for remedy in misfit.remedies) and len(misfit.combination) > 1
    for remedy in misfit.combination:
        created = apply_change(created, remedy.change)
    check_fits(created, MIMO)


def test_remedies_of_an_engine_are_a_larger_share_or_two_ranks() -> None:
    misfit = only(recipe("rollout.gpu_memory=0.1"))
    assert {"rollout.tp=2": True, "rollout.gpu_memory=0.12": True}.items() <= {str(r): r.fits for r in misfit.remedies}.items()
    for text in ("rollout.gpu_memory=0.12", "rollout.tp=2"):
        check_fits(recipe("rollout.gpu_memory=0.1", text), MIMO)


def test_remedies_of_a_cache_in_bytes_are_sizes_that_fit() -> None:
    for requested in (1 << 20, 128 * GIB):
        created = recipe(f"rollout.kv_cache_bytes={requested}")
        remedy = next(remedy for remedy in only(created).remedies if "rollout.kv_cache_bytes" in remedy.change)
        assert remedy.fits
        check_fits(apply_change(created, remedy.change), MIMO)


def test_remedies_of_a_log_prob_rank_and_a_shared_gpu_are_shares() -> None:
    shares = ["logprob.gpus=0.1", "rollout.gpu_memory=0.8"]
    remedy = next(remedy for remedy in only(recipe(*shares)).remedies if "logprob.gpus" in remedy.change)
    assert remedy.fits and remedy.change["logprob.gpus"] == 0.14
    shared = only(recipe("logprob.gpus=0.3", "rollout.gpu_memory=0.8"))
    assert (shared.rank, str(shared.remedies[0]), shared.remedies[0].fits) == ("shared_card", "rollout.gpu_memory=0.7", True)


def test_gpu_needed_is_the_smallest_gpu_that_fits() -> None:
    for sets in ([ONE_GPU], ["logprob.gpus=0.1"], ["rollout.gpu_memory=0.1"]):
        created = recipe(*sets, "cluster.gpu_gib=null")
        needed = gpu_gib_needed(created, MIMO)
        assert not list(find_misfits(apply_change(created, {"cluster.gpu_gib": needed * 1.001}), MIMO))
        assert list(find_misfits(apply_change(created, {"cluster.gpu_gib": needed * 0.99}), MIMO))


def test_an_engine_without_room_on_the_trainers_gpu_is_an_error_that_a_remedy_resolves() -> None:
    """MiMo-7B's trainer on four ranks leaves a tenth of each GPU, which does not hold the engine's weights."""
    sets = ["train.gpus=0.9", "rollout.on_trainer_gpus=1", "logprob.standalone=false", "sync.transport=ipc"]
    misfit = only(recipe(*sets))
    assert misfit.rank == "rollout_rank_on_trainer_gpu"
    assert str(misfit.error).startswith("rollout.on_trainer_gpus: 13.2 GiB of the GPU are too small for ")
    assert str(misfit.error).endswith("; lower train.gpus, or set on_trainer_gpus: 0")
    remedies = {str(remedy): remedy for remedy in misfit.remedies}
    assert remedies["rollout.on_trainer_gpus=0"].fits and remedies["rollout.on_trainer_gpus=0"].more_gpus
    for text, remedy in remedies.items():
        if remedy.fits:
            check_fits(recipe(*sets, *text.split()), MIMO)


THREE = ["cluster.device=cuda", "sync.transport=ipc", "rollout.kv_cache_bytes=null", "cluster.gpu_gib=80", "cluster.num_gpus=1"]
THREE += ["train.gpus=0.1", "rollout.gpus=0.3", "rollout.replicas=3"]


def tiny(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=[*THREE, *sets]).recipe


def test_a_shared_gpu_is_listed_with_the_memory_of_each_process() -> None:
    shared = tiny()
    shape = shape_of(shared.model.config or {})
    (line,) = shared_gpu_lines(shared, shape, place(shared), [])
    assert "host 0, GPU 0: trainer-0" in line
    # 0.95 of 0.3 of 80 GiB for each engine.
    assert [f"rollout-{index} 22.8 GiB" in line for index in range(3)] == [True] * 3
    total = trainer_memory(shared, shape).total / GIB + 3 * 22.8
    assert line.endswith(f"; {total:.1f} GiB of 80 GiB")


def test_configured_cache_is_listed_with_weights_and_reserve() -> None:
    shared = tiny(f"rollout.kv_cache_bytes={2 * GIB}")
    shape = shape_of(shared.model.config or {})
    memory = engine_memory(shared, shape)
    assert memory.reserve > 0
    (line,) = shared_gpu_lines(shared, shape, place(shared), ["10.0.0.1"])
    trainer, engine = trainer_memory(shared, shape).total, memory.weights + memory.reserve + 2 * GIB
    assert f"host 10.0.0.1, GPU 0: trainer-0 {trainer / 2**20:.1f} MiB, rollout-0 {engine / GIB:.1f} GiB" in line


def test_no_line_for_gpus_that_are_not_shared_or_of_unknown_size() -> None:
    alone = tiny("rollout.replicas=1", "rollout.gpus=1", "train.gpus=1", "cluster.num_gpus=2")
    shape = shape_of(alone.model.config or {})
    assert not list(shared_gpu_lines(alone, shape, place(alone), []))
    unknown = tiny("cluster.gpu_gib=null")
    assert not list(shared_gpu_lines(unknown, shape, place(unknown), []))


TEACHER = "train.rl.teacher={path: some/teacher, gpus: 0.1}"


def test_a_teacher_that_does_not_fit_its_share_is_an_error_that_a_remedy_resolves() -> None:
    """A teacher of MiMo-7B's shape needs as much as a log-prob rank without MTP layers and without a second copy of the weights."""
    created = recipe(TEACHER, "train.lora={rank: 8, alpha: 16, targets: [linear_qkv]}", "sync.sections=[adapter, draft]")
    (misfit,) = find_misfits(created, MIMO, teacher=MIMO)
    server = recipe("logprob.keep_previous=false", "mtp.mode=off", "rollout.speculation.num_tokens=0")
    needed = logprob_memory(server, MIMO).total
    assert misfit.rank == "teacher_rank" and misfit.shortfall == needed - int(13.9 * GIB)
    assert str(misfit.error) == f"train.rl.teacher.gpus: a rank needs {needed / GIB:.0f} GiB, but its share is 14 GiB; raise it"
    remedy = next(remedy for remedy in misfit.remedies if "train.rl.teacher.gpus" in remedy.change)
    assert remedy.fits
    changed = apply_change(created, remedy.change)
    assert not list(find_misfits(changed, MIMO, teacher=MIMO)) and not list(find_misfits(created, MIMO)), "its shape is unknown"


def test_gpu_needed_includes_the_teacher() -> None:
    created = recipe(TEACHER)
    needed = teacher_memory(created, MIMO).total / 0.1 / GIB
    assert gpu_gib_needed(created, MIMO, teacher=MIMO) == pytest.approx(needed)
    assert gpu_gib_needed(created, MIMO) < needed


def test_shared_gpu_of_a_teacher_names_its_own_memory() -> None:
    """The teacher has another shape than the policy."""
    shared = tiny("rollout.replicas=1", "train.rl.teacher={path: some/teacher, gpus: 0.25}")
    shape = shape_of(shared.model.config or {})
    lines = list(shared_gpu_lines(shared, shape, place(shared), [], teacher=MIMO))
    assert f"teacher-0 {teacher_memory(shared, MIMO).total / GIB:.1f} GiB" in "".join(lines)
    assert "teacher-0 of unknown size" in "".join(shared_gpu_lines(shared, shape, place(shared), []))


def test_a_run_without_rl_needs_no_memory_for_a_log_prob_server() -> None:
    created = recipe("logprob.gpus=0.1")
    assert [misfit.rank for misfit in find_misfits(created, MIMO)] == ["logprob_rank"]
    assert not list(find_misfits(apply_change(created, {"train.stages": ["draft"]}), MIMO))


def test_cautions_name_missing_cores_and_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tiny()
    placement = place(shared)
    assert sharing_cautions(shared, placement) == [], "without a GPU here, the plan is for another machine"
    monkeypatch.setattr(fitting, "gpu_memory_gib", lambda: 80.0)
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
