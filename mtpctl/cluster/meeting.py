"""Where processes find each other: a small key-value store, held open by one of them from the moment its address is told.

A port that was found free and let go may be another process's before it is opened again. So the store takes a port of the system's
choice and keeps it, and everyone else joins what is there.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore

_CONNECT_S = 20.0


def host_store(host: str = "") -> TCPStore:
    """A store at a free port of `host`, by default this host as others reach it. It is there for as long as it is held."""
    return TCPStore(host or _own_address(), 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))


def _own_address() -> str:
    """Where Ray reaches this host, in a process of Ray's; else where its name leads, which often is its loopback."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else socket.gethostbyname(socket.gethostname())


def address_of(store: TCPStore) -> str:
    """`host:port`, for `join_store`."""
    return f"{store.host}:{store.port}"


def join_store(address: str, wait_s: float = _CONNECT_S) -> TCPStore:
    """The store held at `host:port`; reading what nobody has written yet waits for `wait_s`.

    Raises OSError or RuntimeError where nobody holds one there.
    """
    host, port = address.rsplit(":", 1)
    # A store's client would go on trying where nobody listens any more.
    socket.create_connection((host, int(port)), _CONNECT_S).close()
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set_timeout(timedelta(seconds=wait_s))
    return store
