"""The listing of a folder (`files.json`): the size and checksum of each file, used to detect damage.

It is written after all other files. Checkpoints on disk and the folders of a copy in object storage have one. Checksums are 64-bit XXH3,
which is faster than a disk. They do not detect forgery: anyone who can change a file can change the listing too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Buffer, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from mtpctl.errors import UserError

LISTING = "files.json"
_FORMAT = 3
_CHECKSUM = re.compile(r"xxh3:[0-9a-f]+")
_CHUNK_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10
"""Maximum size in bytes of a file whose checksum is always compared, such as the state of a run, which has less than 1 KiB."""
_THREADS = 8
"""Maximum number of files read concurrently: enough to saturate an array of disks."""


class Damaged(Exception):
    """A file of a folder is missing or damaged. `file` is relative to the folder."""

    def __init__(self, file: str, damage: str) -> None:
        super().__init__(f"{file} {damage}")
        self.file, self.damage = file, damage


class OtherVersion(UserError):
    """An intact listing in the format of another version of mtpctl. Its folder is left unchanged."""


@dataclass(frozen=True)
class Entry:
    """A file: its size in bytes, and its checksum as `xxh3:HEX`."""

    size: int
    checksum: str


class Checksum:
    """Computes the entry of a file incrementally, while its bytes are written or read."""

    def __init__(self) -> None:
        import xxhash  # Imported here, because most commands read no checksums.

        self._size, self._xxh3 = 0, xxhash.xxh3_64()

    def update(self, data: Buffer) -> None:
        self._size += memoryview(data).nbytes
        self._xxh3.update(data)

    @property
    def entry(self) -> Entry:
        return Entry(self._size, f"xxh3:{self._xxh3.hexdigest()}")


def entry_of(file: Path) -> Entry:
    checksum = Checksum()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            checksum.update(buffer[:count])
    return checksum.entry


def entry_of_text(text: str) -> Entry:
    checksum = Checksum()
    checksum.update(text.encode())
    return checksum.entry


@dataclass(frozen=True)
class Listing:
    """The files of a folder by relative name. `number`: ordinal of a checkpoint in its run or copy; 0 for other folders."""

    number: int
    files: dict[str, Entry]

    @property
    def nbytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> bytes:
        record: dict[str, object] = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**record, "checksum": _checksum_of(record)}).encode()

    @classmethod
    def of(cls, contents: bytes, source: Path | str = LISTING) -> Listing:
        """Parse a listing. Raises Damaged if it is invalid, OtherVersion if it has another format. source: named in the error."""
        try:
            record = json.loads(contents)
            if record.pop("checksum") != _checksum_of(record):
                raise ValueError("another checksum")
            if record["format"] != _FORMAT:
                raise OtherVersion(
                    f"{source}: was saved by another version of mtpctl (format {record['format']}, this version reads {_FORMAT}); use that "
                    "version, or another folder"
                )
            files = {_check_relative(name): _parse_entry(entry) for name, entry in record["files"].items()}
            return cls(int(record["number"]), files)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(LISTING, "is truncated or overwritten") from error


def _checksum_of(record: dict[str, object]) -> str:
    """The checksum of a listing, over all fields except the checksum itself."""
    return entry_of_text(json.dumps(record)).checksum


def _check_relative(name: str) -> str:
    """Return `name`, a relative file name. Raises ValueError if it leads out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("not a file of the folder")
    return name


def _parse_entry(record: dict[str, object]) -> Entry:
    """Parse an entry. Raises ValueError or KeyError if it is invalid."""
    size, checksum = record["size"], record["checksum"]
    if not isinstance(size, int) or not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
        raise ValueError("not an entry")
    return Entry(size, checksum)


def files_in(folder: Path) -> Iterator[Path]:
    """The files of a folder, except the listing."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / LISTING)


def read_listing(folder: Path) -> Listing | None:
    """The listing of a folder, None if it has none. Raises Damaged if it cannot be read, OtherVersion if it has another format."""
    try:
        return Listing.of((folder / LISTING).read_bytes(), folder / LISTING)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(LISTING, f"cannot be read ({error.strerror})") from error


def write_listing(folder: Path, number: int, known_entries: Mapping[str, Entry], *, exclude: Collection[str] = ()) -> Listing:
    """Write the listing of a folder, except for files named in `exclude`. Entries that are not in `known_entries` are computed."""
    files = {file.relative_to(folder).as_posix(): file for file in files_in(folder) if file.name not in exclude}
    listing = Listing(number, {name: known_entries.get(name) or entry_of(file) for name, file in files.items()})
    save_listing(folder, listing)
    return listing


def save_listing(folder: Path, listing: Listing) -> None:
    """Write a listing into its folder atomically, and flush it to disk."""
    partial = folder / f"{LISTING}.partial"
    partial.write_bytes(listing.to_json())
    flush(partial)
    partial.replace(folder / LISTING)


def check_listing(folder: Path, listing: Listing, *, verify_checksums: bool) -> None:
    """Compare the files of a folder with its listing. Raises Damaged if one differs.

    Compares all sizes, and the checksums of small files, because callers read these without another check. verify_checksums:
    compare the checksums of all files.
    """
    for name, entry in listing.files.items():
        if (size := size_of(folder, name)) != entry.size:
            raise Damaged(name, f"has {size:,} bytes, and {entry.size:,} were saved")
        if entry.size <= _SMALL_BYTES:
            _check_contents(folder, name, entry)
    if not verify_checksums:
        return
    large = [name for name, entry in listing.files.items() if entry.size > _SMALL_BYTES]
    large.sort(key=lambda name: listing.files[name].size, reverse=True)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda name: _check_contents(folder, name, listing.files[name]), large))


def size_of(folder: Path, name: str) -> int:
    """The size of a file in bytes. Raises Damaged if it is missing or cannot be read."""
    try:
        return (folder / name).stat().st_size
    except FileNotFoundError as error:
        raise Damaged(name, "is missing") from error
    except OSError as error:
        raise Damaged(name, f"cannot be read ({error.strerror})") from error


def _check_contents(folder: Path, name: str, entry: Entry) -> None:
    try:
        actual = entry_of(folder / name)
    except OSError as error:
        raise Damaged(name, f"cannot be read ({error.strerror})") from error
    if actual != entry:
        raise Damaged(name, f"has changed since it was saved (checksum {actual.checksum}, and {entry.checksum} was saved)")


def pointer_of(root: Path) -> Path:
    """The file with the name of the newest checkpoint under `root`, for users; resuming does not read it."""
    return root / "latest"


def write_latest(path: Path) -> None:
    """Atomically write the name of `path` to `latest` in its folder. Errors are ignored."""
    pointer = pointer_of(path.parent)
    partial = pointer.with_name(f"{pointer.name}.partial")
    with contextlib.suppress(OSError):
        partial.write_text(path.name)
        partial.replace(pointer)


def flush(path: Path) -> None:
    """Flush a file, or a folder with the renames in it, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
