"""The last published versions on this host, for receivers now and for replicas that restart or join later.

A version is a folder `v00000007` of bucket files with a `manifest.json`, which is written last and put in place by a
rename: a folder without one was never published. Folders live in shared memory where there is some, so that receivers map
the very pages the publisher wrote, or on disk otherwise. A reader that has mapped a bucket keeps it, even when the version
is pruned meanwhile.
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

KEPT = 2
_MANIFEST = "manifest.json"


def name_of(folder: Path) -> str:
    """A name for the versions of the run in `folder`, made of its whole path: two runs may have folders of one name on one machine."""
    return f"{folder.name}-{zlib.crc32(str(folder.resolve()).encode()):08x}"


def default_root(name: str, needed_bytes: int, fallback: Path) -> Path:
    """Where versions of `needed_bytes` belong: shared memory where the kept ones and the one being written fit, else `fallback`.

    Their readers are on this machine, or can read `fallback`. What a killed process of the same name left in shared memory is removed.
    Another container whose run directory has the same path may use this name in the same shared memory: the root has another name then.
    """
    roots = [SHARED_MEMORY / f"{PREFIX}{name}", SHARED_MEMORY / f"{PREFIX}{name}-{leftovers.namespace()}"]
    free = [root for root in roots if leftovers.vacate(root)]
    if free and on_one_host() and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > (KEPT + 1) * needed_bytes:
        VersionStore(free[0]).claim()
        return free[0]
    return fallback


def _unusable(folder: Path, error: OSError) -> EnvironmentMissing:
    return EnvironmentMissing(f"{folder}: cannot hold published weights ({error.strerror}); free space there and start again")


class VersionStore:
    """Versions under one folder. One process writes, any number read."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def folder(self, version: int) -> Path:
        """Where the buckets of `version` are, or would be."""
        return self.root / f"v{version:08d}"

    def versions(self) -> list[int]:
        """Published versions that are still here, oldest first."""
        found = self.root.glob(f"v*/{_MANIFEST}")
        return sorted(int(path.parent.name[1:]) for path in found)

    def open(self, version: int) -> Manifest:
        """A published version. Raises VersionConflict where it is not, or no longer, here."""
        try:
            return Manifest.from_dict(json.loads((self.folder(version) / _MANIFEST).read_text()))
        except FileNotFoundError:
            raise VersionConflict(f"weight version {version} is not in {self.root}; there are {self.versions()}") from None

    def prepare(self, version: int) -> Path:
        """An empty folder to write buckets of `version` to.

        What an earlier attempt left there unpublished is removed. Raises VersionConflict unless `version` is newer than
        every published one, and EnvironmentMissing where the folder cannot be made.
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
        """Publish the written version, and delete all but the newest ones. Raises EnvironmentMissing if the file system is full."""
        folder = self.folder(manifest.version)
        draft = folder / f"{_MANIFEST}.{os.getpid()}"
        try:
            draft.write_text(json.dumps(manifest.to_dict()))
            draft.replace(folder / _MANIFEST)
        except OSError as error:
            raise _unusable(folder, error) from error
        keep = set(self.versions()[-KEPT:])
        for path in self.root.glob("v*"):
            if int(path.name[1:]) not in keep:
                self.discard(int(path.name[1:]))

    def discard(self, version: int) -> None:
        """Remove a version. Its manifest goes first, so that it is never seen in part."""
        folder = self.folder(version)
        (folder / _MANIFEST).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)

    def claim(self) -> None:
        """Empty the folder, and mark it as this process's, so that it is recognised as a leftover if the process is killed.

        On disk it is emptied whoever made it: it is in the run directory, which this process has for itself. Raises EnvironmentMissing
        where the folder cannot be made, or is in shared memory and another process may use it.
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
        """Remove everything, the folder included. May be called again."""
        if self.root.exists():
            leftovers.delete(self.root)
