"""Rendezvous of processes: one of them holds a key-value store, and the others join it by its address.

The store opens port 0, so that the system chooses a free one: a port that was looked up as free before might be taken by the time the store
opens it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore

_CONNECT_S = 20.0


def host_store(host: str = "") -> TCPStore:
    """A store at a free port of `host`, by default this host's address. It is closed with the returned object.

    Anyone who can reach the port can read and write the store. By default torch would listen on all interfaces.
    """
    host = host or _own_address()
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    address, port = listening.getsockname()[:2]
    # The store closes the socket.
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S), master_listen_fd=listening.detach()
    )


def _own_address() -> str:
    """The address of this host in the Ray cluster; without Ray, the address that its name resolves to, which is often the loopback."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else socket.gethostbyname(socket.gethostname())


def use_own_interface() -> None:
    """Have gloo use the interface of this host's address, unless the environment names another.

    By itself gloo uses the interface that the host's name resolves to, which is often the loopback, where other hosts cannot reach it.
    """
    address = _own_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def address_of(store: TCPStore) -> str:
    """`host:port`, for `join_store`."""
    return f"{store.host}:{store.port}"


def join_store(address: str, wait_s: float = _CONNECT_S) -> TCPStore:
    """The store that another process holds at `host:port`. Reading a key waits up to `wait_s` until it is there.

    Raises OSError or RuntimeError where no store is found.
    """
    host, port = address.rsplit(":", 1)
    # Where nobody listens, the store's own client would keep trying.
    socket.create_connection((host, int(port)), _CONNECT_S).close()
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set_timeout(timedelta(seconds=wait_s))
    return store
