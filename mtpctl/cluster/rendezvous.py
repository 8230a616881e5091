"""Rendezvous of processes: one of them hosts a key-value store, and the others join it by its address.

The store binds to port 0, so that the system chooses a free port. A port that was selected earlier might be in use by then.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore

_CONNECT_S = 20.0


def host_store(host: str = "") -> TCPStore:
    """Start a store on a free port of `host` (default: this host's address). It has no authentication. Deleting the object ends it."""
    host = host or get_own_address()
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    address, port = listener.getsockname()[:2]
    # The store closes the socket.
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S), master_listen_fd=listener.detach()
    )


def get_own_address() -> str:
    """The address of this host in the Ray cluster. Without Ray, the address that its name resolves to, which is often the loopback."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else socket.gethostbyname(socket.gethostname())


def use_own_interface() -> None:
    """Make gloo use the interface of this host's address, unless the environment names another; its default is often the loopback."""
    address = get_own_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def address_of(store: TCPStore) -> str:
    """`host:port`, for `join_store`."""
    return f"{store.host}:{store.port}"


def join_store(address: str, wait_s: float = _CONNECT_S) -> TCPStore:
    """Join the store at `host:port`. Reading a key waits up to `wait_s` for it. Raises OSError or RuntimeError if there is no store."""
    host, port = address.rsplit(":", 1)
    # Fail immediately if nothing listens, since the store's own client would keep trying.
    socket.create_connection((host, int(port)), _CONNECT_S).close()
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set_timeout(timedelta(seconds=wait_s))
    return store
