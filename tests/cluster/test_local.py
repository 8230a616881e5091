"""A local cluster that is too small is an error before Ray starts, and other clusters are not joined."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtpctl.cluster.local import _check_reachable, _environment, check_capacity, cluster, on_one_host
from mtpctl.errors import ClusterResources, PrerequisiteMissing
from mtpctl.recipe.schema import ClusterConfig


@pytest.mark.parametrize(
    ("config", "cpus", "gpus", "message"),
    [
        (ClusterConfig(num_cpus=1), 2, 0, r"cluster\.num_cpus: the recipe's actors need 2 CPUs, but the cluster has 1; use fewer"),
        (ClusterConfig(num_gpus=2), 1, 2.5, r"cluster\.num_gpus: the recipe's actors need 2\.5 GPUs, but the cluster has 2; use fewer"),
    ],
)
def test_too_few_cpus_or_gpus_are_an_error(
    config: ClusterConfig, cpus: float, gpus: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    with pytest.raises(ClusterResources, match=message), cluster(config, cpus=cpus, gpus=gpus):
        pass


def test_the_size_of_a_joined_cluster_is_not_checked_before_ray_connects() -> None:
    check_capacity(ClusterConfig(address="head:6379", num_cpus=1), cpus=64, gpus=64)


def test_ray_address_in_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without an address never joins it."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(ClusterResources, match=r"cluster\.num_cpus"):
        check_capacity(ClusterConfig(num_cpus=1), cpus=64, gpus=0)


def assert_own_ray(address: str) -> None:
    with cluster(ClusterConfig(num_cpus=2), cpus=2, gpus=0):
        import ray

        assert ray.get_runtime_context().gcs_address != address
        assert ray.cluster_resources()["CPU"] == 2


def test_a_local_cluster_does_not_join_a_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cluster in the environment nor the last one started on this machine, which no longer exists."""
    address = "127.0.0.1:1"
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text(address)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert_own_ray(address)


@pytest.mark.slow
def test_a_ray_cluster_started_by_another_user_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would join the `ray start` of one CPU on this machine, which is too small for the run."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # pytest's own are too deep for Ray's sockets
        monkeypatch.setenv("RAY_TMPDIR", folder)
        options = ["--head", "--block", "--port=0", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen([Path(sys.executable).with_name("ray"), "start", *options], stdout=log, stderr=log)
        try:
            named = Path(folder) / "ray" / "ray_current_cluster"
            ends = time.monotonic() + 120
            while not (named.exists() and named.read_text()):
                assert process.poll() is None and time.monotonic() < ends, (Path(folder) / "log").read_text()
                time.sleep(0.1)
            assert_own_ray(named.read_text())
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize(("alive", "one"), [([True], True), ([True, False], True), ([True, True], False)])
def test_lost_hosts_do_not_count(alive: list[bool], one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": each} for each in alive])
    assert on_one_host() is one


def test_full_shared_memory_is_reported_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.cluster.local.shutil.disk_usage", lambda path: SimpleNamespace(free=12 << 10))
    monkeypatch.setattr("ray.init", None)
    with (
        pytest.raises(PrerequisiteMissing, match=r"^/dev/shm: 12 KiB are free, but actors need at least 4096; free space there"),
        cluster(ClusterConfig(num_cpus=1), cpus=1, gpus=0),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "named", "expected"),
    [
        (ClusterConfig(), {}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}),
        (ClusterConfig(), {"NCCL_SOCKET_IFNAME": "eth1"}, {"GLOO_SOCKET_IFNAME": "lo"}),
        (ClusterConfig(interface="bond0"), {"NCCL_SOCKET_IFNAME": "eth1"}, {"GLOO_SOCKET_IFNAME": "bond0", "NCCL_SOCKET_IFNAME": "bond0"}),
        (ClusterConfig(address="head:6379"), {}, {}),
    ],
    ids=["one host", "the environment names one", "the recipe names one", "several hosts"],
)
def test_network_interface_follows_the_environment_then_the_recipe(
    config: ClusterConfig, named: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert _environment(config, None) == expected


@pytest.mark.parametrize("auto", [False, True])
def test_cluster_that_listens_on_the_loopback_only_is_reported_at_once(auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray finds the local cluster of another run, and connects to the host's own address instead of the loopback's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr("ray._private.services.get_node_ip_address", lambda: "127.0.0.2")
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: {address})
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        named, resolved = "auto" if auto else address, address.replace("0.0.1", "0.0.2")
        with pytest.raises(PrerequisiteMissing, match=rf"^cluster\.address: no Ray cluster answers at {named} \({resolved}\): .*refused"):
            _check_reachable(named)


def test_cluster_that_is_not_running_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(PrerequisiteMissing, match=r"^cluster\.address: no Ray cluster answers at auto: Could not find any running"):
        _check_reachable("auto")


def test_address_local_is_left_to_ray() -> None:
    _check_reachable("local")
