"""A KubeRay RayJob for a recipe: one pod for each host of the placement, a shared volume for runs, and the recipe in a ConfigMap."""

from __future__ import annotations

import math
import re
import textwrap
from importlib.metadata import version
from typing import Any

from mtpctl.cluster.hosts import Host
from mtpctl.plan.placement import Placement, place
from mtpctl.recipe import yaml12
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe

RUNS, RECIPE = "/runs", "/recipe"
"""Mount paths in the containers: the shared volume with the run directories, and the ConfigMap with the recipe."""
CONTROLLER_CPUS = 2
"""CPUs of each pod in addition to those of the actors: for the controller, reward workers and Ray."""
STOP_S = 300
"""Seconds between SIGTERM and SIGKILL: time for an update and a checkpoint."""


def manifest(recipe: Recipe, *, image: str, claim: str, memory: str | None) -> str:
    """The manifest as YAML. Raises ClusterResources or UserError as `place` does."""
    run_dir = recipe.run_dir if recipe.run_dir.startswith(f"{RUNS}/") else f"{RUNS}/{{name}}"
    cluster = recipe.cluster.model_copy(update={"address": "auto"})
    recipe = recipe.model_copy(update={"run_dir": run_dir, "cluster": cluster})
    placement = place(recipe, None if recipe.device == "cuda" else [Host(math.inf)])
    name = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[:40].rstrip("-")
    pod = _pod(placement, f"{name}-recipe", image, claim, memory)
    spec: dict[str, Any] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": {"spec": _named(pod, "ray-head")}},
    }
    if placement.hosts > 1:
        others = {"replicas": placement.hosts - 1, "minReplicas": placement.hosts - 1, "maxReplicas": placement.hosts - 1}
        worker = {"template": {"spec": _named(pod, "ray-worker")}}
        spec["workerGroupSpecs"] = [{"groupName": "workers", **others, "rayStartParams": {}, **worker}]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"mtpctl train {RECIPE}/recipe.yaml --plain",
            # A retry starts a new cluster with the same run directory, so the run resumes.
            "backoffLimit": 3,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": spec,
        },
    }
    return _config_map(f"{name}-recipe", dump_resolved(recipe)) + "---\n" + yaml12.dump(job)


def _config_map(name: str, text: str) -> str:
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    return f"{yaml12.dump(head)}data:\n  recipe.yaml: |\n{textwrap.indent(text, '    ')}"


def _pod(placement: Placement, recipe: str, image: str, claim: str, memory: str | None) -> dict[str, Any]:
    """The specification of a pod with the CPUs and cards of the fullest host."""
    hosts = [[actor for actor in placement.actors if actor.host == host] for host in range(placement.hosts)]
    cpus = max(math.ceil(sum(actor.cpus for actor in actors)) for actors in hosts) + CONTROLLER_CPUS
    cards = max(len({card for actor in actors for card in actor.cards}) for actors in hosts)
    resources = {"cpu": str(cpus)} | ({"memory": memory} if memory else {}) | ({"nvidia.com/gpu": str(cards)} if cards else {})
    mounts = {"runs": RUNS, "recipe": RECIPE, "shm": "/dev/shm"}
    container = {
        "image": image,
        "resources": {"requests": resources, "limits": resources},
        "env": [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(STOP_S)}],
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
    }
    return {
        "terminationGracePeriodSeconds": STOP_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "recipe", "configMap": {"name": recipe}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _named(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return pod | {"containers": [{"name": name} | container for container in pod["containers"]]}
