"""The section `cluster`: which Ray cluster a run joins or starts, its devices, and deadlines."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from mtpctl.recipe.section import Complaints, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray cluster to join; default: one is started on this machine.")
    num_cpus: PositiveInt | None = Field(None, description="CPUs of the local cluster; default: this machine's.")
    num_gpus: NonNegativeInt | None = Field(None, description="GPUs of the local cluster; default: this machine's.")
    gpus_per_node: PositiveInt = Field(8, description="GPUs of a host, for the placement plan.")
    gpu_gib: PositiveFloat | None = Field(
        None, description="Memory of a card in GiB, for the memory plan; default: this machine's cards, where it has any."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cpu with sync.transport: shm, else cuda.")
    interface: str | None = Field(
        None,
        description="Network interface over which NCCL and gloo join ranks, such as bond0; default: the loopback on one host; with "
        "cluster.address NCCL's choice, and for gloo that of the host's address.",
    )
    actor_deadline_s: PositiveFloat = Field(300.0, description="Seconds that an actor has to start.")
    step_deadline_s: PositiveFloat = Field(
        1800.0,
        description="The run stops after so many seconds in which an incomplete batch got no response, or in one call to a trainer.",
    )


ADDRESS = re.compile(r"auto|local|(?:\w+://)?\S+:[0-9]+\S*")


def address_fits(cluster: ClusterConfig) -> Complaints:
    """Refuse an address that Ray cannot read."""
    address = cluster.address
    if address is not None and not ADDRESS.fullmatch(address):
        yield f"cluster.address: {address} is no address of a Ray cluster; write HOST:PORT, ray://HOST:PORT, or auto"
