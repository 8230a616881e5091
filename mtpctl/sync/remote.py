"""Uploads the files of weight versions to object storage, and downloads them once per host, for the transport `storage`.

All receivers of a host share the folder of downloaded files, which is in shared memory if they fit.

With relays, hosts form a chain, so that object storage sends each version once. The first host downloads from the store, every other host
from the host before it. Hosts serve files while they download them, so each host adds a short delay instead of the time of a download.

If the previous host fails or sends nothing for some seconds, a host downloads all remaining bytes from the store. Each host waits `HOP_S`
longer than the host before it. So when one host switches to the store, its file grows again before the later hosts give up, and they stay
in the chain. A relayed file is compared with its digest in the manifest before it gets its final name. If it differs, it is downloaded from
the store. A file is requested by its path, which contains the random token of the version. Files cannot be listed.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event
from typing import IO

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import PREFIX, SHARED_MEMORY
from mtpctl.cluster.object_store import ObjectMissing, ObjectStore, StoreFailed, UrlField
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import Manifest, Section, SyncError, bucket_file

PIECE = 1 << 20
POLL_S = 0.005
CLOSE_S = 0.05
"""Seconds within which a relay notices that it is closed."""
STALL_S = 10.0
"""Seconds without a byte after which the previous host counts as failed."""
HOP_S = 3.0
"""Seconds added to `STALL_S` for each earlier host, so that only the next host gives up if a host hangs."""
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


def stall_limit_s(hops: int) -> float:
    """Seconds without a byte after which a host with `hops` hosts before it, and the relay that serves it, give up."""
    return STALL_S + HOP_S * hops


def partial_path(path: Path) -> Path:
    """The path of an incomplete file. It is written from the beginning to the end, because relays send it while it grows."""
    return path.with_name(f".{path.name}")


class RelayServer:
    """Serves the files that this host has downloaded or is downloading, in threads of this process."""

    def __init__(self, downloads: Callable[[], Path | None], host: str) -> None:
        """`downloads`: returns the host's folder of downloaded versions, None if there is none yet. `host`: the address to listen on."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = STALL_S

            def do_GET(self) -> None:
                server._respond(self)

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

            def handle(self) -> None:
                # The next host disconnects if it downloads from the store instead.
                with suppress(BrokenPipeError, ConnectionResetError):
                    super().handle()

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
        """Read the next bytes of a file to send; empty if the file has not grown."""
        return file.read(PIECE)

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        request = _REQUEST.fullmatch(handler.path)
        if request is None:
            handler.send_error(404)
            return
        stall_limit = stall_limit_s(int(request["hops"]))
        file = self._open(Path(request["folder"], request["name"]), stall_limit)
        if file is None:
            handler.send_error(404)
            return
        with file:
            handler.send_response(200)
            handler.send_header("Content-Length", request["nbytes"])
            handler.end_headers()
            remaining_bytes, last_growth = int(request["nbytes"]), time.monotonic()
            while remaining_bytes:
                if data := self.read(file):
                    handler.wfile.write(data[:remaining_bytes])
                    remaining_bytes, last_growth = remaining_bytes - len(data[:remaining_bytes]), time.monotonic()
                elif time.monotonic() - last_growth > stall_limit:
                    handler.close_connection = True
                    return
                else:
                    time.sleep(POLL_S)

    def _open(self, name: Path, timeout_s: float) -> IO[bytes] | None:
        """Open a file or its incomplete download. Waits `timeout_s` seconds for the download to begin; None if it does not."""
        deadline = time.monotonic() + timeout_s
        while True:
            if (folder := self._downloads()) is not None:
                path = folder / name
                for candidate in (path, partial_path(path), path):  # the file may get its final name in between
                    try:
                        return candidate.open("rb", buffering=0)
                    except FileNotFoundError:
                        continue
            if time.monotonic() > deadline:
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
        # The folder is not logged, because its name is secret.
        _LOG.warning("%s from the relay %s: %s; downloading from the store", part.name[1:], link.relay, error)
        return False
    return True


def _receive(link: ChainLink, name: str, nbytes: int) -> Generator[bytes]:
    """Yield the bytes of a file as they arrive. Raises RelayFailed."""
    host, _, port = link.relay.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=stall_limit_s(link.hops))
    try:
        connection.request("GET", f"/{name}?nbytes={nbytes}&hops={link.hops}")
        response = connection.getresponse()
        if response.status != 200:
            raise RelayFailed(f"status {response.status}")
        remaining_bytes = nbytes
        while remaining_bytes > 0:
            data = response.read1(PIECE)  # what has arrived, not a whole piece
            if not data:
                raise RelayFailed(f"{nbytes - remaining_bytes:,} of {nbytes:,} bytes")
            yield data
            remaining_bytes -= len(data)
    except (OSError, http.client.HTTPException) as error:
        raise RelayFailed(str(error)) from error
    finally:
        connection.close()


@cache
def start_relay(url: str) -> str:
    """Start this process's relay for downloads from the store at `url`. Returns its `host:port`."""
    from mtpctl.cluster.rendezvous import get_own_address

    return RelayServer(lambda: find_cache(url), get_own_address()).address


def upstream_of(addresses: Sequence[str]) -> list[tuple[str, int]]:
    """Arrange the hosts of receivers in a chain. `addresses`: the relay of each receiver's host.

    Returns for each receiver the relay from which its host downloads, and the number of hosts before it. The first host gets an empty
    address. Receivers on one host download once, and get the same relay.
    """
    hosts: dict[str, str] = {}
    for address in addresses:
        hosts.setdefault(address.rpartition(":")[0], address)
    host_order, upstream_by_position = list(hosts), ["", *hosts.values()]
    positions = [host_order.index(address.rpartition(":")[0]) for address in addresses]
    return [(upstream_by_position[position], position) for position in positions]


URL_FIELD = UrlField("sync.url", "set another sync.transport")
CONNECTIONS = 8
"""Files that are transferred at once."""
ATTEMPTS, PAUSE_S = 4, 1.0
"""Maximum attempts of a transfer, and the pause before the second one in seconds. The pause doubles with each attempt."""
_ADDRESS = re.compile(r"(?P<url>.+)/(?P<version>v\d{8}-\w+(/\w+)?)")
"""An address: the store's URL and the folder of a version. The folder has the sender's token in its name, so runs do not share files."""
_IN_CHAIN_MARKER = "chained"
"""Marker file: this host is in a chain. Its relay may send a file that is still being downloaded, so every file is written from the
beginning to the end (`partial_path`)."""


def with_retries[T](call: Callable[[], T]) -> T:
    """Call a function, and repeat the call if the store fails. Raises StoreFailed after `ATTEMPTS`, or if an object does not exist."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return call()
        except ObjectMissing:
            raise
        except StoreFailed:
            time.sleep(PAUSE_S * 2**attempt)
    return call()


def upload(store: ObjectStore, files: Sequence[Path], folder: str) -> None:
    """Upload files into a folder of the store. Raises StoreFailed."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(lambda file: with_retries(lambda: store.put(file, f"{folder}/{file.name}")), files))


def compute_digest(file: Path) -> str:
    with file.open("rb") as contents:
        return hashlib.file_digest(contents, "sha256").hexdigest()


def compute_digests(files: Sequence[Path]) -> dict[str, str]:
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return dict(zip((file.name for file in files), pool.map(compute_digest, files), strict=True))


def make_host_folder(name: str, nbytes: int) -> Path:
    """Return this host's folder of this name.

    If there is none, it is created in shared memory if `nbytes` fit, else on disk, and marked with this process as its owner. Raises
    SyncError if it cannot be created.
    """
    if (existing := _find_host_folder(name)) is not None:
        return existing
    fits = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > nbytes
    folder = (SHARED_MEMORY if fits else Path(tempfile.gettempdir())) / f"{PREFIX}{name}"
    try:
        leftovers.make_marked(folder)
    except OSError as error:
        if not folder.exists():  # another process may have been faster
            raise SyncError(f"{folder}: the folder for weights cannot be created: {error.strerror}") from error
    return folder


def _find_host_folder(name: str) -> Path | None:
    folders = [root / f"{PREFIX}{name}" for root in (SHARED_MEMORY, Path(tempfile.gettempdir()))]
    return next((folder for folder in folders if folder.exists()), None)


def _cache_name(url: str) -> str:
    return f"fetched-{zlib.crc32(url.encode()):08x}"


def open_cache(url: str, nbytes: int) -> Path:
    """Return the folder of this host for versions of the store at `url`. If there is none, it is created for versions of `nbytes`.

    It has room for two, because a version is deleted after the next one is complete.
    """
    return make_host_folder(_cache_name(url), 2 * nbytes)


def find_cache(url: str) -> Path | None:
    """Find the folder of this host for versions of the store at `url`; None before the first download."""
    return _find_host_folder(_cache_name(url))


def delete_cache(url: str) -> None:
    """Delete the files that this host has downloaded from the store at `url`."""
    if (cache := find_cache(url)) is not None:
        shutil.rmtree(cache, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other processes from a folder."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(address: str, cache: Path, files: Mapping[str, int], link: ChainLink | None = None) -> Path:
    """Download missing files of the version at `address`. Returns their folder. Raises SyncError.

    `files`: sizes in bytes, by name. `link`: the position of this host in a chain; None for receivers that do not know the chain, such as
    log-prob ranks, which download from the store. After the first failure of the relay, the remaining files are downloaded from the store.
    """
    url, version = split_address(address)
    folder = cache / version
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in files if not (folder / name).exists()]
    if not missing:
        return folder
    if link is not None:
        (cache / _IN_CHAIN_MARKER).touch()
    elif (cache / _IN_CHAIN_MARKER).exists():
        link = ChainLink("", 0, {})
    store, relay_failed = ObjectStore(url, URL_FIELD), Event()

    # Files get their final name when they are complete, so that a killed download leaves no incomplete file under that name.
    def download_from_store(name: str) -> None:
        temporary = folder / f".{name}.whole"  # not `partial_path`: the store may write the end of a file first
        with_retries(lambda: store.get(f"{version}/{name}", temporary))
        if (size := temporary.stat().st_size) != files[name]:
            raise StoreFailed(f"{name} has {size:,} of {files[name]:,} bytes")
        temporary.rename(folder / name)

    def download_in_chain(name: str, link: ChainLink) -> None:
        part = partial_path(folder / name)
        part.unlink(missing_ok=True)
        is_relayed = bool(link.relay) and not relay_failed.is_set()
        if is_relayed and not download(link, f"{version}/{name}", files[name], part):
            relay_failed.set()
        with_retries(lambda: store.append(f"{version}/{name}", part, files[name]))
        if is_relayed and compute_digest(part) != link.digests[name]:
            relay_failed.set()
            _LOG.warning("%s from the relay %s does not match its digest; downloading it from the store", name, link.relay)
            part.unlink()
            with_retries(lambda: store.append(f"{version}/{name}", part, files[name]))
        part.rename(folder / name)

    try:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(download_from_store if link is None else partial(download_in_chain, link=link), missing))
    except (StoreFailed, OSError) as error:
        raise SyncError(f"{address}: the weights cannot be downloaded: {error}") from error
    return folder


def split_address(address: str) -> tuple[str, str]:
    """The store's URL and the folder of a version in it."""
    match = _ADDRESS.fullmatch(address)
    assert match is not None, address
    return match["url"], match["version"]


def files_of(sections: Mapping[Section, Sequence[Bucket]]) -> dict[str, int]:
    """The sizes of the buckets' files in bytes, by name."""
    return {bucket_file(section, bucket): bucket.nbytes for section, buckets in sections.items() for bucket in buckets}


def prefetch(manifests: Sequence[Manifest]) -> None:
    """Download these versions of one store, and delete all other versions on this host. Raises SyncError.

    `manifests` has several versions if a receiver is more than one version behind and must apply them in order. The `VersionStore` records
    no relays, so the files of these are downloaded from object storage.
    """
    nbytes = sum(manifest.nbytes for manifest in manifests)
    cache = open_cache(split_address(manifests[0].address)[0], nbytes)
    with locked(cache):
        used_folders = set()
        for manifest in manifests:
            files = files_of({section: plan.wire_buckets for section, plan in manifest.sections.items()})
            link = ChainLink(manifest.relay, manifest.hops, manifest.digests) if manifest.digests else None
            used_folders.add(fetch(manifest.address, cache, files, link).relative_to(cache).parts[0])
        for version in cache.glob("v*"):
            if version.name not in used_folders:
                shutil.rmtree(version)
