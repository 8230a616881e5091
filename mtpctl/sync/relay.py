"""A chain of hosts that pass on the files of a weight version while they download them, so that object storage sends each version once.

The first host of the chain downloads from the store (`mtpctl.sync.remote`), every other one from the host before it. Hosts also serve files
that are still growing, so each host of the chain adds a short delay and not a download. If the host before it fails, a host downloads the
file from the store, and the hosts after it wait for it to grow again. A file gets its final name when it is complete, and its bytes are
those of the store from any source, so a host that fails delays others and cannot change what they receive.

A file is requested by its path, which contains the random token of the version. Files cannot be listed.
"""

from __future__ import annotations

import http.client
import logging
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

PIECE = 1 << 20
POLL_S = 0.005
CLOSE_S = 0.05
"""Seconds within which a relay notices that it is closed."""
STALL_S = 10.0
"""Seconds without a byte after which the host before counts as failed."""
HOP_S = 2.0
"""Added to `STALL_S` for each host before, so that only the first host after a hanging one gives it up."""
_PATH = re.compile(r"/(?P<folder>v\d{8}-\w+(/\w+)?)/(?P<name>\w+-\d{5}\.bin)")
_LOG = logging.getLogger(__name__)


def partial(path: Path) -> Path:
    """Where a file is until it is complete."""
    return path.with_name(f".{path.name}")


class RelayServer:
    """Serves the files that this host has downloaded, or is downloading, from threads of this process."""

    def __init__(self, downloads: Callable[[], Path], host: str) -> None:
        """`downloads`: returns the host's folder of downloaded versions. `host`: the address to listen at."""
        relay = self

        class Handler(BaseHTTPRequestHandler):
            timeout = STALL_S

            def do_GET(self) -> None:
                relay._answer(self)

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        self._downloads = downloads

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._http = Server((host, 0), Handler)
        self.address = f"{host}:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(CLOSE_S,), name="relay", daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def read(self, file: IO[bytes]) -> bytes:
        """The next bytes of a file to send; empty if it has not grown."""
        return file.read(PIECE)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, _, query = handler.path.partition("?")
        matched, wanted = _PATH.fullmatch(path), urllib.parse.parse_qs(query).get("nbytes", [""])[0]
        if matched is None or not wanted.isdecimal():
            handler.send_error(404)
            return
        file = _open(self._downloads() / matched["folder"] / matched["name"])
        if file is None:
            handler.send_error(404)
            return
        with file:
            handler.send_response(200)
            handler.send_header("Content-Length", wanted)
            handler.end_headers()
            left, grown = int(wanted), time.monotonic()
            while left:
                if data := self.read(file):
                    handler.wfile.write(data[:left])
                    left, grown = left - len(data[:left]), time.monotonic()
                elif time.monotonic() - grown > STALL_S:
                    handler.close_connection = True
                    return
                else:
                    time.sleep(POLL_S)


def _open(path: Path) -> IO[bytes] | None:
    """A file, or the part of it that exists. Waits for the download to begin; None if it does not."""
    until = time.monotonic() + STALL_S
    while True:
        for each in (path, partial(path), path):  # it may get its final name in between
            try:
                return each.open("rb", buffering=0)
            except FileNotFoundError:
                continue
        if time.monotonic() > until:
            return None
        time.sleep(POLL_S)


def download(relay: str, name: str, nbytes: int, part: Path, *, hops: int) -> bool:
    """Download a file of `nbytes` from the relay at `host:port`. Returns whether it is complete.

    `name`: folder and name of the file. `hops`: the number of hosts before this one.
    """
    host, _, port = relay.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=STALL_S + HOP_S * hops)
    try:
        connection.request("GET", f"/{name}?nbytes={nbytes}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        with part.open("wb", buffering=0) as file:
            while data := answer.read1(PIECE):  # what has arrived, not a whole piece
                file.write(data)
        if (size := part.stat().st_size) != nbytes:
            raise OSError(f"{size:,} of {nbytes:,} bytes")
    except (OSError, http.client.HTTPException) as error:
        _LOG.warning("%s from the relay %s: %s; downloading from the store", name, relay, error)
        return False
    finally:
        connection.close()
    return True


@cache
def serve(url: str) -> str:
    """Serve what this host downloads from the store at `url`, once per process. Returns `host:port`."""
    from mtpctl.cluster.rendezvous import own_address
    from mtpctl.sync.remote import open_cache

    return RelayServer(lambda: open_cache(url), own_address()).address


def upstream_of(addresses: Sequence[str]) -> list[tuple[str, int]]:
    """For the relay addresses of receivers, the relay from which each one's host downloads, and the number of hosts before it.

    The first host gets an empty address. Receivers of one host download once, and get the same relay.
    """
    hosts: dict[str, str] = {}
    for address in addresses:
        hosts.setdefault(address.rpartition(":")[0], address)
    order, chain = list(hosts), ["", *hosts.values()]
    positions = [order.index(address.rpartition(":")[0]) for address in addresses]
    return [(chain[position], position) for position in positions]
