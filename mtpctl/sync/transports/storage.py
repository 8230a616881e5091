"""Buckets as objects in object storage, or on another file system of fsspec.

The sender writes the files of a version as `shm` does, and uploads them. Receivers read them from the copy that their host downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from mtpctl.plan.buckets import Bucket
from mtpctl.sync.protocol import bucket_file
from mtpctl.sync.remote import fetch, locked, open_cache, split_address
from mtpctl.sync.transports import shm

NAME = "storage"


class Reader(shm.Reader):
    """Reads the buckets of one version, which are downloaded unless this host has them; `address` is the URL of its folder."""

    def __init__(self, address: str, device: torch.device | str = "cpu") -> None:
        super().__init__(address, device)
        self._address = address

    def stream(self, section: str, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, torch.Tensor]]:
        cache = open_cache(split_address(self._address)[0], sum(bucket.nbytes for bucket in buckets))
        with ExitStack() as stack:
            # Open the files while holding the lock, because other receivers delete versions that they do not need.
            with locked(cache):
                self.folder = fetch(self._address, cache, {bucket_file(section, bucket): bucket.nbytes for bucket in buckets})
                files = [stack.enter_context(self._open(section, bucket)) for bucket in buckets]
            yield from self._load(section, buckets, files)
