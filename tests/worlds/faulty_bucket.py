"""What stands between a test and a bucket, and answers in its stead: late, wrongly, or not to the end."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import fsspec
import pytest

Fault: TypeAlias = str
"""'' for none; 'refused': 500; 'slow': in pieces, each a little later; 'cut': half of the answer, or
none, then gone; 'unanswered': all is done as asked, and nobody told."""


class FaultyBucket:
    """What becomes of requests: ``fault`` answers that, of a method and a path, in any thread."""

    def __init__(self) -> None:
        self.fault: Callable[[str, str], Fault] = lambda method, path: ""
        self.asked: list[tuple[str, str, Fault]] = []


@contextmanager
def faulty() -> Iterator[FaultyBucket]:
    """In the way to the bucket of the environment (`bucket_served`)."""
    bucket, real = FaultyBucket(), urlsplit(os.environ["AWS_ENDPOINT_URL"])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def _answer(self) -> None:
            fault = bucket.fault(self.command, self.path)
            bucket.asked.append((self.command, self.path, fault))
            if self.headers.get("Expect", "") == "100-continue":
                self.send_response_only(100)
                self.end_headers()
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if fault == "refused":
                self.send_response(500)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "cut" and self.command != "GET":
                self.close_connection = True
                return
            status, headers, found = self._forwarded(body)
            if fault == "unanswered":
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            length = next((value for name, value in headers if name.lower() == "content-length"), len(found))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if fault == "cut":
                self.wfile.write(found[: len(found) // 2])
                self.close_connection = True
                return
            size = max(1, len(found) // 5) if fault == "slow" else max(1, len(found))
            for first in range(0, len(found), size):
                if fault == "slow":
                    time.sleep(0.02)
                self.wfile.write(found[first : first + size])

        def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            assert real.hostname is not None
            with_it = http.client.HTTPConnection(real.hostname, real.port, timeout=30)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                with_it.request(self.command, self.path, body, headers)
                answer = with_it.getresponse()
                return answer.status, answer.getheaders(), answer.read()
            finally:
                with_it.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patch:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        patch.setenv("AWS_MAX_ATTEMPTS", "2")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        try:
            yield bucket
        finally:
            with suppress(Exception):
                fsspec.get_filesystem_class("s3").clear_instance_cache()
            server.shutdown()
            serving.join()
