"""``python -m flowrt.serving MODEL ...``: serve frozen models over HTTP, until SIGTERM or SIGINT.

Prints one line on stdout once it answers. Then what was asked is answered to its end; a second signal ends it at once.
What keeps it from starting is one line on stderr, and exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.base.errors import AuthenticationError, FlowrtError, GraphError
from flowrt.net.door.addresses import is_loopback
from flowrt.net.door.descriptors import take_descriptors
from flowrt.net.door.tokens import load_token
from flowrt.serving.batching import Batching
from flowrt.serving.server import LOOK_SECONDS, ModelServer
from flowrt.session.blocking import loop_factory
from flowrt.session.options import Options

if TYPE_CHECKING:
    from typing import Any

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PLACE = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:]*)):(?P<port>\d{1,5})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; answers the exit code."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=given.log_level.upper(), format="%(levelname)s %(message)s")
    take_descriptors()  # each client has one
    try:
        server = _server(given)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(server, given.bind[0]))
    except (FlowrtError, OSError) as error:
        print(f"flowrt serving: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(server: ModelServer, host: str) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        if ended.is_set():
            signal.raise_signal(signal.SIGKILL)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end)
    async with server:
        names = ", ".join(server.endpoints)
        print(f"flowrt serving {names} ready on {f'[{host}]' if ':' in host else host}:{server.port}", flush=True)
        await ended.wait()


def _server(given: argparse.Namespace) -> ModelServer:
    """Raises what is wrong with what was said, but for the models themselves."""
    host, port = given.bind
    token = None if given.token_file is None else load_token(given.token_file)
    if token is None and given.tls is None and not given.anyone and not is_loopback(host):
        raise AuthenticationError(
            f"listening on {host or 'every address'}, beyond this machine: give --token-file or --tls, or "
            "--anyone where everybody there may ask"
        )
    batching = Batching(given.max_batch, given.max_delay, given.max_waiting, given.max_bytes << 20, given.timeout)
    return ModelServer(
        _named(given.models),
        host=host,
        port=port,
        batching=batching,
        options=Options(threads=given.threads, devices=given.devices),
        token=token,
        tls=given.tls,
        max_body=given.max_body << 20,
        look_seconds=given.look,
    )


def _named(models: Sequence[str]) -> Any:
    """By name; a file by itself is called as it is, without its ending."""
    pairs = [model.partition("=")[::2] if "=" in model else (Path(model).stem, model) for model in models]
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise GraphError(
            f"two models are called {twice[0]!r}: give files of different names, or name them, as one=FILE"
        )
    return dict(pairs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowrt.serving", description="Serve frozen models over HTTP: the Open Inference Protocol."
    )
    told = Batching()
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a file that Model.save wrote, or NAME=FILE")
    parser.add_argument("--bind", type=_place, default=("127.0.0.1", 8500), metavar="HOST:PORT", help="127.0.0.1:8500")
    parser.add_argument("--max-batch", type=int, default=told.max_batch, help="rows that run together; 1 joins nothing")
    parser.add_argument("--max-delay", type=_seconds, default=told.max_delay, metavar="2ms", help="to wait for others")
    parser.add_argument("--max-waiting", type=int, default=told.max_waiting, help="requests; what is beyond is refused")
    parser.add_argument("--max-bytes", type=int, default=told.max_bytes >> 20, metavar="MIB", help="of what waits")
    parser.add_argument("--max-body", type=int, default=16, metavar="MIB", help="of one request")
    parser.add_argument("--timeout", type=_seconds, default=told.timeout, metavar="30s", help="for one request")
    parser.add_argument("--threads", type=int, help="that compute; as many as there are cores")
    parser.add_argument("--devices", help="as in fr.Options, such as cuda")
    parser.add_argument("--token-file", metavar="FILE", help="whose token who asks has to bring")
    parser.add_argument("--tls", metavar="DIR", help="keys, as python -m flowrt.worker keys makes; who asks needs some")
    parser.add_argument("--anyone", action="store_true", help="may ask, beyond this machine too")
    parser.add_argument("--look", type=_seconds, default=LOOK_SECONDS, metavar="1s", help="between looks at the files")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _place(text: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return found["v6"] or found["host"] or "", int(found["port"])


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, as 2ms or 30s")
    return float(found[1]) * _UNITS[found[2]]


if __name__ == "__main__":
    sys.exit(main())
