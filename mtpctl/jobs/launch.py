"""Jobs of cluster schedulers that run a recipe.

Slurm: a script that fits the nodes of a partition, its submission, and the state of the job.
Kubernetes: a RayJob of KubeRay with one pod for each host of the placement, a shared volume for runs, and the recipe in a ConfigMap.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mtpctl.cluster.hosts import Host
from mtpctl.errors import ClusterResources, PrerequisiteMissing, UserError
from mtpctl.plan.placement import Placement, place
from mtpctl.recipe import yaml12
from mtpctl.recipe.loading import dump_resolved
from mtpctl.recipe.schema import Recipe
from mtpctl.telemetry.run_directory import RunDirectory

SLURM_TEMPLATE = Path(__file__).with_name("slurm.sh.jinja")
SLURM_SCRIPT, SLURM_ID = "slurm.sh", "slurm.id"
SIGNAL_LEAD_S = 300
"""Seconds before the time limit at which Slurm signals the job, so that it can finish an update and save a checkpoint. At most a quarter of
the limit."""
COMMAND_TIMEOUT_S = 30.0
"""Timeout of a Slurm command, in seconds."""


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of a partition that have the same numbers of CPUs and GPUs."""

    partition: str
    default: bool
    nodes: int
    cpus: int
    gpus: int
    limit_s: float


@dataclass(frozen=True)
class SlurmRequest:
    """The options of `mtpctl launch slurm`, with None for those that are not set."""

    nodes: int | None = None
    cpus: int | None = None
    gpus: int | None = None
    partition: str | None = None
    time: str | None = None
    requeue: bool = False
    seeds: tuple[int, ...] = ()
    sbatch: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlurmAllocation:
    """Number of nodes of a job, CPUs and GPUs per node, and the time limit in seconds."""

    nodes: int
    cpus: int
    gpus: int
    limit_s: float


def run_slurm_command(command: str, *arguments: str) -> str:
    """The output of a Slurm command. Raises PrerequisiteMissing without Slurm, and UserError with Slurm's message if the command fails."""
    if shutil.which(command) is None:
        raise PrerequisiteMissing(f"{command}: is not on PATH; run this command where Slurm jobs are submitted")
    result = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if result.returncode:
        raise UserError(f"{command}: {' '.join(result.stderr.split())}")
    return result.stdout


def node_groups() -> list[NodeGroup]:
    """The groups of equal nodes of all partitions of this Slurm cluster."""
    groups = []
    for line in run_slurm_command("sinfo", "--exact", "--noheader", "--format=%P|%D|%c|%G|%l").splitlines():
        name, nodes, cpus, gres, limit = line.strip().split("|")
        gpus = sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres)))
        seconds = float("inf") if limit in ("infinite", "UNLIMITED", "n/a") else parse_slurm_time(limit)
        groups.append(NodeGroup(name.rstrip("*"), name.endswith("*"), int(nodes), int(cpus.rstrip("+")), gpus, seconds))
    return groups


def parse_slurm_time(text: str) -> float:
    """A time as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise UserError(f"--time: {text} is not a time of Slurm; write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    units = (3600, 60, 1)
    return int(days or 0) * 86400.0 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def slurm_allocation(recipe: Recipe, request: SlurmRequest, groups: Sequence[NodeGroup]) -> SlurmAllocation:
    """The nodes of the job: as requested, or the fewest on which the recipe's actors fit.

    Raises UserError for an unknown partition or a time beyond its limit, and ClusterResources if the nodes are too few or too small.
    """
    name = request.partition or next((group.partition for group in groups if group.default), None)
    names = ", ".join(sorted({group.partition for group in groups}))
    if name is None:
        raise UserError(f"--partition: Slurm has no default partition; name one of {names}")
    partition_groups = [group for group in groups if group.partition == name]
    if not partition_groups:
        raise UserError(f"--partition: Slurm has no partition {name}; name one of {names}")
    limit_s = partition_groups[0].limit_s if request.time is None else parse_slurm_time(request.time)
    if limit_s > partition_groups[0].limit_s:
        raise UserError(
            f"--time: {request.time} is more than the limit of partition {name}, {partition_groups[0].limit_s / 60:g} minutes; lower it"
        )
    cuda = recipe.device == "cuda"
    min_cpus, min_gpus = request.cpus or 1, (request.gpus or 1) if cuda else 0
    suitable = [group for group in partition_groups if group.cpus >= min_cpus and group.gpus >= min_gpus]
    if not suitable:
        raise ClusterResources(
            f"--partition: no node of {name} has {min_cpus} CPU(s) and {min_gpus} GPU(s); lower --cpus or --gpus, or name another partition"
        )
    max_nodes = sum(group.nodes for group in suitable)
    cpus = request.cpus or min(group.cpus for group in suitable)
    gpus = (request.gpus or min(group.gpus for group in suitable)) if cuda else 0
    if request.nodes is not None and request.nodes > max_nodes:
        raise ClusterResources(f"--nodes: {request.nodes} nodes are requested, but partition {name} has {max_nodes} of that size; lower it")
    for nodes in range(1, max_nodes + 1) if request.nodes is None else [request.nodes]:
        try:
            # A run on one node starts a local cluster, which no host can join, so the node needs room for the maximum number of engines.
            engines = recipe.rollout.replica_range.max if nodes == 1 else None
            place(recipe, [Host(cpus, gpus)] * nodes, engines=engines)
        except ClusterResources:
            if nodes in (request.nodes, max_nodes):
                raise
        else:
            return SlurmAllocation(nodes, cpus, gpus, limit_s)
    raise ClusterResources(f"--partition: {name} has no nodes; name another partition")


def run_dir(recipe: Recipe, request: SlurmRequest, seed: str) -> str:
    """The absolute run directory. `seed`: the seed of the run within a job array; ignored without `request.seeds`."""
    if not request.seeds:
        return str(recipe.run_path.absolute())
    if not re.search(r"\{(name|seed)\}", recipe.run_dir):
        raise UserError("--seeds: the runs need separate directories; use {name} or {seed} in run_dir")
    path = recipe.run_dir.replace("{name}", f"{recipe.name}-seed{seed}").replace("{seed}", seed)
    return str(Path(path).expanduser().absolute())


def slurm_script(recipe: Recipe, request: SlurmRequest, allocation: SlurmAllocation, arguments: Sequence[str]) -> str:
    """The script of a job that runs `mtpctl train ARGUMENTS` on these nodes."""
    import jinja2

    logs = RunDirectory(run_dir(recipe, request, "%a")).logs
    options = [f"--partition={request.partition}"] if request.partition else []
    options += [f"--time={request.time}"] if request.time else []
    options += [f"--array={','.join(map(str, request.seeds))}"] if request.seeds else []
    words = [shlex.quote(argument) for argument in arguments]
    if request.seeds:
        words += ['--set "seed=$SLURM_ARRAY_TASK_ID"', f'--set "name={recipe.name}-seed$SLURM_ARRAY_TASK_ID"']
    if allocation.nodes > 1:
        words += ["--set cluster.address=auto"]
    else:
        words += ["--set cluster.address=null", '--set "cluster.num_cpus=$SLURM_CPUS_ON_NODE"']
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters["quote"] = shlex.quote
    values: Mapping[str, object] = {
        "name": recipe.name,
        "nodes": allocation.nodes,
        "cpus": request.cpus,
        "gpus": allocation.gpus,
        "options": [*options, *request.sbatch],
        "requeue": request.requeue,
        "folder": str(Path.cwd()),
        "log_dir": str(logs),
        "lead_s": round(min(SIGNAL_LEAD_S, allocation.limit_s / 4)),
        "bin": str(Path(sys.executable).parent),
        "seeds": request.seeds,
        "arguments": " ".join(words),
    }
    return environment.from_string(SLURM_TEMPLATE.read_text(encoding="utf-8")).render(values)


def submit_slurm(recipe: Recipe, request: SlurmRequest, text: str) -> tuple[str, Path]:
    """Write the script into the run directory and submit it. Returns the id of the job and the path of the script."""
    folders = [RunDirectory(run_dir(recipe, request, str(seed))) for seed in request.seeds or [recipe.seed]]
    for folder in folders:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.logs.mkdir(exist_ok=True)
    path = folders[0].path / SLURM_SCRIPT
    path.write_text(text, encoding="utf-8")
    job = run_slurm_command("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    for folder, seed in zip(folders, request.seeds or [None], strict=True):
        (folder.logs / SLURM_ID).write_text(f"{job}{'' if seed is None else f'_{seed}'}\n", encoding="utf-8")
    return job, path


def job_line(run: Path) -> str | None:
    """The state of the Slurm job of a run, with Slurm's reason if it waits; None if there is none, or no Slurm on this machine."""
    file = RunDirectory(run).logs / SLURM_ID
    if not file.is_file() or shutil.which("squeue") is None:
        return None
    job = file.read_text(encoding="utf-8").strip()
    try:
        lines = run_slurm_command("squeue", "--noheader", f"--jobs={job}", "--format=%T|%M|%l|%R").splitlines()
    except UserError:  # Slurm has forgotten the job
        lines = []
    if not lines:
        return f"Slurm job {job}: ended"
    state, elapsed, limit, nodes_or_reason = lines[0].split("|")
    return f"Slurm job {job}: {state}, {elapsed} of {limit}, {nodes_or_reason}"


RUNS_MOUNT, RECIPE_MOUNT = "/runs", "/recipe"
"""Mount paths in the containers: the shared volume with the run directories, and the ConfigMap with the recipe."""
EXTRA_POD_CPUS = 2
"""CPUs of each pod in addition to those of the actors: for the controller, reward workers and Ray."""
STOP_S = 300
"""Seconds between SIGTERM and SIGKILL: time for an update and a checkpoint."""


def kuberay_manifest(recipe: Recipe, *, image: str, claim: str, memory: str | None) -> str:
    """The manifest as YAML. `claim`: name of the PersistentVolumeClaim for the run directories. `memory`: of each pod, such as 512Gi.

    Raises ClusterResources or UserError as `place` does.
    """
    run_dir = recipe.run_dir if recipe.run_dir.startswith(f"{RUNS_MOUNT}/") else f"{RUNS_MOUNT}/{{name}}"
    cluster = recipe.cluster.model_copy(update={"address": "auto"})
    recipe = recipe.model_copy(update={"run_dir": run_dir, "cluster": cluster})
    placement = place(recipe, None if recipe.device == "cuda" else [Host(math.inf)])
    name = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[:40].rstrip("-")
    pod = _pod(placement, f"{name}-recipe", image, claim, memory)
    spec: dict[str, Any] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": {"spec": _with_container_name(pod, "ray-head")}},
    }
    if placement.hosts > 1:
        counts = {"replicas": placement.hosts - 1, "minReplicas": placement.hosts - 1, "maxReplicas": placement.hosts - 1}
        worker = {"template": {"spec": _with_container_name(pod, "ray-worker")}}
        spec["workerGroupSpecs"] = [{"groupName": "workers", **counts, "rayStartParams": {}, **worker}]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"mtpctl train {RECIPE_MOUNT}/recipe.yaml --plain",
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


def _pod(placement: Placement, config_map_name: str, image: str, claim: str, memory: str | None) -> dict[str, Any]:
    """The specification of a pod with the CPUs and GPUs of the fullest host."""
    hosts = [[actor for actor in placement.actors if actor.host == host] for host in range(placement.hosts)]
    cpus = max(math.ceil(sum(actor.cpus for actor in actors)) for actors in hosts) + EXTRA_POD_CPUS
    gpus = max(len({gpu for actor in actors for gpu in actor.gpu_ids}) for actors in hosts)
    resources = {"cpu": str(cpus)} | ({"memory": memory} if memory else {}) | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    mounts = {"runs": RUNS_MOUNT, "recipe": RECIPE_MOUNT, "shm": "/dev/shm"}
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
            {"name": "recipe", "configMap": {"name": config_map_name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _with_container_name(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return pod | {"containers": [{"name": name} | container for container in pod["containers"]]}
