"""The last published versions on this host, for the current receivers and for replicas that restart or join later.

A version is a folder `v00000007` of bucket files with a `manifest.json`, which is written last and renamed into place; a folder without one
is being written or deleted, or its writer was killed. Folders are in shared memory if there is room; receivers then map the pages of the
publisher. Otherwise they are on disk. A reader that has mapped a bucket keeps it, even if the version is deleted meanwhile.

A version may have only the changes since its base, the previous version. Some of these versions also have all buckets, in the subfolder
`complete`, for receivers that do not have the base. All versions that are needed to read a stored version are stored, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import PREFIX, SHARED_MEMORY
from mtpctl.cluster.local import on_one_host
from mtpctl.cluster.object_store import ObjectStore
from mtpctl.errors import PrerequisiteMissing
from mtpctl.recipe.numerics import sends_unquantized_too
from mtpctl.sync.protocol import Manifest, VersionConflict
from mtpctl.sync.remote import delete_cache, with_retries

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

RETAINED_VERSIONS = 2
_MANIFEST = "manifest.json"
_BASE = "base"
"""A file with the number of the base, so that it is known without reading the manifest."""
_UNQUANTIZED = "unquantized"
"""Subfolder with the unquantized versions for the log-prob server, if the store's versions are quantized."""
COMPLETE = "complete"
"""The subfolder with all buckets of a version that is also stored as changes; empty if the buckets are in the object store."""


def is_unquantized(root: Path | str) -> bool:
    """Whether this is the folder of a store of unquantized versions."""
    return Path(root).name == _UNQUANTIZED


def store_name(folder: Path) -> str:
    """A name for the versions of the run in `folder`, unique on this machine."""
    return f"{folder.name}-{zlib.crc32(str(folder.resolve()).encode()):08x}"


def default_root(name: str, needed_bytes: int, fallback: Path) -> Path:
    """Choose the folder for versions of `needed_bytes`: in shared memory if the retained versions and the next one fit, else `fallback`.

    Readers must be on this machine or have access to `fallback`. Removes a folder of this name that a killed process left in shared memory.
    If another container with the same run path uses the name in the same shared memory, the folder gets another name.
    """
    roots = [SHARED_MEMORY / f"{PREFIX}{name}", SHARED_MEMORY / f"{PREFIX}{name}-{leftovers.process_namespace()}"]
    free_roots = [root for root in roots if leftovers.vacate(root)]
    nbytes = (RETAINED_VERSIONS + 1) * needed_bytes
    if free_roots and on_one_host() and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > nbytes:
        VersionStore(free_roots[0]).claim()
        return free_roots[0]
    return fallback


def _no_space_error(folder: Path, error: OSError) -> PrerequisiteMissing:
    return PrerequisiteMissing(f"{folder}: cannot hold published weights ({error.strerror}); free space there and start again")


class VersionStore:
    """Versions in one folder. One process writes, any number of processes read.

    With `remote` (transport `storage`), the buckets are in the object store, and the folder has only manifests.
    """

    def __init__(self, root: Path | str, remote: ObjectStore | None = None) -> None:
        self.root, self.remote = Path(root), remote

    @property
    def unquantized(self) -> VersionStore:
        """The store of unquantized versions, if the versions in this one are quantized."""
        return VersionStore(self.root / _UNQUANTIZED)

    def for_logprob(self, recipe: Recipe) -> VersionStore:
        """The store of the versions that the log-prob server loads: this one, or that of unquantized versions."""
        return self.unquantized if sends_unquantized_too(recipe) else self

    def folder(self, version: int) -> Path:
        """The folder of the buckets of `version`, which may not exist."""
        return self.root / f"v{version:08d}"

    def versions(self) -> list[int]:
        """Published versions in the store, oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self.root.glob(f"v*/{_MANIFEST}"))

    def open(self, version: int) -> Manifest:
        """The manifest of a published version. Raises VersionConflict if it is not, or no longer, in the store."""
        try:
            return Manifest.from_dict(json.loads((self.folder(version) / _MANIFEST).read_text()))
        except FileNotFoundError:
            raise VersionConflict(f"weight version {version} is not in {self.root}; there are {self.versions()}") from None

    def chain(self, version: int, live: int | None = None) -> list[Manifest]:
        """The manifests to apply in this order to get a published version.

        They begin with a complete version, or with the changes since the target's `live` version. Raises VersionConflict if a version is
        not in the store.
        """
        numbers = self._bases(version, live)
        if numbers[-1] == live:
            return [self.open(number) for number in reversed(numbers[:-1])]
        first, *rest = [self.open(number) for number in reversed(numbers)]
        if first.base is not None:
            first = replace(first.complete(), address=f"{first.address}/{COMPLETE}")
        return [first, *rest]

    def _bases(self, version: int, live: int | None = None) -> list[int]:
        """`version` and its chain of bases, until `live` or a version with all buckets."""
        numbers = [version]
        while numbers[-1] != live and (file := self.folder(numbers[-1]) / _BASE).exists() and not file.with_name(COMPLETE).exists():
            numbers.append(int(file.read_text()))
        return numbers

    def prepare(self, version: int) -> Path:
        """Create an empty folder for the buckets of `version`. Files of an earlier, unpublished attempt are removed.

        Raises VersionConflict unless `version` is newer than every published one, and PrerequisiteMissing if the folder cannot be created.
        """
        if (published := self.versions()) and version <= published[-1]:
            raise VersionConflict(f"weight version {version} is not newer than the published {published[-1]}")
        folder = self.folder(version)
        try:
            self.discard(version)
            folder.mkdir(parents=True)
        except OSError as error:
            raise _no_space_error(folder, error) from error
        return folder

    def commit(self, manifest: Manifest) -> None:
        """Publish the written version, and retain the newest `RETAINED_VERSIONS` and their bases.

        Raises PrerequisiteMissing if the file system is full.
        """
        folder = self.folder(manifest.version)
        temporary = folder / f"{_MANIFEST}.{os.getpid()}"
        try:
            if manifest.base is not None:
                (folder / _BASE).write_text(str(manifest.base))
            temporary.write_text(json.dumps(manifest.to_dict()))
            temporary.replace(folder / _MANIFEST)
        except OSError as error:
            raise _no_space_error(folder, error) from error
        retained = {number for version in self.versions()[-RETAINED_VERSIONS:] for number in self._bases(version)}
        for path in self.root.glob("v*"):
            if int(path.name[1:]) not in retained:
                self.discard(int(path.name[1:]))

    def discard(self, version: int) -> None:
        """Delete a version. Its manifest is deleted first, so that no reader finds an incomplete version."""
        folder = self.folder(version)
        (folder / _MANIFEST).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        self._remove_remote(rf"{folder.name}-\w+")

    def _remove_remote(self, pattern: str) -> None:
        """Remove the buckets of versions whose folders match the regular expression. Raises StoreFailed."""
        if (remote := self.remote) is not None:
            names = with_retries(lambda: remote.names(""))
            with_retries(lambda: remote.remove(name for name in names if re.fullmatch(pattern, name.partition("/")[0])))

    def claim(self) -> None:
        """Create an empty folder that is marked with this process as its owner, so that it can be removed if the process is killed.

        An existing folder on disk is always deleted, because it is in the run directory, which this process has locked. Raises
        PrerequisiteMissing if the folder cannot be created, or is in shared memory and may be in use by another process.
        """
        if self.root.parent != SHARED_MEMORY:
            self.close()
        self._remove_remote(r"v\d{8}-\w+")
        try:
            is_claimed = leftovers.claim(self.root)
        except OSError as error:
            raise PrerequisiteMissing(f"{self.root}: cannot hold published weights: {error.strerror}") from error
        if not is_claimed:
            raise PrerequisiteMissing(f"{self.root}: may be in use by another process; start again, or delete it if no process uses it")

    def close(self) -> None:
        """Delete the folder with all versions. Idempotent. Raises StoreFailed if their buckets cannot be removed from the remote store."""
        if self.root.exists():
            leftovers.delete(self.root)
            self._remove_remote(r"v\d{8}-\w+")
            if self.remote is not None:
                delete_cache(self.remote.url)
