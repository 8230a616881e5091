"""A folder in object storage, by fsspec: the calls that copies of checkpoints need, with one kind of error for all stores.

Keys and credentials come from where the store's own package takes them, such as `AWS_PROFILE` or `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mtpctl.errors import EnvironmentMissing, RuntimeFailure, UserError

FIELD = "train.checkpoint_copy"
_PROBE = ".mtpctl-probe"


class StoreFailed(RuntimeFailure):
    """The store did not do what it was asked: it does not answer, or refuses. `reason`: what it said, in one line."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class Absent(StoreFailed):
    """There is no object of that name, or no bucket."""


class Refused(StoreFailed):
    """The store refuses these credentials."""


class ObjectStore:
    """The folder at `url`. Names are relative to it, with `/` between their parts. Every call raises StoreFailed where it fails."""

    def __init__(self, url: str) -> None:
        """Raises UserError for a scheme that fsspec does not know, EnvironmentMissing where the scheme's package is not installed or its
        server is not reached (some connect at once)."""
        # Here, since few runs have a store.
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations

        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        # Listings are not kept: another machine may write here. A local folder makes the folders of its files by itself.
        options = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False}
        try:
            self._files, self._root = url_to_fs(self.url, **options)
        except ImportError as error:
            package = known_implementations[scheme]["class"].partition(".")[0]
            told = f"{scheme}:// needs the package {package}, which is not installed; install it, or remove the key"
            raise EnvironmentMissing(f"{FIELD}: {told}") from error
        except OSError as error:
            raise EnvironmentMissing(f"{FIELD}: {url} is not reached: {error}") from error
        except ValueError as error:
            raise UserError(f"{FIELD}: {url} is of no scheme that fsspec knows; write s3://…, gs://… or file:///…") from error

    def read(self, name: str) -> bytes | None:
        """The contents of an object, None where there is none."""
        with suppress(Absent), self._told("read", name):
            return bytes(self._files.cat_file(self._at(name)))
        return None

    def write(self, name: str, contents: bytes) -> None:
        """Make an object with these contents. It is there whole, or not at all."""
        with self._told("write", name):
            self._files.pipe_file(self._at(name), contents)

    def put(self, file: Path, name: str) -> None:
        """Copy a file there, and check that all of it has come."""
        with self._told("write", name):
            self._files.put_file(str(file), self._at(name))
            there = self._files.info(self._at(name))["size"]
        if there != (size := file.stat().st_size):
            raise StoreFailed(f"{self.url}/{name} has {there:,} of {size:,} bytes")

    def get(self, name: str, file: Path) -> None:
        """Copy an object to a file. Raises Absent where there is none."""
        with self._told("read", name):
            self._files.get_file(self._at(name), str(file))

    def names(self, folder: str) -> list[str]:
        """The names of all objects below a folder."""
        with suppress(Absent), self._told("read", folder):
            below = self._files.find(self._at(folder))
            return [path[len(self._root) + 1 :] for path in below]
        return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, in this order; those that are not there are left out."""
        for name in names:
            with suppress(Absent), self._told("remove", name):
                self._files.rm_file(self._at(name))

    def check(self) -> None:
        """Write, read and remove a small object.

        Raises UserError where there is no such bucket, EnvironmentMissing where the credentials are refused, StoreFailed where the store
        does not answer.
        """
        try:
            self.write(_PROBE, b"")
            self.read(_PROBE)
            self.remove([_PROBE])
        except Absent as error:
            raise UserError(f"{FIELD}: there is no place {self.url} ({error.reason}); make the bucket, or name another") from error
        except Refused as error:
            raise EnvironmentMissing(f"{FIELD}: {self.url} may not be written with the credentials here ({error.reason})") from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _told(self, what: str, name: str) -> Iterator[None]:
        """Turn any error of the store into a StoreFailed. Their packages have no error in common, and each has its client's besides."""
        try:
            yield
        except StoreFailed:
            raise
        except Exception as error:
            kind = Absent if isinstance(error, FileNotFoundError) else Refused if isinstance(error, PermissionError) else StoreFailed
            raise kind(f"cannot {what} {self.url}/{name}: {_reason(error)}", _reason(error)) from error


def _reason(error: Exception) -> str:
    """The first line that an error has to say; its kind where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
