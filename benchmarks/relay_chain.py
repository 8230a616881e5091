"""A version that several hosts download from object storage: each from the store, or through each other (`sync.relay`).

    python benchmarks/relay_chain.py
    python benchmarks/relay_chain.py --mib 1024 --mbit 1000 --hosts 1 2 3 4 8

Every host is a folder of this machine with its own relay, and the threads of a host download into it. The store and each host send at most
--mbit megabits per second, all their connections together (a token bucket). So `direct` shares the store's link among all hosts, and in a
`chain` each link carries the version once. Hosts of a chain read ranges of objects as from any store (`ObjectStore.append`), and compare
digests. Reported are the seconds until the last host has every file, median of --rounds.

The model: with B bytes and the rate R, n hosts take n B / R directly, and B / R + d + (n - 2) h in a chain, where d is the delay of the
second host, which waits for the first ranges of the first one, and h that of every other host. R is fitted to one host, d to a chain of
two, and h to the longest measured chain. The table compares the model with the measurements, and extrapolates it to --extrapolate hosts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from harness import parser, print_environment
from mtpctl.bench.report import format_spread, markdown_table
from mtpctl.cluster.object_store import ObjectStore
from mtpctl.sync import remote
from mtpctl.sync.remote import ChainLink, RelayServer

PIECE = 64 << 10
VERSION = "v00000001-bench"


class Link:
    """A link that sends at most `rate` bytes per second, whatever number of connections it has."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at, self._lock = rate, 0.0, threading.Lock()

    def send(self, nbytes: int) -> None:
        """Return when the link has sent the bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


class LimitedRelay(RelayServer):
    """A relay with a rate limit."""

    def __init__(self, folder: Path, rate: float) -> None:
        self._link = Link(rate)
        super().__init__(lambda: folder, "127.0.0.1")

    def read(self, file: IO[bytes]) -> bytes:
        data = file.read(PIECE)
        self._link.send(len(data))
        return data


class LimitedStore(ObjectStore):
    """A store whose downloads share a link. A range arrives as a whole, as that of an HTTP request does."""

    link: Link

    def read_range(self, name: str, start: int, end: int) -> bytes:
        self.link.send(end - start)
        return super().read_range(name, start, end)

    def get(self, name: str, file: Path) -> None:
        source = Path(self.url.removeprefix("file://")) / name
        with source.open("rb", buffering=0) as reading, file.open("wb", buffering=0) as writing:
            while data := reading.read(PIECE):
                self.link.send(len(data))
                writing.write(data)


def measure(root: Path, url: str, files: dict[str, int], count: int, rate: float, *, chain: bool) -> float:
    """Seconds until all hosts have the files."""
    LimitedStore.link = Link(rate)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        folders = [Path(temporary, f"host-{number}") for number in range(count)]
        for folder in folders:
            folder.mkdir()
        relays = [LimitedRelay(folder, rate) for folder in folders]
        digests = remote.compute_digests([Path(url.removeprefix("file://"), VERSION, name) for name in files])
        sources = ["", *(relay.address for relay in relays[:-1])]
        links = [ChainLink(source, number, digests) if chain else None for number, source in enumerate(sources)]
        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            pairs = zip(folders, links, strict=True)
            fetches = [pool.submit(remote.fetch, f"{url}/{VERSION}", folder, files, link) for folder, link in pairs]
            for fetch in fetches:
                fetch.result()
        seconds = time.perf_counter() - began
        for relay in relays:
            relay.close()
        for folder in folders:
            for name in files:
                if (folder / VERSION / name).read_bytes() != Path(url.removeprefix("file://"), VERSION, name).read_bytes():
                    raise RuntimeError(f"{folder.name} has other bytes in {name}")
    return seconds


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=float, default=256, help="size of the version")
    arguments.add_argument("--files", type=int, default=8)
    arguments.add_argument("--mbit", type=float, default=500)
    arguments.add_argument("--hosts", nargs="+", type=int, default=[1, 2, 3, 4])
    arguments.add_argument("--extrapolate", nargs="+", type=int, default=[8, 64])
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    print_environment()
    rate, nbytes = options.mbit * 1e6 / 8, int(options.mib * (1 << 20)) // options.files
    remote.ObjectStore = LimitedStore  # type: ignore[misc]
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as temporary:
        root = Path(temporary)
        version = root / "store" / VERSION
        version.mkdir(parents=True)
        files = {f"target-{number:05d}.bin": nbytes for number in range(options.files)}
        for name in files:
            (version / name).write_bytes(os.urandom(nbytes))
        url = f"file://{root}/store"
        figures: dict[tuple[bool, int], list[float]] = {}
        for _ in range(options.rounds):
            for count in sorted({1, 2, 3, *options.hosts}):
                for chain in (False, True):
                    figures.setdefault((chain, count), []).append(measure(root, url, files, count, rate, chain=chain))
    medians = {key: statistics.median(values) for key, values in figures.items()}
    single_host = (medians[False, 1] + medians[True, 1]) / 2
    longest = max(*options.hosts, 3)
    second = medians[True, 2] - single_host
    further = (medians[True, longest] - medians[True, 2]) / (longest - 2)
    rows = []
    for count in sorted({1, 2, 3, *options.hosts, *options.extrapolate}):
        modelled = {False: count * single_host, True: single_host + (second + (count - 2) * further if count > 1 else 0.0)}
        cells = []
        for chain in (False, True):
            measured = format_spread(figures[chain, count], ".2f") if (chain, count) in figures else "–"
            cells += [measured, f"{modelled[chain]:.2f}"]
        rows.append([count, *cells])
    sent = options.files * nbytes / 1e6
    print(f"{sent:.1f} MB in {options.files} files, {options.mbit:g} Mbit/s per link")
    print(f"delay of the second host {second * 1e3:.0f} ms, of every other one {further * 1e3:.0f} ms")
    print()
    print(markdown_table(["hosts", "direct, s", "model", "chain, s", "model"], rows))


if __name__ == "__main__":
    main()
