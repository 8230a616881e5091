"""The last published versions on this host, for the current receivers and for replicas that restart or join later.

A version is a folder `v00000007` of bucket files with a `manifest.json`, which is written last and renamed into place; a folder without
one was never published. Folders are in shared memory if there is room; receivers then map the pages of the publisher. Otherwise they are
on disk. A reader that has mapped a bucket keeps it, even if the version is deleted meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

from mtpctl.cluster import leftovers
from mtpctl.cluster.leftovers import PREFIX, SHARED_MEMORY
from mtpctl.cluster.local import on_one_host
from mtpctl.errors import EnvironmentMissing
from mtpctl.sync.protocol import Manifest, VersionConflict

VERSIONS_KEPT = 2
_MANIFEST = "manifest.json"


def name_of(folder: Path) -> str:
    """A name for the versions of the run in `folder`, unique on this machine."""
    return f"{folder.name}-{zlib.crc32(str(folder.resolve()).encode()):08x}"


def default_root(name: str, needed_bytes: int, fallback: Path) -> Path:
    """The folder for versions of `needed_bytes`: in shared memory if the retained ones and the next one fit, else `fallback`.

    Readers must be on this machine or have access to `fallback`. A folder of this name that a killed process left in shared memory is
    removed. If another container with the same run path uses the name in the same shared memory, the folder gets another name.
    """
    roots = [SHARED_MEMORY / f"{PREFIX}{name}", SHARED_MEMORY / f"{PREFIX}{name}-{leftovers.namespace()}"]
    free = [root for root in roots if leftovers.vacate(root)]
    if free and on_one_host() and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > (VERSIONS_KEPT + 1) * needed_bytes:
        VersionStore(free[0]).claim()
        return free[0]
    return fallback


def _unusable(folder: Path, error: OSError) -> EnvironmentMissing:
    return EnvironmentMissing(f"{folder}: cannot hold published weights ({error.strerror}); free space there and start again")


class VersionStore:
    """Versions in one folder. One process writes, any number of processes read."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

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

    def prepare(self, version: int) -> Path:
        """Create an empty folder for the buckets of `version`. Files of an earlier, unpublished attempt are removed.

        Raises VersionConflict unless `version` is newer than every published one, and EnvironmentMissing if the folder cannot be created.
        """
        if (published := self.versions()) and version <= published[-1]:
            raise VersionConflict(f"weight version {version} is not newer than the published {published[-1]}")
        folder = self.folder(version)
        try:
            self.discard(version)
            folder.mkdir(parents=True)
        except OSError as error:
            raise _unusable(folder, error) from error
        return folder

    def commit(self, manifest: Manifest) -> None:
        """Publish the written version, and retain the newest `VERSIONS_KEPT`. Raises EnvironmentMissing if the file system is full."""
        folder = self.folder(manifest.version)
        draft = folder / f"{_MANIFEST}.{os.getpid()}"
        try:
            draft.write_text(json.dumps(manifest.to_dict()))
            draft.replace(folder / _MANIFEST)
        except OSError as error:
            raise _unusable(folder, error) from error
        keep = set(self.versions()[-VERSIONS_KEPT:])
        for path in self.root.glob("v*"):
            if int(path.name[1:]) not in keep:
                self.discard(int(path.name[1:]))

    def discard(self, version: int) -> None:
        """Delete a version, its manifest first, so that no reader sees a part of it."""
        folder = self.folder(version)
        (folder / _MANIFEST).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)

    def claim(self) -> None:
        """Create an empty folder that is marked with this process as its owner, so that it can be removed if the process is killed.

        An existing folder on disk is deleted whoever created it, since it is in the run directory, which this process has locked. Raises
        EnvironmentMissing if the folder cannot be created, or is in shared memory and may be in use by another process.
        """
        if self.root.parent != SHARED_MEMORY:
            self.close()
        try:
            claimed = leftovers.claim(self.root)
        except OSError as error:
            raise EnvironmentMissing(f"{self.root}: cannot hold published weights: {error.strerror}") from error
        if not claimed:
            raise EnvironmentMissing(f"{self.root}: another process may keep its weights there; start again, or remove it once none does")

    def close(self) -> None:
        """Delete the folder with all versions. Idempotent."""
        if self.root.exists():
            leftovers.delete(self.root)
