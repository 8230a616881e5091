"""The section `cluster`: where Ray runs, and how long it may take."""

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
    gpu_gib: PositiveFloat | None = Field(None, description="Memory of a card in GiB, for the memory plan; default: nothing is checked.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    actor_deadline_s: PositiveFloat = Field(300.0, description="Seconds that an actor has to start.")
    step_deadline_s: PositiveFloat = Field(
        1800.0,
        description="Seconds without a response for an incomplete batch, or of one call to a trainer, after which the run stops.",
    )


ADDRESS = re.compile(r"auto|local|(?:\w+://)?\S+:[0-9]+\S*")


def address_reads(cluster: ClusterConfig) -> Complaints:
    """An address that Ray would not know what to do with."""
    address = cluster.address
    if address is not None and not ADDRESS.fullmatch(address):
        yield f"cluster.address: {address} is no address of a Ray cluster; write HOST:PORT, ray://HOST:PORT, or auto"
