"""RayJobs of KubeRay: one pod for each host of the placement, and the recipe that the pods run."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.commands import mtpctl as mtpctl

NEEDED = ("--image", "registry.example/mtpctl:1", "--claim", "shared")


def documents(mtpctl: Any, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    result = mtpctl("launch", "kuberay", *arguments, *NEEDED)
    assert result.code == 0, result.err
    config, job = yaml.safe_load_all(result.out)
    return config, job


def pods(job: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"]), *((group["replicas"], group) for group in cluster.get("workerGroupSpecs", []))]
    return [(count, group["template"]["spec"]) for count, group in groups]


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["tiny_mtp"], [(1, "4", None)]),
        (["mimo7b_mtp"], [(1, "10", "8")]),
        (["mimo7b_mtp", "--set", "rollout.replicas=12"], [(1, "10", "8"), (2, "10", "8")]),
        (["mimo7b_mtp", "--overlay", "h200x2"], [(1, "5", "2")]),
    ],
)
def test_pods_have_the_size_of_the_placement(mtpctl: Any, arguments: list[str], sizes: list[tuple[int, str, str | None]]) -> None:
    _, job = documents(mtpctl, *arguments)
    limits = [(count, pod["containers"][0]["resources"]["limits"]) for count, pod in pods(job)]
    assert [(count, limit["cpu"], limit.get("nvidia.com/gpu")) for count, limit in limits] == sizes


def test_config_map_has_the_recipe_that_the_job_runs_on_the_shared_volume(mtpctl: Any) -> None:
    config, job = documents(mtpctl, "tiny_mtp", "--set", "seed=7")
    recipe = Recipe.model_validate(yaml.safe_load(config["data"]["recipe.yaml"]))
    expected = load_recipe("tiny_mtp", sets=["seed=7", "run_dir=/runs/{name}", "cluster.address=auto"]).recipe
    assert recipe == expected
    assert job["spec"]["entrypoint"] == "mtpctl train /recipe/recipe.yaml --plain"
    for _, pod in pods(job):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["/recipe"]["configMap"]["name"] == config["metadata"]["name"]
        assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == "shared"
        assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        assert pod["securityContext"]["runAsNonRoot"]


def test_name_is_a_name_of_kubernetes(mtpctl: Any) -> None:
    _, job = documents(mtpctl, "tiny_mtp", "--set", "name=My_Run.3_")
    assert job["metadata"]["name"] == "my-run-3"


def test_memory_is_requested_and_limited(mtpctl: Any) -> None:
    _, job = documents(mtpctl, "tiny_mtp", "--memory", "512Gi")
    (_, pod), *_ = pods(job)
    assert {limit["memory"] for limit in pod["containers"][0]["resources"].values()} == {"512Gi"}


def test_recipe_that_no_host_can_hold_is_one_line(mtpctl: Any) -> None:
    result = mtpctl("launch", "kuberay", "mimo7b_mtp", "--set", "rollout.tp=16", *NEEDED)
    assert (result.code, result.out) == (2, "") and result.err.startswith("error: rollout.tp: 16 ranks do not fit a host")
