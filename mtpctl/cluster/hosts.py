"""The hosts of the Ray cluster that this process has joined: what each has, and what is free on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtpctl.cluster.room import Host


@dataclass(frozen=True, slots=True)
class RayHost:
    """A host by its id in Ray: all its CPUs and GPUs (`whole`), and those that nobody has reserved (`free`).

    Nothing is free on a host that is being drained, where Ray starts nothing any more.
    """

    node: str
    whole: Host
    free: Host

    @property
    def name(self) -> str:
        """Its address; where several hosts have the same address, with the first characters of its id."""
        return self.whole.name


def ray_hosts() -> list[RayHost]:
    """The hosts that are alive, the head first and the others by their addresses, so that every call has them in the same order."""
    import ray
    from ray._private.state import available_resources_per_node

    free, leaving = available_resources_per_node(), draining()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=_order)
    addresses = [str(node["NodeManagerAddress"]) for node in alive]
    found = []
    for node, address in zip(alive, addresses, strict=True):
        key = str(node["NodeID"])
        name = address if addresses.count(address) == 1 else f"{address}/{key[:6]}"
        found.append(RayHost(key, _host(node["Resources"], name), _host({} if key in leaving else free.get(key, {}), name)))
    return found


def draining() -> set[str]:
    """Ids of the hosts that Ray was told to drain: they are alive, and will be taken away."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def living() -> set[str]:
    """Ids of the hosts that are alive, as far as Ray knows: Ray takes some seconds to notice that a host is gone."""
    import ray

    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def _host(resources: dict[str, Any], name: str) -> Host:
    return Host(float(resources.get("CPU", 0)), float(resources.get("GPU", 0)), name)


def _order(node: dict[str, Any]) -> tuple[bool, list[int], str]:
    address = str(node["NodeManagerAddress"])
    numbers = [int(part) for part in address.split(".")] if address.replace(".", "").isdigit() else []
    return "node:__internal_head__" not in node["Resources"], numbers, str(node["NodeID"])
