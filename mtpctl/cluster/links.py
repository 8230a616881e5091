"""Measure the network between all pairs of hosts of a cluster, over TCP at the addresses that Ray uses.

Pairs are measured in rounds in which each host is in at most one pair, so measurements do not affect each other, and the time grows with
the number of hosts, not of pairs. A measurement is one TCP stream. NCCL over InfiniBand is faster, but a host with a bad cable or the
wrong interface is slower than the others with TCP as well as with NCCL.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtpctl.cluster.bundles import list_ray_hosts

TRANSFER_BYTES = 64 << 20
ROUNDS = 20
TIMEOUT_S = 30.0
SLOW_SHARE = 0.5
"""A link is slow if its rate is below this share of the median."""
SLOW_LATENCY = 5.0
"""A link is slow if its latency is more than this many times the median, and more than `SLOW_MARGIN_S` above it."""
SLOW_MARGIN_S = 1e-3


@dataclass(frozen=True, slots=True)
class Link:
    """The link between two hosts: its median round trip time, and its rate in bytes per second. `error`: why it was not measured."""

    first: str
    second: str
    latency_s: float = 0.0
    rate: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        figures = f"{self.rate / 1e9:.2f} GB/s, {1e3 * self.latency_s:.2f} ms round trip"
        return f"{self.first} – {self.second}: {self.error or figures}"


class Endpoint:
    """One end of a link. Echoes `ROUNDS` single bytes, then receives `TRANSFER_BYTES` and replies with one byte."""

    def listen(self, host: str = "") -> tuple[str, int]:
        """Listen at a free port of `host`, by default this host's address in the cluster. Returns the address and the port."""
        if not host:
            import ray

            host = str(ray.util.get_node_ip_address())
        self._socket = socket.create_server((host, 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return host, int(self._socket.getsockname()[1])

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                for _ in range(ROUNDS):
                    connection.sendall(connection.recv(1))
                remaining_bytes = TRANSFER_BYTES
                while remaining_bytes and (received_bytes := len(connection.recv(min(remaining_bytes, 1 << 20)))):
                    remaining_bytes -= received_bytes
                connection.sendall(b"!")

    def measure(self, host: str, port: int) -> tuple[float, float]:
        """The median round trip time to another endpoint in seconds, and bytes per second. Raises OSError if it cannot be reached."""
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trips = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                connection.sendall(b"?")
                connection.recv(1)
                round_trips.append(time.perf_counter() - start)
            block = bytes(1 << 20)
            start = time.perf_counter()
            for _ in range(TRANSFER_BYTES // len(block)):
                connection.sendall(block)
            if connection.recv(1) != b"!":
                raise ConnectionError("the other end closed the connection")
            return statistics.median(round_trips), TRANSFER_BYTES / (time.perf_counter() - start)


def schedule_pairs(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` hosts, in rounds in which each host is in at most one pair (the circle method of round-robin tournaments)."""
    circle: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = [(a, b) for a, b in zip(circle[:half], reversed(circle[half:]), strict=True) if a is not None and b is not None]
        rounds.append([(min(pair), max(pair)) for pair in pairs])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def find_slow(links: Sequence[Link]) -> list[Link]:
    """Links that failed, and links that are much slower than the median."""
    measured_links = [link for link in links if not link.error]
    if not measured_links:
        return list(links)
    median_rate, median_latency_s = (
        statistics.median(link.rate for link in measured_links),
        statistics.median(link.latency_s for link in measured_links),
    )
    max_latency_s = max(SLOW_LATENCY * median_latency_s, median_latency_s + SLOW_MARGIN_S)
    return [link for link in links if link.error or link.rate < SLOW_SHARE * median_rate or link.latency_s > max_latency_s]


async def measure_links() -> list[Link]:
    """Measure the link between each pair of hosts of the Ray cluster of this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    hosts = list_ray_hosts()
    remote = ray.remote(Endpoint)
    endpoints: list[Any] = [
        remote.options(num_cpus=0, max_concurrency=2, scheduling_strategy=NodeAffinitySchedulingStrategy(host.node_id, soft=False)).remote()
        for host in hosts
    ]
    try:
        addresses = await asyncio.gather(*(endpoint.listen.remote() for endpoint in endpoints))

        async def measure(first: int, second: int) -> Link:
            names = hosts[first].name, hosts[second].name
            try:
                latency, rate = await asyncio.wait_for(endpoints[first].measure.remote(*addresses[second]), 2 * TIMEOUT_S)
            except ray.exceptions.RayError as error:  # first: a RayTaskError may be the connection's TimeoutError
                return Link(*names, error=f"not reached: {getattr(error, 'cause', None) or type(error).__name__}")
            except TimeoutError:
                return Link(*names, error=f"no answer within {2 * TIMEOUT_S:g} s")
            return Link(*names, latency, rate)

        links: list[Link] = []
        for pairs in schedule_pairs(len(hosts)):
            links += await asyncio.gather(*(measure(*pair) for pair in pairs))
        return links
    finally:
        for endpoint in endpoints:
            ray.kill(endpoint)
