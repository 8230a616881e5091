"""A cluster of this machine that would be too small is told of before Ray is started."""

from __future__ import annotations

import sys

import pytest

from mtpctl.cluster import check_room, cluster, on_one_host
from mtpctl.recipe import ClusterResources
from mtpctl.recipe.schema import ClusterConfig


@pytest.mark.parametrize(
    ("config", "cpus", "gpus", "said"),
    [
        (ClusterConfig(num_cpus=1), 2, 0, r"cluster\.num_cpus: the recipe's actors need 2 CPUs and the cluster has 1; ask for fewer"),
        (ClusterConfig(num_gpus=2), 1, 2.5, r"cluster\.num_gpus: the recipe's actors need 2\.5 GPUs and the cluster has 2; ask for fewer"),
    ],
)
def test_too_little(config: ClusterConfig, cpus: float, gpus: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    with pytest.raises(ClusterResources, match=said), cluster(config, cpus=cpus, gpus=gpus):
        pass


def test_a_cluster_elsewhere_is_asked_when_it_answers() -> None:
    check_room(ClusterConfig(address="head:6379", num_cpus=1), cpus=64, gpus=64)


def test_so_is_one_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does for what `ray job submit` starts, on a head without cards perhaps."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_room(ClusterConfig(), cpus=64, gpus=64)


@pytest.mark.parametrize(("alive", "one"), [([True], True), ([True, False], True), ([True, True], False)])
def test_hosts_that_are_gone_do_not_count(alive: list[bool], one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": each} for each in alive])
    assert on_one_host() is one
