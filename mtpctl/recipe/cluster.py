"""The section `cluster`: the Ray cluster of a run, its devices and deadlines."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray cluster to join; default: start one on this machine.")
    num_cpus: PositiveInt | None = Field(None, description="CPUs of the local cluster; default: this machine's.")
    num_gpus: NonNegativeInt | None = Field(None, description="GPUs of the local cluster; default: this machine's.")
    gpus_per_node: PositiveInt = Field(8, description="GPUs per host, for the placement plan.")
    gpu_gib: PositiveFloat | None = Field(None, description="GPU memory in GiB, for the memory plan; default: detected on this machine.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cpu with sync.transport: shm, else cuda.")
    interface: str | None = Field(
        None,
        description="Network interface of NCCL and gloo, such as bond0; default: the loopback on one host; with cluster.address NCCL's "
        "choice, and for gloo the interface of the host's address.",
    )
    actor_deadline_s: PositiveFloat = Field(300.0, description="Timeout for the start of an actor, in seconds.")
    step_deadline_s: PositiveFloat = Field(
        1800.0, description="Timeout in seconds for a call to the trainer, and for a batch that receives no response; the run then stops."
    )


ADDRESS = re.compile(r"auto|local|(?:\w+://)?\S+:[0-9]+\S*")


def check_address(cluster: ClusterConfig) -> Complaints:
    """Report an address that Ray cannot parse."""
    address = cluster.address
    if address is not None and not ADDRESS.fullmatch(address):
        yield f"cluster.address: {address} is not the address of a Ray cluster; write HOST:PORT, ray://HOST:PORT, or auto"
