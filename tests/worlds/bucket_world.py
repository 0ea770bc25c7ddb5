"""A bucket of a server of our own, for as long as a test needs it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import fsspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@contextmanager
def bucket_served() -> Iterator[str]:
    """The URL of a bucket, which sessions here and the processes that they start find by the environment."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    settings = {"AWS_ACCESS_KEY_ID": "us", "AWS_SECRET_ACCESS_KEY": "us", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        settings["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of servers before this one
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket"
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()
