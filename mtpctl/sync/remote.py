"""Uploads the files of weight versions to object storage, and downloads them once per host, for the transport `storage`.

All receivers of a host share the folder of downloaded files, which is in shared memory if they fit.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import PREFIX, SHARED_MEMORY
from mtpctl.cluster.object_store import Absent, ObjectStore, StoreFailed, UrlField
from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import Manifest, Section, SyncError, bucket_file
from mtpctl.sync.relay import ChainLink, download, partial

FIELD = UrlField("sync.url", "set another sync.transport")
CONNECTIONS = 8
"""Files that are transferred at once."""
ATTEMPTS, PAUSE_S = 4, 1.0
"""Attempts of a transfer, and the seconds before the second one, which double."""
_ADDRESS = re.compile(r"(?P<url>.+)/(?P<version>v\d{8}-\w+(/\w+)?)")
"""An address: the store's URL and the folder of a version. Its name has the sender's token, so that no file of another run is reused."""
_CHAINED = "chained"
"""A file in a host's folder of downloads if the host is in a chain. Its relay may pass on every download."""
_LOG = logging.getLogger(__name__)


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


def digest_of(file: Path) -> str:
    with file.open("rb") as contents:
        return hashlib.file_digest(contents, "sha256").hexdigest()


def digests_of(files: Sequence[Path]) -> dict[str, str]:
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return dict(zip((file.name for file in files), pool.map(digest_of, files), strict=True))


def make_host_folder(name: str, nbytes: int) -> Path:
    """A folder of this host that is marked with the process that creates it: in shared memory if `nbytes` fit, else on disk."""
    if (existing := _find_host_folder(name)) is not None:
        return existing
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > nbytes
    folder = (SHARED_MEMORY if fits else Path(tempfile.gettempdir())) / f"{PREFIX}{name}"
    with suppress(OSError):  # another process was faster
        leftovers.make_marked(folder)
    return folder


def _find_host_folder(name: str) -> Path | None:
    folders = [root / f"{PREFIX}{name}" for root in (SHARED_MEMORY, Path(tempfile.gettempdir()))]
    return next((folder for folder in folders if folder.exists()), None)


def _cache_name(url: str) -> str:
    return f"fetched-{zlib.crc32(url.encode()):08x}"


def open_cache(url: str, nbytes: int) -> Path:
    """The folder of this host for versions of the store at `url`. If there is none, it is created for `nbytes`."""
    return make_host_folder(_cache_name(url), nbytes)


def find_cache(url: str) -> Path | None:
    """The folder of this host for versions of the store at `url`, if a download has created it."""
    return _find_host_folder(_cache_name(url))


def forget(url: str) -> None:
    """Delete what this host has downloaded from the store at `url`."""
    if (cache := find_cache(url)) is not None:
        shutil.rmtree(cache, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other processes from a folder."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(address: str, cache: Path, files: Mapping[str, int], link: ChainLink | None = None) -> Path:
    """Download the files that are missing. Returns their folder. Raises SyncError.

    `files`: their bytes, by name. `link`: if this host is in a chain of hosts. After the first failure of the relay, the store sends the
    rest. Receivers that do not know the chain, such as log-prob ranks, download from the store.
    """
    url, version = split_address(address)
    folder = cache / version
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in files if not (folder / name).exists()]
    if not missing:
        return folder
    if link is not None:
        (cache / _CHAINED).touch()
    elif (cache / _CHAINED).exists():
        link = ChainLink("", 0, {})
    store, relay_failed = ObjectStore(url, FIELD), Event()

    # Files are renamed when they are complete, so that a killed download leaves none under its name.
    def get(name: str) -> None:
        whole = folder / f".{name}.whole"  # not `partial`: the store may write its end first
        with_retries(lambda: store.get(f"{version}/{name}", whole))
        if (size := whole.stat().st_size) != files[name]:
            raise StoreFailed(f"{name} has {size:,} of {files[name]:,} bytes")
        whole.rename(folder / name)

    def get_in_chain(name: str, link: ChainLink) -> None:
        part = partial(folder / name)
        part.unlink(missing_ok=True)
        relayed = bool(link.relay) and not relay_failed.is_set()
        if relayed and not download(link, f"{version}/{name}", files[name], part):
            relay_failed.set()
        with_retries(lambda: store.append(f"{version}/{name}", part, files[name]))
        if relayed and digest_of(part) != link.digests[name]:
            relay_failed.set()
            _LOG.warning("%s from the relay %s has other bytes; downloading it from the store", name, link.relay)
            part.unlink()
            with_retries(lambda: store.append(f"{version}/{name}", part, files[name]))
        part.rename(folder / name)

    try:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(lambda name: get(name) if link is None else get_in_chain(name, link), missing))
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

    Several versions lead to the newest one for a receiver that is further behind. Their manifests are from the version store and name no
    relay, so such a host downloads from the object storage.
    """
    nbytes = sum(manifest.nbytes for manifest in manifests)
    cache = open_cache(split_address(manifests[0].address)[0], nbytes)
    with locked(cache):
        used = set()
        for manifest in manifests:
            files = files_of({section: plan.wire_buckets for section, plan in manifest.sections.items()})
            link = ChainLink(manifest.relay, manifest.hops, manifest.digests) if manifest.digests else None
            used.add(fetch(manifest.address, cache, files, link).relative_to(cache).parts[0])
        for version in cache.glob("v*"):
            if version.name not in used:
                shutil.rmtree(version)
