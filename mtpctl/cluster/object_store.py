"""A folder in object storage, through fsspec, with the same errors for all stores.

The store's fsspec package reads its own credentials and settings, such as `AWS_PROFILE` and `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mtpctl.errors import PrerequisiteMissing, RuntimeFailure, UserError

_PROBE = ".mtpctl-probe"
REQUEST_BYTES, READ_AHEAD = 2 << 20, 2
"""Size of a request of `ObjectStore.append`, and number of concurrent requests. Small, so that files grow steadily over slow links."""


@dataclass(frozen=True, slots=True)
class UrlField:
    """The recipe key of a store's URL, and the fix if the store cannot be used, for messages."""

    key: str
    fix: str

    def __str__(self) -> str:
        return self.key


class StoreFailed(RuntimeFailure):
    """A request to the store failed. `reason`: the first line of the store's message."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class ObjectMissing(StoreFailed):
    """The object or the bucket does not exist."""


class AccessDenied(StoreFailed):
    """The store rejects the credentials."""


class ObjectStore:
    """The folder at `url`. Names are relative to it, with `/` as separator. Every method raises StoreFailed if the store fails."""

    def __init__(self, url: str, field: UrlField) -> None:
        """Raises UserError for an unknown scheme, PrerequisiteMissing if its package is not installed or its server is unreachable."""
        # Most runs have no store, so the import is deferred.
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.registry import known_implementations

        self.url, self._field = url.rstrip("/"), field
        scheme = url.partition("://")[0]
        # Listings are not cached, because another machine may write to the store.
        options = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False}
        try:
            self._files, self._root = url_to_fs(self.url, **options)
        except ImportError as error:
            package = known_implementations[scheme]["class"].partition(".")[0]
            # fsspec's own module for a scheme needs another package, which its error names.
            missing = f"cannot be used: {error}" if package == "fsspec" else f"needs the package {package}, which is not installed"
            raise PrerequisiteMissing(f"{field}: {scheme}:// {missing}; install it, or {field.fix}") from error
        except OSError as error:
            raise PrerequisiteMissing(f"{field}: {url} cannot be reached: {error}") from error
        except ValueError as error:
            raise UserError(f"{field}: fsspec does not know the scheme of {url}; use s3://…, gs://… or file:///…") from error
        self._is_local = isinstance(self._files, LocalFileSystem)

    def read(self, name: str) -> bytes | None:
        """The contents of an object; None if it does not exist."""
        with suppress(ObjectMissing), self._errors("read", name):
            return bytes(self._files.cat_file(self._object_path(name)))
        return None

    def write(self, name: str, contents: bytes) -> None:
        """Write an object: atomically in object storage and on the local file system, in place on others, such as sftp://."""
        with self._errors("write", name):
            path = self._object_path(name)
            if self._is_local:
                self._replace_file(Path(path), contents)
            else:
                self._files.pipe_file(path, contents)

    def put(self, file: Path, name: str) -> None:
        """Upload a file, and check its size."""
        with self._errors("write", name):
            self._files.put_file(str(file), self._object_path(name))
            stored_bytes = self._files.info(self._object_path(name))["size"]
        if stored_bytes != (file_bytes := file.stat().st_size):
            raise StoreFailed(f"{self.url}/{name} has {stored_bytes:,} of {file_bytes:,} bytes")

    def get(self, name: str, file: Path) -> None:
        """Download an object. Raises ObjectMissing if it does not exist.

        Until this returns, the contents of the file are undefined: s3fs gives it its full size first, and writes parts out of order.
        """
        with self._errors("read", name):
            self._files.get_file(self._object_path(name), str(file))

    def append(self, name: str, file: Path, nbytes: int) -> None:
        """Append the rest of an object of `nbytes` to a file with its first bytes; a missing file is created.

        The file always has the first bytes of the object, so it may be read while it grows. Raises ObjectMissing.
        """
        start = file.stat().st_size if file.exists() else 0

        def read(offset: int) -> bytes:
            return self.read_range(name, offset, min(offset + REQUEST_BYTES, nbytes))

        with ThreadPoolExecutor(READ_AHEAD) as pool, file.open("ab") as stream:
            offsets = iter(range(start, nbytes, REQUEST_BYTES))
            requests = deque(pool.submit(read, offset) for offset in islice(offsets, READ_AHEAD))
            while requests:
                data = requests.popleft().result()
                requests.extend(pool.submit(read, offset) for offset in islice(offsets, 1))
                stream.write(data)
                stream.flush()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of an object, which must have them."""
        with self._errors("read", name):
            data = bytes(self._files.cat_file(self._object_path(name), start=start, end=end))
        if len(data) != end - start:
            raise StoreFailed(f"{self.url}/{name} has {start + len(data):,} bytes, expected at least {end:,}")
        return data

    def names(self, folder: str) -> list[str]:
        """The names of all objects below a folder."""
        with suppress(ObjectMissing), self._errors("read", folder):
            return [path[len(self._root) + 1 :] for path in self._files.find(self._object_path(folder))]
        return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in the given order. Missing objects are skipped."""
        for name in names:
            with suppress(ObjectMissing), self._errors("remove", name):
                self._files.rm_file(self._object_path(name))

    def check(self) -> None:
        """Write, read and remove a small object. Raises UserError, PrerequisiteMissing or StoreFailed, with the fix."""
        try:
            self.write(_PROBE, b"")
            self.read(_PROBE)
            self.remove([_PROBE])
        except ObjectMissing as error:
            raise UserError(f"{self._field}: {self.url} does not exist ({error.reason}); create the bucket, or name another") from error
        except AccessDenied as error:
            raise PrerequisiteMissing(f"{self._field}: the credentials do not allow writing to {self.url} ({error.reason})") from error

    def _replace_file(self, file: Path, contents: bytes) -> None:
        # The name is random, because processes of several hosts may write the same file.
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            self._files.pipe_file(str(temporary), contents)
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _object_path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        """Convert any error of the store into StoreFailed: the packages of stores have no common base class of errors."""
        try:
            yield
        except StoreFailed:
            raise
        except Exception as error:
            error_type = (
                ObjectMissing
                if isinstance(error, FileNotFoundError)
                else AccessDenied
                if isinstance(error, PermissionError)
                else StoreFailed
            )
            raise error_type(f"cannot {verb} {self.url}/{name}: {_reason(error)}", _reason(error)) from error


def _reason(error: Exception) -> str:
    """The first line of an error's message; its type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
