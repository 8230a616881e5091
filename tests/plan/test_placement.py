"""Ranks are placed with their CPUs and GPUs, engines are not split, and too few GPUs are an error."""

from __future__ import annotations

from collections import Counter

import pytest

from mtpctl.errors import ClusterResources, UserError
from mtpctl.plan.placement import Host, Placement, core_shortage, max_engines, place
from mtpctl.recipe.loading import load_recipe


def placed(*sets: str, name: str = "mimo7b_mtp", hosts: list[Host] | None = None) -> Placement:
    return place(load_recipe(name, sets=sets).recipe, hosts)


def test_mimo_is_placed_on_one_host_of_eight_gpus() -> None:
    placement = placed()
    assert Counter(actor.role for actor in placement.actors) == {"trainer": 4, "rollout": 3, "logprob": 1}
    assert (placement.hosts, placement.gpus) == (1, 8)
    assert [actor.name for actor in placement.actors] == [
        "trainer-0",
        "trainer-1",
        "trainer-2",
        "trainer-3",
        "rollout-0",
        "rollout-1",
        "rollout-2",
        "logprob-0",
    ]
    assert [(actor.cpus, actor.gpus) for actor in placement.of("rollout")] == [(1, 1.0)] * 3


def test_a_served_teacher_gets_its_own_gpus() -> None:
    teacher = "train.rl.teacher={{path: {}, hint: x, replicas: 2, gpus: 0.75}}"
    placement = placed("train.parallel.tp=2", teacher.format("some/model"))
    assert [(actor.name, actor.gpus) for actor in placement.of("teacher")] == [("teacher-0", 0.75), ("teacher-1", 0.75)]
    assert not placed("train.parallel.tp=2", teacher.format("policy")).of("teacher")
    with pytest.raises(UserError, match=r"train\.rl\.teacher\.gpus: 1\.5 GPUs cannot be assigned to one rank"):
        placed("train.rl.teacher={path: some/model, gpus: 1.5}")


@pytest.mark.parametrize(("overlay", "gpus"), [("h200x2", 2), ("h200x3_lora", 3), ("h200x4", 4), ("h200x8", 8)])
def test_overlays_use_all_their_gpus(overlay: str, gpus: int) -> None:
    assert place(load_recipe("mimo7b_mtp", overlays=[overlay]).recipe).gpus == gpus


def test_a_fractional_log_prob_rank_shares_the_rollout_gpu() -> None:
    placement = placed("train.parallel.tp=1", "rollout.replicas=1", "logprob.gpus=0.25")
    assert [actor.gpus for actor in placement.actors] == [1.0, 0.75, 0.25]


def test_a_run_fits_on_one_gpu() -> None:
    placement = placed("train.parallel.tp=1", "train.gpus=0.4", "rollout.replicas=1", "rollout.gpus=0.4", "logprob.gpus=0.2")
    assert [actor.gpus for actor in placement.actors] == [0.4, 0.4, 0.2]
    assert placement.gpus == pytest.approx(1)


def test_a_share_does_not_span_gpus() -> None:
    """Two GPUs with two ranks of 0.6 cannot hold a third such rank or an engine of 0.8, although 0.8 is free in total."""
    alone = ["train.gpus=0.6", "logprob.standalone=false", "rollout.replicas=1"]
    for sets in (["train.parallel.tp=3", "rollout.gpus=0.2"], ["train.parallel.tp=2", "rollout.gpus=0.8"]):
        with pytest.raises(ClusterResources, match="2 GPUs, each share on one GPU and each engine on one host, are needed"):
            placed(*alone, *sets, hosts=[Host(64, 2)])
    assert placed(*alone, "train.parallel.tp=2", "rollout.gpus=0.4", hosts=[Host(64, 2)]).gpus == pytest.approx(1.6)
    assert placed(*alone, "train.parallel.tp=3", hosts=[Host(float("inf"), float("inf"))]).gpus == pytest.approx(2.8)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["rollout.gpus=0.5"], r"rollout\.gpus: 0\.5 of a GPU for each of rollout\.tp: 2 ranks, which need one GPU each"),
        (["logprob.gpus=0.25"], r"rollout\.gpus: 0\.75 of a GPU for each of rollout\.tp: 2 ranks, .* set it to 1"),
        (["logprob.gpus=1.5"], r"logprob\.gpus: 1\.5 GPUs cannot be assigned to one rank"),
    ],
)
def test_gpu_counts_that_ray_cannot_allocate_are_errors(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        placed("rollout.tp=2", "rollout.replicas=1", *sets)
    assert placed("rollout.tp=2", "rollout.replicas=1", "logprob.gpus=0.25", "rollout.gpus=1").gpus == pytest.approx(6.25)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.gpus=0.4", "train.parallel.tp=2"], r"train\.gpus: 0\.4 puts two of the 2 ranks of train\.parallel on one GPU"),
        (["logprob.gpus=0.25", "logprob.parallel.tp=2"], r"logprob\.gpus: 0\.25 puts two of the 2 ranks of logprob\.parallel on one GPU"),
    ],
)
def test_two_nccl_ranks_on_one_gpu_are_an_error(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        placed(*sets)
    shares = [actor.gpus for actor in placed(*(text.replace("0.4", "0.6").replace("0.25", "0.75") for text in sets)).actors]
    assert shares.count(0.6) + shares.count(0.75) >= 2


@pytest.mark.parametrize(
    ("sets", "gpus"),
    [
        ([], 8),
        (["train.gpus=0.6", "rollout.gpus=0.4", "logprob.gpus=0.4", "sync.transport=ipc"], 4),
        (["train.parallel.tp=1", "rollout.gpus=0.6", "logprob.gpus=0.6", "sync.transport=ipc"], 5),
        (["train.parallel.tp=1", "rollout.replicas=1", "logprob.gpus=0.25"], 2),
    ],
)
def test_number_of_gpus_in_use(sets: list[str], gpus: int) -> None:
    assert placed(*sets).gpu_count == gpus


def test_engines_do_not_span_hosts() -> None:
    hosts = [Host(64, 3), Host(64, 4)]
    placement = placed("train.parallel.tp=2", "rollout.replicas=1", "rollout.tp=4", "logprob.standalone=false", hosts=hosts)
    assert [(actor.role, actor.host) for actor in placement.actors] == [("trainer", 0)] * 2 + [("rollout", 1)] * 4


def test_several_hosts_are_planned_if_one_is_too_small() -> None:
    placement = placed("rollout.replicas=12")
    assert placement.gpus == 17
    per_host = Counter(actor.host for actor in placement.actors)
    assert placement.hosts == 3 and max(per_host.values()) <= 8


def test_sft_places_only_trainer_ranks() -> None:
    assert {actor.role for actor in placed("train.stages=[sft]").actors} == {"trainer"}


def test_cpu_ranks_reserve_their_threads() -> None:
    placement = placed("train.threads=2", "rollout.threads=3", name="tiny_mtp", hosts=[Host(5)])
    assert (placement.device, placement.cpus, placement.gpus) == ("cpu", 5, 0)
    assert [(actor.cpus, actor.gpus) for actor in placement.of("trainer")] == [(2, 0.0)]


@pytest.mark.parametrize(
    ("sets", "name", "hosts", "message"),
    [
        (
            [],
            "mimo7b_mtp",
            [Host(64, 4)],
            r"8 GPUs are needed \(trainer 4, rollout 3, logprob 1\), but 4 are available; lower train.parallel",
        ),
        (["cluster.num_gpus=2"], "mimo7b_mtp", None, "8 GPUs are needed .* but 2 are available"),
        (["cluster.num_gpus=0"], "mimo7b_mtp", None, "but 0 are available"),
        ([], "tiny_mtp", [Host(1)], r"2 CPUs are needed \(trainer 1, rollout 1\), but 1 are available; .* set cluster.num_cpus"),
        (["cluster.num_cpus=1"], "tiny_mtp", None, "2 CPUs are needed"),
    ],
)
def test_too_few_gpus_or_cpus_are_an_error(sets: list[str], name: str, hosts: list[Host] | None, message: str) -> None:
    with pytest.raises(ClusterResources, match=message):
        placed(*sets, name=name, hosts=hosts)


ELASTIC = "rollout.replicas={min: 1, max: 8}"


def test_an_elastic_run_is_placed_with_the_minimum_of_engines() -> None:
    assert len(placed(ELASTIC).of("rollout")) == 1
    assert len(place(load_recipe("mimo7b_mtp", sets=[ELASTIC]).recipe, engines=3).of("rollout")) == 3


def test_most_engines_is_the_number_that_fits() -> None:
    recipe = load_recipe("mimo7b_mtp", sets=[ELASTIC, "logprob.standalone=false"]).recipe
    assert [max_engines(recipe, [Host(64, gpus)] * hosts) for gpus, hosts in ((5, 1), (8, 1), (8, 2))] == [1, 4, 8]
    with pytest.raises(ClusterResources, match=r"5 GPUs are needed \(trainer 4, rollout 1\)"):
        max_engines(recipe, [Host(64, 4)])


def test_too_many_engines_for_a_fixed_cluster_are_an_error() -> None:
    recipe = load_recipe("tiny_mtp", sets=[ELASTIC, "cluster.num_cpus=3"]).recipe
    with pytest.raises(ClusterResources, match=r"but 3 are available; lower rollout\.replicas\.max: 8, or use a cluster"):
        place(recipe, engines=8)


def test_an_engine_larger_than_a_host_is_an_error() -> None:
    with pytest.raises(UserError, match=r"rollout\.tp: 16 ranks do not fit a host of cluster\.gpus_per_node: 8"):
        placed("rollout.tp=16")


def test_a_tensor_parallel_group_that_fits_a_host_is_not_split() -> None:
    alone = ["train.parallel.tp=2", "train.stages=[sft]"]
    placement = placed(*alone, "train.parallel.dp=2", hosts=[Host(64, 3), Host(64, 2)])
    assert [(actor.host, actor.gpu_ids) for actor in placement.actors] == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert [actor.host for actor in placed(*alone, hosts=[Host(64, 1), Host(64, 1)]).actors] == [0, 1], "none could hold it"


def test_bundles_join_ranks_of_a_gpu_and_ranks_of_an_engine() -> None:
    shares = ["train.gpus=0.6", "rollout.gpus=0.4", "logprob.gpus=0.4", "sync.transport=ipc", "train.parallel.tp=2"]
    bundles = placed(*shares, "rollout.replicas=1").bundles()
    assert [([actor.name for actor in bundle.actors], bundle.gpus) for bundle in bundles] == [
        (["trainer-0", "rollout-0"], 1.0),
        (["trainer-1", "logprob-0"], 1.0),
    ]
    engine = placed("rollout.tp=2", "rollout.replicas=1", "logprob.standalone=false", "train.parallel.tp=1").bundles()
    assert [([actor.name for actor in bundle.actors], bundle.gpus) for bundle in engine] == [
        (["trainer-0"], 1.0),
        (["rollout-0", "rollout-0.1"], 2.0),
    ]
    assert [len(bundle.actors) for bundle in placed("rollout.threads=1", name="tiny_mtp", hosts=[Host(5)]).bundles()] == [1, 1]


SMALL = ["logprob.standalone=false", "sync.transport=ipc"]


def test_engines_on_the_trainers_gpus_get_the_share_that_it_leaves() -> None:
    """Two trainer ranks on GPUs 0 and 1, three engines there, and a fourth with a separate GPU."""
    sets = [*SMALL, "train.parallel.tp=2", "train.gpus=0.6", "rollout.replicas=4", "rollout.on_trainer_gpus=3"]
    placement = placed(*sets, hosts=[Host(64, 3)])
    engines = placement.of("rollout")
    assert [engine.gpu_ids for engine in engines] == [(0,), (1,), (0,), (2,)]
    assert [engine.gpus for engine in engines] == [0.2, 0.2, 0.2, 1.0]
    by_actors = {tuple(actor.name for actor in bundle.actors): bundle.gpus for bundle in placement.bundles()}
    assert by_actors == {("trainer-0", "rollout-0", "rollout-2"): 1.0, ("trainer-1", "rollout-1"): 0.8, ("rollout-3",): 1.0}


def test_an_engine_on_a_trainers_gpu_is_on_the_host_of_its_rank() -> None:
    sets = [*SMALL, "train.parallel.tp=2", "train.gpus=0.5", "rollout.replicas=2", "rollout.on_trainer_gpus=2"]
    with pytest.raises(UserError, match=r"train\.gpus: 0\.5 puts two"):
        placed(*sets)
    placement = placed(*sets, "train.gpus=0.75", hosts=[Host(64, 1), Host(64, 1)])
    assert [(actor.name, actor.host) for actor in placement.actors] == [
        ("trainer-0", 0),
        ("trainer-1", 1),
        ("rollout-0", 0),
        ("rollout-1", 1),
    ]
    with pytest.raises(ClusterResources, match=r"rollout\.on_trainer_gpus: trainer-1's host has 0 CPUs left, rollout-1 needs 1"):
        placed(*sets, "train.gpus=0.75", hosts=[Host(64, 1), Host(1, 1)])


def test_busy_cores_of_engines_are_compared_with_those_of_the_host() -> None:
    """Three engines keep 3 cores busy each, the trainer's rank one, and the controller one."""
    recipe = load_recipe(
        "mimo7b_mtp", sets=[*SMALL, "train.parallel.tp=1", "train.gpus=0.1", "rollout.gpus=0.3", "rollout.replicas=3"]
    ).recipe
    placement = place(recipe)
    assert placement.gpu_count == 1
    assert core_shortage(recipe, placement, {0: 11}) == ""
    assert "3 engine(s) with 3 busy cores each and the other processes need 11 cores of host 0, which has 10" in core_shortage(
        recipe, placement, {0: 10}
    )
