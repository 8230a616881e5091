"""A local S3 server in a separate process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

BUCKET = "bucket"
START_S = 60.0


class S3Server:
    """A server that accepts any credentials until `refuse` is called."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it at its port, empty."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                assert self._process.poll() is None and time.monotonic() < end, "the S3 server did not start"
                time.sleep(0.05)

    @property
    def environment(self) -> dict[str, str]:
        """Options of its clients, which do not retry."""
        keys = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret"}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1", **keys}

    def make_bucket(self) -> None:
        # Clients are kept with the address of the server that they were made for.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir(BUCKET)

    def refuse(self) -> None:
        """Reject all credentials from now on."""
        plain = {"Content-Type": "text/plain"}  # of a form the server would read nothing
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset-auth", data=b"0", headers=plain, method="POST"))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def serving() -> Iterator[S3Server]:
    """A server with one bucket, used by this process through its environment."""
    server = S3Server()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            server.make_bucket()
            yield server
    finally:
        server.stop()
