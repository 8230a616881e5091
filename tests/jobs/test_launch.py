"""Slurm scripts: checks before submission, their text, and forwarding of stop signals; with fakes of Slurm's commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpctl.jobs.launch import NodeGroup, SlurmAllocation, SlurmRequest, parse_slurm_time, slurm_allocation, slurm_script
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.slurm import stand_in, until

SINFO = "echo 'cards|4|64|gpu:h100:8(S:0-1),nic:2|2-00:00:00'; echo 'main*|3|4|(null)|1:00:00'; echo 'main*|1|2+|(null)|1:00:00'"
LEAD = "#SBATCH --signal=B:USR1@"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Slurm's commands, first on PATH. `sbatch` records the script."""
    folder = tmp_path / "bin"
    stand_in(
        folder,
        sinfo=SINFO,
        sbatch=f'cp "${{@: -1}}" {tmp_path}/submitted; echo "17;cluster"',
        squeue="[ $2 = --jobs=17 ] && echo 'PENDING|0:00|1:00:00|(Resources)'",
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def tiny(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=list(sets)).recipe


def lines(text: str) -> list[str]:
    return text.splitlines()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--partition", "card"], 2, "--partition: Slurm has no partition card; name one of cards, main"),
        (["--nodes", "5"], 4, "--nodes: 5 nodes are requested, but partition main has 4 of that size; lower it"),
        (["--nodes", "4", "--cpus", "4"], 4, "--nodes: 4 nodes are requested, but partition main has 3 of that size; lower it"),
        (["--time", "2:00:00"], 2, "--time: 2:00:00 is more than the limit of partition main, 60 minutes; lower it"),
        (["--time", "soon"], 2, "--time: soon is not a time of Slurm; write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"),
        (["--seeds", "a"], 2, "--seeds: a is not a list of numbers; write 0,1,2"),
        (["--seeds", "1,2", "--set", "run_dir=runs/x"], 2, "--seeds: the runs need separate directories; use {name} or {seed} in run_dir"),
        (["--cpus", "64"], 4, "--partition: no node of main has 64 CPU(s) and 0 GPU(s); lower --cpus or --gpus, or name another partition"),
        (
            ["--nodes", "1", "--set", "rollout.replicas=4"],
            4,
            "cluster: 5 CPUs are needed (trainer 1, rollout 4), but 2 are available; lower replicas or threads, or set cluster.num_cpus",
        ),
    ],
)
def test_request_that_cannot_run_is_one_line_before_submission(
    slurm: Path, mtpctl: Any, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    result = mtpctl("launch", "slurm", "tiny_mtp", *arguments)
    assert (result.code, result.out, result.err) == (code, "", f"error: {message}\n")
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "runs").exists()


def test_machine_without_slurm_is_exit_code_3(mtpctl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = mtpctl("launch", "slurm", "tiny_mtp")
    assert (result.code, result.err) == (3, "error: sinfo: is not on PATH; run this command where Slurm jobs are submitted\n")


def test_recipe_gets_as_few_nodes_as_it_fits() -> None:
    groups = [NodeGroup("main", True, 6, 3, 0, 3600.0)]
    assert slurm_allocation(tiny(), SlurmRequest(), groups).nodes == 1
    assert slurm_allocation(tiny("rollout.replicas=5"), SlurmRequest(), groups).nodes == 2
    # On one node no other can join, so it needs room for the maximum.
    assert slurm_allocation(tiny("rollout.replicas={min: 1, max: 4}"), SlurmRequest(), groups).nodes == 2


def test_gpu_request_allocates_nodes_with_that_many_gpus() -> None:
    groups = [NodeGroup("main", True, 4, 64, 0, 3600.0), NodeGroup("main", True, 4, 64, 8, 3600.0)]
    recipe = load_recipe("mimo7b_mtp").recipe
    assert slurm_allocation(recipe, SlurmRequest(), groups) == SlurmAllocation(1, 64, 8, 3600.0)
    assert slurm_allocation(recipe, SlurmRequest(gpus=4), groups) == SlurmAllocation(2, 64, 4, 3600.0)
    assert "#SBATCH --gres=gpu:4" in lines(slurm_script(recipe, SlurmRequest(gpus=4), SlurmAllocation(2, 64, 4, 3600.0), ["mimo7b_mtp"]))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("1:30", 90), ("2:00:05", 7205), ("1-12", 129600), ("1-0:30", 88200), ("0-0:0:7", 7)]
)
def test_time_is_read_as_slurm_reads_it(text: str, seconds: float) -> None:
    assert parse_slurm_time(text) == seconds


def test_script_has_the_options_and_the_arguments_of_train(slurm: Path, mtpctl: Any, tmp_path: Path) -> None:
    options = ["--partition", "main", "--time", "30", "--requeue", "--sbatch", "--account=lab"]
    result = mtpctl("launch", "slurm", "tiny_mtp", "--set", "data.task={name: addition}", *options, "--dry-run")
    assert not (tmp_path / "submitted").exists()
    for line in ("partition=main", "time=30", "requeue", "account=lab", "nodes=1", "exclusive", f"chdir={tmp_path}"):
        assert f"#SBATCH --{line}" in lines(result.out)
    assert f"#SBATCH --output={tmp_path}/runs/tiny_mtp/logs/slurm-%j.log" in lines(result.out)
    assert "mtpctl train tiny_mtp --set 'data.task={name: addition}' --set cluster.address=null" in result.out
    assert "ray start" not in result.out and f"{LEAD}300" in lines(result.out)


def test_time_for_a_checkpoint_is_at_most_a_quarter_of_the_limit() -> None:
    assert f"{LEAD}60" in lines(slurm_script(tiny(), SlurmRequest(), SlurmAllocation(1, 4, 0, 240.0), ["tiny_mtp"]))
    assert f"{LEAD}300" in lines(slurm_script(tiny(), SlurmRequest(), SlurmAllocation(1, 4, 0, float("inf")), ["tiny_mtp"]))


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(
    "request_", [SlurmRequest(), SlurmRequest(requeue=True, cpus=2), SlurmRequest(seeds=(3, 4))], ids=["plain", "requeue", "seeds"]
)
def test_script_is_valid_bash(nodes: int, request_: SlurmRequest) -> None:
    text = slurm_script(tiny("run_dir=/tmp/it's {name}"), request_, SlurmAllocation(nodes, 4, 0, 3600.0), ["a recipe.yaml"])
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("--requeue" in text and "scontrol requeue" in text) == request_.requeue
    assert ("ray start" in text) == (nodes > 1)
    # Without --ntasks, srun would start as many tasks as the job has, two of them on one node.
    assert ("srun --overlap --nodes=$others --ntasks=$others" in text) == (nodes > 1)


def test_submission_keeps_script_and_job_in_the_run_directory_and_status_shows_it(slurm: Path, mtpctl: Any, tmp_path: Path) -> None:
    result = mtpctl("launch", "slurm", "tiny_mtp")
    run = tmp_path / "runs" / "tiny_mtp"
    assert result.out == f"job 17 is submitted: 1 node(s) with 2 CPUs and 0 GPUs each; {run}/slurm.sh\n"
    assert (tmp_path / "submitted").read_text() == (run / "slurm.sh").read_text()
    assert run.stat().st_mode & 0o77 == 0
    assert mtpctl("status", "runs/tiny_mtp").out == "runs/tiny_mtp: Slurm job 17: PENDING, 0:00 of 1:00:00, (Resources)\n"
    stand_in(slurm, squeue="echo 'Invalid job id' >&2; exit 1")
    assert mtpctl("status", "runs/tiny_mtp").out == "runs/tiny_mtp: Slurm job 17: ended\n"


def test_each_seed_of_an_array_has_its_run_directory(slurm: Path, mtpctl: Any, tmp_path: Path) -> None:
    assert mtpctl("launch", "slurm", "tiny_mtp", "--seeds", "3,5").code == 0
    text = (tmp_path / "submitted").read_text()
    assert "#SBATCH --array=3,5" in lines(text)
    assert f"#SBATCH --output={tmp_path}/runs/tiny_mtp-seed%a/logs/slurm-%j.log" in lines(text)
    assert '--set "seed=$SLURM_ARRAY_TASK_ID" --set "name=tiny_mtp-seed$SLURM_ARRAY_TASK_ID"' in text
    assert [(tmp_path / f"runs/tiny_mtp-seed{seed}/logs/slurm.id").read_text() for seed in (3, 5)] == ["17_3\n", "17_5\n"]


def test_rejection_by_sbatch_is_one_line(slurm: Path, mtpctl: Any) -> None:
    stand_in(slurm, sbatch="echo 'sbatch: error: invalid account' >&2; exit 1")
    result = mtpctl("launch", "slurm", "tiny_mtp", "--sbatch", "--account=nope")
    assert (result.code, result.err) == (2, "error: sbatch: sbatch: error: invalid account\n")


TRAIN = "trap 'echo stop >> {log}; sleep 0.5; exit 143' TERM\necho start >> {log}\nwhile :; do sleep 0.1; done"


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, flags=re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", True), ("COMPLETING", False)])
def test_script_passes_one_stop_on_and_requeues_only_a_running_job(tmp_path: Path, state: str, requeued: bool) -> None:
    log = tmp_path / "log"
    text = slurm_script(tiny(f"run_dir={tmp_path}/run"), SlurmRequest(requeue=True), SlurmAllocation(1, 4, 0, 3600.0), ["tiny_mtp"])
    commands = {"mtpctl": TRAIN.format(log=log), "squeue": f"echo {state}", "scontrol": f'echo "$@" >> {log}'}
    stand_in(tmp_path / "bin", **commands)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    path = tmp_path / "slurm.sh"
    path.write_text(text.replace(f"PATH={Path(sys.executable).parent}:", f"PATH={tmp_path}/bin:"))
    job = subprocess.Popen(["bash", path], env=os.environ | {"SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "4"})
    until(lambda: log.exists() and _catches(job.pid, signal.SIGUSR1), 60)
    # The warning before the time limit, and then the limit itself: mtpctl would end without a checkpoint at the second signal.
    job.send_signal(signal.SIGUSR1)
    until(lambda: "stop" in log.read_text(), 60)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 143
    assert log.read_text().split("\n") == ["start", "stop", *(["requeue 17"] if requeued else []), ""]


def test_script_ends_with_the_exit_code_of_train(tmp_path: Path) -> None:
    text = slurm_script(tiny(f"run_dir={tmp_path}/run"), SlurmRequest(requeue=True), SlurmAllocation(1, 4, 0, 3600.0), ["tiny_mtp"])
    stand_in(tmp_path / "bin", mtpctl="exit 2", scontrol=f"touch {tmp_path}/requeued")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    text = re.sub(r"PATH=\S+:", f"PATH={tmp_path}/bin:", text)
    environment = os.environ | {"SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "4"}
    assert subprocess.run(["bash", "-c", text], env=environment, timeout=60, check=False).returncode == 2
    assert not (tmp_path / "requeued").exists()


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
