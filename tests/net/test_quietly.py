"""Modules of a package without the package's own code."""

from __future__ import annotations

import subprocess
import sys

NODE = """
import sys
import flowrt.worker
assert "aiohttp.http_parser" in sys.modules
assert "aiohttp.client" not in sys.modules, "a node that starts pays for an HTTP client"
from aiohttp import web
import aiohttp
assert aiohttp.ClientSession is sys.modules["aiohttp.client"].ClientSession
assert web is aiohttp.web and aiohttp.__version__ and "ClientSession" in aiohttp.__all__
"""
USER = """
import aiohttp
import flowrt.net.door.heads
assert flowrt.net.door.heads.HttpRequestParser is aiohttp.http_parser.HttpRequestParser
"""
ABSENT = """
import sys
from flowrt.net.door.quietly import without_its_own_code
with without_its_own_code("no_such_package"):
    try:
        import no_such_package.part
    except ModuleNotFoundError as error:
        assert error.name == "no_such_package"
        sys.exit(0)
sys.exit(1)
"""


def test_a_node_has_the_parsers_of_aiohttp_and_who_wants_more_of_it_gets_that() -> None:
    run(NODE)


def test_a_package_that_was_imported_before_is_left_as_it_is() -> None:
    run(USER)


def test_a_package_that_is_not_there_is_missed_by_name() -> None:
    run(ABSENT)


def run(program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
