"""The Ray cluster of a run: the one at `cluster.address`, or a local one that starts and ends with the run.

The daemons of a local cluster run in separate sessions, on the loopback interface. Ray 2.60 starts the GCS server, the raylet and its
helpers in the driver's process group. `timeout`, a shell that ends a job, or a closed terminal signals the whole group. The daemons then
end first, and the driver can no longer save a checkpoint. To reproduce, call `ray.init()` in a script and send SIGTERM to its process
group. If the host has an interface other than loopback, Ray replaces 127.0.0.1 by the address of that interface, so that other hosts can
reach its ports, unless multi-host clusters are disabled (the default on macOS only). Ray also replaces the driver's SIGTERM handler by one
that exits immediately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import Watchdog
from mtpctl.cluster.process import make_log_folder_variables
from mtpctl.compat import replace_temporarily
from mtpctl.errors import ClusterResources, PrerequisiteMissing, UpstreamMoved
from mtpctl.recipe.schema import ClusterConfig

CONNECT_TIMEOUT_S = 5.0
"""Timeout of a connection to the address of a cluster, in seconds."""
MIN_SHARED_BYTES = 4 << 20
"""Bytes of shared memory that actors need in addition to weights."""
LOOPBACK = "lo"
"""The loopback interface on Linux."""
REQUIRED_DAEMONS = ("gcs_server", "raylet")
RAY_RELEASE = "2.60.0"
"""The release of Ray for which `Daemons.start_in_sessions` was written."""
MULTI_HOST_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If this variable is false, Ray uses the loopback address. Despite its name, it applies to every operating system."""


def on_one_host() -> bool:
    """Whether all actors are on this machine: Ray is not running, or has a single host."""
    import ray

    return not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) <= 1


def check_capacity(config: ClusterConfig, *, cpus: float, gpus: float) -> None:
    """Raise ClusterResources if a local cluster would have too few CPUs or GPUs."""
    if config.address is not None:
        return
    num_gpus = config.num_gpus
    if num_gpus is None and gpus:
        import torch

        num_gpus = torch.cuda.device_count()
        if not num_gpus:
            raise ClusterResources(
                "cluster.device: this machine has no GPU; set cluster.device: cpu to run on its CPUs, or cluster.address to join a cluster"
            )
    for name, required, available, field in (("CPU", cpus, config.num_cpus, "num_cpus"), ("GPU", gpus, num_gpus, "num_gpus")):
        if available is not None and required > available:
            raise _capacity_error(name, required, available, field)


def _capacity_error(name: str, required: float, available: float, field: str) -> ClusterResources:
    return ClusterResources(
        f"cluster.{field}: the recipe's actors need {required:g} {name}s, but the cluster has {available:g}; "
        f"use fewer replicas or ranks, or raise cluster.{field} above the machine's, so that actors share them"
    )


def check_shared_memory() -> None:
    """Raise PrerequisiteMissing if the shared memory of this host is full. Every process needs some for its semaphores."""
    memory = leftovers.SHARED_MEMORY
    if memory.is_dir() and (free := shutil.disk_usage(memory).free) < MIN_SHARED_BYTES:
        raise PrerequisiteMissing(
            f"{memory}: {free >> 10} KiB are free, but actors need at least {MIN_SHARED_BYTES >> 10}; free space there, or give the "
            "container more (docker run --shm-size)"
        )


def _check_reachable(address: str) -> None:
    """Raise PrerequisiteMissing if nothing listens where Ray would connect to, since Ray would retry for minutes.

    For `auto`, Ray looks for a cluster on this machine. Ray replaces a loopback address by the host's address, so it cannot reach the local
    cluster of another run, which listens on loopback only.
    """
    from ray._private.services import canonicalize_bootstrap_address

    resolved: str | None = address
    client = re.fullmatch(r"\w+://([^/]+:[0-9]+)", address)
    try:
        resolved = client[1] if client else canonicalize_bootstrap_address(address)
        if resolved is None:  # `local`: Ray starts a cluster
            return
        host, _, port = resolved.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        location = address if resolved == address else f"{address} ({resolved})"
        raise PrerequisiteMissing(f"cluster.address: no Ray cluster answers at {location}: {error}") from error


def _environment(config: ClusterConfig, logs: Path | None) -> dict[str, str]:
    """Environment variables of all actors."""
    interface, names = config.interface, {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    if interface is None and config.address is None:
        # On one host the loopback suffices, and other hosts cannot reach the ports, which have no authentication.
        interface, names = LOOPBACK, names - os.environ.keys()
    interfaces = {} if interface is None else dict.fromkeys(sorted(names), interface)
    return interfaces | (make_log_folder_variables(logs) if logs else {})


class Daemons:
    """The processes of a local Ray cluster, each in its own session; see `mtpctl.cluster.leftovers`."""

    def __init__(self) -> None:
        self._watchdog = Watchdog()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @contextlib.contextmanager
    def start_in_sessions(self) -> Iterator[None]:
        """Make `ray.init` in this block start its processes as these daemons, on loopback, and keep the driver's SIGTERM handler.

        Raises UpstreamMoved if the installed release of Ray is not the pinned one.
        """
        import ray

        if ray.__version__ != RAY_RELEASE:
            raise UpstreamMoved(
                f"{__name__} was written for Ray {RAY_RELEASE}, found {ray.__version__}: compare ray._private.services first"
            )
        error_message = f"{__name__}: Ray starts its processes in another way"
        previous = os.environ.get(MULTI_HOST_VARIABLE)
        os.environ[MULTI_HOST_VARIABLE] = "0"  # For child processes. Ray read the variable at import, so its constant is replaced below.
        try:
            with (
                replace_temporarily("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", False, error_message),
                replace_temporarily("ray._private.services", "ConsolePopen", self._start, error_message),
                replace_temporarily("ray._private.utils", "set_sigterm_handler", lambda handler: None, error_message),
            ):
                yield
        finally:
            if previous is None:
                del os.environ[MULTI_HOST_VARIABLE]
            else:
                os.environ[MULTI_HOST_VARIABLE] = previous

    def _start(self, command: list[str], *, preexec_fn: Callable[[], None], **options: Any) -> subprocess.Popen[bytes]:
        """Start a daemon in a new session; replaces Ray's `Popen`."""

        def run_in_child() -> None:
            self._watchdog.register()
            preexec_fn()

        process: subprocess.Popen[bytes] = subprocess.Popen(command, preexec_fn=run_in_child, start_new_session=True, **options)
        self._processes[os.path.basename(command[0])] = process
        return process

    def describe_ended(self) -> str | None:
        """The name and exit status of a required daemon that has ended; None if all are running."""
        for name in REQUIRED_DAEMONS:
            if name in self._processes and (status := self._processes[name].poll()) is not None:
                return f"{name} has ended with {f'signal {-status}' if status < 0 else f'exit code {status}'}"
        return None

    def close(self) -> None:
        """Kill the remaining daemons and their descendants."""
        self._watchdog.close()


def keep_token_private() -> None:
    """Create the token file of local Ray clusters without access for other users, or restrict an existing one.

    Ray would make it world-readable, and the token allows running code in the user's clusters. If the home directory is not writable, Ray
    reports the error.
    """
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    path = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:  # with mode 0600
            file.write(secrets.token_hex(32).encode())
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
        if path.stat().st_uid == os.getuid() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)


def make_private_sessions() -> Path:
    """Create the folder for Ray's sessions without access for other users.

    Raises PrerequisiteMissing if its parent belongs to another user, or if it cannot be created.
    """
    sessions = leftovers.sessions_folder()
    user_folder = sessions.parent
    try:
        user_folder.mkdir(mode=0o700, exist_ok=True)
        status = user_folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise PrerequisiteMissing(f"{user_folder}: does not belong to this user; remove it, or set RAY_TMPDIR to another folder")
        user_folder.chmod(0o700)
        sessions.mkdir(exist_ok=True)
    except OSError as error:
        raise PrerequisiteMissing(
            f"{user_folder}: cannot hold Ray's sessions ({error.strerror}); set RAY_TMPDIR to another folder"
        ) from error
    return sessions


@contextlib.contextmanager
def cluster(
    config: ClusterConfig, *, cpus: float, gpus: float, remove_leftovers: bool = True, logs: Path | None = None
) -> Iterator[Daemons | None]:
    """Connect to a Ray cluster with at least `cpus` and `gpus` while the block runs.

    Yields the daemons of a local cluster, None for one at an address. Actors write their output to files in the folder `logs`
    (`cluster/process.py`). The handler of SIGTERM is not changed. Raises ClusterResources if there are fewer CPUs or GPUs, and
    PrerequisiteMissing if shared memory is full, or Ray does not start or does not answer at the address.
    """
    check_capacity(config, cpus=cpus, gpus=gpus)
    if remove_leftovers:
        leftovers.remove()
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A busy machine may need longer than Ray's default of half a minute to start its daemons.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    # Ray would start an idle worker per CPU, but actors have their own environment and cannot use them.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if config.address is not None:
        _check_reachable(config.address)
    with contextlib.ExitStack() as stack:
        daemons = None
        if config.address is None:
            check_shared_memory()
            keep_token_private()
            daemons = Daemons()
            stack.callback(daemons.close)
        stack.callback(ray.shutdown)
        context = _connect(config, logs, daemons)
        if daemons is not None:
            session = Path(context.address_info["session_dir"])
            stack.callback(leftovers.unmark, session)  # The folder is kept after a normal end: errors refer to Ray's logs in it.
            with contextlib.suppress(OSError):  # On a full disk there is no mark, so the session of a killed run is not removed later.
                leftovers.mark(session)
        resources = ray.cluster_resources()
        for name, required, field in (("CPU", cpus, "num_cpus"), ("GPU", gpus, "num_gpus")):
            if required > (available := resources.get(name, 0)):
                raise _capacity_error(name, required, available, field)
        yield daemons


def _connect(config: ClusterConfig, logs: Path | None, daemons: Daemons | None) -> Any:
    """Call `ray.init`. Raises PrerequisiteMissing if it fails."""
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    sessions = None if config.address else str(make_private_sessions())
    with contextlib.nullcontext() if daemons is None else daemons.start_in_sessions():
        try:
            return ray.init(
                # Without "local", Ray would join the cluster of RAY_ADDRESS or of a `ray start` on this machine.
                address=config.address or "local",
                _temp_dir=sessions,
                num_cpus=None if config.address else config.num_cpus,
                num_gpus=None if config.address else config.num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=True,
                logging_level=logging.ERROR,
                namespace="mtpctl",
                runtime_env={"env_vars": variables} if (variables := _environment(config, logs)) else None,
            )
        except Exception as error:  # Ray raises plain `Exception` if one of its daemons does not start.
            problem = (
                f"cluster.address: no Ray cluster answers at {config.address}" if config.address else "Ray did not start on this machine"
            )
            raise PrerequisiteMissing(f"{problem}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                # Ray's handler ends the process immediately, and leaves its daemons running.
                signal.signal(signal.SIGTERM, on_sigterm)
