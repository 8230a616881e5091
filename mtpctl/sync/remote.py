"""Uploads the files of weight versions to object storage, and downloads them once per host, for the transport `storage`.

All receivers of a host share the folder of downloaded files, which is in shared memory if they fit.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import PREFIX, SHARED_MEMORY
from mtpctl.cluster.object_store import Absent, ObjectStore, StoreFailed, UrlField
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import Manifest, Section, SyncError, bucket_file
from mtpctl.sync.relay import download, partial

FIELD = UrlField("sync.url", "set another sync.transport")
CONNECTIONS = 8
"""Files that are transferred at once."""
ATTEMPTS, PAUSE_S = 4, 1.0
"""Attempts of a transfer, and the seconds before the second one, which double."""
_ADDRESS = re.compile(r"(?P<url>.+)/(?P<version>v\d{8}-\w+(/\w+)?)")
"""An address: the store's URL and the folder of a version. Its name has the sender's token, so that no file of another run is reused."""


def with_retries[T](call: Callable[[], T]) -> T:
    """The result of `call`, which is repeated if the store fails. Raises StoreFailed after `ATTEMPTS`, or if an object does not exist."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return call()
        except Absent:
            raise
        except StoreFailed:
            time.sleep(PAUSE_S * 2**attempt)
    return call()


def upload(store: ObjectStore, files: Sequence[Path], folder: str) -> None:
    """Upload files into a folder of the store. Raises StoreFailed."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(lambda file: with_retries(lambda: store.put(file, f"{folder}/{file.name}")), files))


def make_host_folder(name: str, nbytes: int) -> Path:
    """A folder of this host that is marked with the process that creates it: in shared memory if `nbytes` fit, else on disk."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > nbytes
    roots = [SHARED_MEMORY, Path(tempfile.gettempdir())] if fits else [Path(tempfile.gettempdir()), SHARED_MEMORY]
    folders = [root / f"{PREFIX}{name}" for root in roots]
    folder = next((folder for folder in folders if folder.exists()), folders[0])
    if not folder.exists():
        with suppress(OSError):  # another process was faster
            leftovers.make_marked(folder)
    return folder


def open_cache(url: str, nbytes: int = 0) -> Path:
    """The folder of this host for versions of the store at `url`."""
    return make_host_folder(f"fetched-{zlib.crc32(url.encode()):08x}", nbytes)


def forget(url: str) -> None:
    """Delete what this host has downloaded from the store at `url`."""
    shutil.rmtree(open_cache(url), ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other processes from a folder."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(address: str, cache: Path, files: Mapping[str, int], *, relay: str = "", hops: int = 0) -> Path:
    """Download the files that are missing. Returns their folder. Raises SyncError.

    `files`: their bytes, by name. `relay`: `host:port` of another host that downloads them too, instead of the store
    (`mtpctl.sync.relay`); `hops`: the number of hosts before this one.
    """
    url, version = split_address(address)
    folder = cache / version
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in files if not (folder / name).exists()]
    if not missing:
        return folder
    store = ObjectStore(url, FIELD)

    def get(name: str) -> None:
        # Renamed when complete, so that a killed download leaves no file under this name.
        part = partial(folder / name)
        if not (relay and download(relay, f"{version}/{name}", files[name], part, hops=hops)):
            with_retries(lambda: store.get(f"{version}/{name}", part))
        if (size := part.stat().st_size) != files[name]:
            raise StoreFailed(f"{name} has {size:,} of {files[name]:,} bytes")
        part.rename(folder / name)

    try:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(get, missing))
    except (StoreFailed, OSError) as error:
        raise SyncError(f"{address}: the weights cannot be downloaded: {error}") from error
    return folder


def split_address(address: str) -> tuple[str, str]:
    """The store's URL and the folder of a version in it."""
    matched = _ADDRESS.fullmatch(address)
    assert matched is not None, address
    return matched["url"], matched["version"]


def files_of(sections: Mapping[Section, Sequence[Bucket]]) -> dict[str, int]:
    """The bytes of the buckets' files, by name."""
    return {bucket_file(section, bucket): bucket.nbytes for section, buckets in sections.items() for bucket in buckets}


def prefetch(manifests: Sequence[Manifest]) -> None:
    """Download these versions of one store, and delete others that this host has downloaded. Raises SyncError.

    Only the last one may come from a relay: other hosts may not have, or no longer have, the versions before it.
    """
    nbytes = sum(manifest.nbytes for manifest in manifests)
    cache = open_cache(split_address(manifests[0].address)[0], nbytes)
    with locked(cache):
        used = set()
        for manifest in manifests:
            files = files_of({section: plan.wire_buckets for section, plan in manifest.sections.items()})
            relay = manifest.relay if manifest is manifests[-1] else ""
            used.add(fetch(manifest.address, cache, files, relay=relay, hops=manifest.hops).relative_to(cache).parts[0])
        for version in cache.glob("v*"):
            if version.name not in used:
                shutil.rmtree(version)
