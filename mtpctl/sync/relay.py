"""A chain of hosts that pass on the files of a weight version while they download them, so that object storage sends each version once.

The first host of the chain downloads from the store (`mtpctl.sync.remote`), every other one from the host before it. Hosts also serve files
that are still growing, so each host of the chain adds a short delay and not a download.

If the host before it fails, or sends nothing for some seconds, a host gets the rest of the file, and the files that it has not begun, from
the store. The hosts after it allow `HOP_S` more, within which the file grows again, so they stay in the chain. A relayed file is compared
with its digest in the manifest before it gets its final name: wrong bytes are detected, and the file is downloaded from the store.

A file is requested by its path, which contains the random token of the version. Files cannot be listed.
"""

from __future__ import annotations

import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
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
HOP_S = 3.0
"""Added to `STALL_S` for each host before, so that only the first host after a hanging one gives it up."""
_REQUEST = re.compile(r"/(?P<folder>v\d{8}-\w+(/\w+)?)/(?P<name>\w+-\d{5}\.bin)\?nbytes=(?P<nbytes>\d{1,15})&hops=(?P<hops>\d{1,5})")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """The position of a host in the chain: the relay of the host before it, as `host:port`, and the number of hosts before it.

    The first host has no relay, and downloads from the store. `digests`: of the version's files, by name.
    """

    relay: str
    hops: int
    digests: Mapping[str, str]


class RelayFailed(Exception):
    """The relay cannot be reached, does not have the file, or stopped sending it."""


def patience(hops: int) -> float:
    """Seconds without a byte after which a host with `hops` hosts before it, and the relay that serves it, give up."""
    return STALL_S + HOP_S * hops


def partial(path: Path) -> Path:
    """Where a file is until it is complete. It always has the first bytes of the file, because relays pass it on."""
    return path.with_name(f".{path.name}")


class RelayServer:
    """Serves the files that this host has downloaded, or is downloading, from threads of this process."""

    def __init__(self, downloads: Callable[[], Path | None], host: str) -> None:
        """`downloads`: returns the host's folder of downloaded versions, None if there is none yet. `host`: the address to listen at."""
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
        matched = _REQUEST.fullmatch(handler.path)
        if matched is None:
            handler.send_error(404)
            return
        limit = patience(int(matched["hops"]))
        file = self._open(Path(matched["folder"], matched["name"]), limit)
        if file is None:
            handler.send_error(404)
            return
        with file:
            handler.send_response(200)
            handler.send_header("Content-Length", matched["nbytes"])
            handler.end_headers()
            left, grown = int(matched["nbytes"]), time.monotonic()
            while left:
                if data := self.read(file):
                    handler.wfile.write(data[:left])
                    left, grown = left - len(data[:left]), time.monotonic()
                elif time.monotonic() - grown > limit:
                    handler.close_connection = True
                    return
                else:
                    time.sleep(POLL_S)

    def _open(self, name: Path, limit: float) -> IO[bytes] | None:
        """A file, or the part of it that exists. Waits `limit` seconds for the download to begin; None if it does not."""
        until = time.monotonic() + limit
        while True:
            if (folder := self._downloads()) is not None:
                path = folder / name
                for each in (path, partial(path), path):  # it may get its final name in between
                    try:
                        return each.open("rb", buffering=0)
                    except FileNotFoundError:
                        continue
            if time.monotonic() > until:
                return None
            time.sleep(POLL_S)


def download(link: ChainLink, name: str, nbytes: int, part: Path) -> bool:
    """Download a file of `nbytes` into `part`. Returns whether it is complete; if not, `part` has its first bytes.

    `name`: folder and name of the file. Raises OSError if `part` cannot be written.
    """
    try:
        with part.open("wb") as file, closing(_receive(link, name, nbytes)) as pieces:
            for data in pieces:
                file.write(data)
                file.flush()
    except RelayFailed as error:
        # Without the folder, whose name is a secret.
        _LOG.warning("%s from the relay %s: %s; downloading from the store", part.name[1:], link.relay, error)
        return False
    return True


def _receive(link: ChainLink, name: str, nbytes: int) -> Generator[bytes]:
    """The bytes of a file, as they arrive. Raises RelayFailed."""
    host, _, port = link.relay.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=patience(link.hops))
    try:
        connection.request("GET", f"/{name}?nbytes={nbytes}&hops={link.hops}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise RelayFailed(f"status {answer.status}")
        left = nbytes
        while left > 0:
            data = answer.read1(PIECE)  # what has arrived, not a whole piece
            if not data:
                raise RelayFailed(f"{nbytes - left:,} of {nbytes:,} bytes")
            yield data
            left -= len(data)
    except (OSError, http.client.HTTPException) as error:
        raise RelayFailed(str(error)) from error
    finally:
        connection.close()


@cache
def serve(url: str) -> str:
    """Serve what this host downloads from the store at `url`, once per process. Returns `host:port`."""
    from mtpctl.cluster.rendezvous import own_address
    from mtpctl.sync.remote import find_cache

    return RelayServer(lambda: find_cache(url), own_address()).address


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
