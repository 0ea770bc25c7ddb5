"""What a Ray actor does for a node: it starts one as its child, says where it is, and ends when the child does.

Law: actor and node live and die together. The node is ``python -m flowrt.worker --die-with-parent`` in a process of its
own, so that Ray's threads and signals and the node's do not meet; when it ends unasked, so does the actor's process,
which Ray then starts again: as another *incarnation*, of the same task, at a port of the system's choice. A node that
cannot start says why to who asks, for some seconds, before Ray has another try.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowrt.base.errors import ResourceError
from flowrt.cluster.node_process import ENDS, address_in, arguments, ended_early, environment
from flowrt.net.door.tls import CA, CERT, KEY
from flowrt.net.door.tokens import save_token

TELLS = 10.0  # seconds for which a node's reason not to start is told before another try
KEYS = (CA, CERT, KEY)  # the files of a folder of keys that a node needs
LASTS, PAUSE = 10.0, 1.0  # seconds: a node that lasts no longer than that is started again only after a pause


class RayNode:
    """The node of a ``task``. ``home`` is the address of the one host that all are on, or empty: then it listens wide.

    ``options`` are those of ``python -m flowrt.worker``; ``paths`` are searched for ``imports`` first.
    """

    def __init__(
        self,
        task: str,
        token: str,
        home: str,
        options: Mapping[str, Any],
        imports: Sequence[str] = (),
        paths: Sequence[str] = (),
        delay: str = "",
        keys: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        self._task, self._token, self._home = task, token, home
        self._options, self._imports, self._paths, self._delay = dict(options), imports, paths, delay
        self._keys = dict(keys)
        self._said: dict[str, Any] = {"incarnation": secrets.token_hex(8)}
        self._known = threading.Event()  # where the node is, or why it does not start
        self._ending, self._ended = False, asyncio.Event()
        self._process: subprocess.Popen[str] | None = None
        threading.Thread(target=self._keep, name="flowrt-node", daemon=True).start()

    # ── what is asked by Ray's calls ──

    async def serves(self, known: str = "") -> dict[str, Any]:
        """Where the node is, once it serves: ``address``, ``host`` and ``pid``; or the ``failure`` to start.

        Who knows this ``incarnation`` waits for the next one, to which Ray repeats the call; when the node was ended,
        there is none, and ``ended`` says so, as it does where the node was ended while it started.
        """
        if known == self._said["incarnation"]:
            await self._ended.wait()
            return {"incarnation": known, "ended": True}
        await asyncio.to_thread(self._known.wait)
        return self._said

    async def secret(self) -> tuple[str, dict[str, bytes]]:
        """The token and the keys, for who takes part in a cluster that another process started."""
        return self._token, self._keys

    async def stop(self, grace: float) -> None:
        """End the node: asked first, then forced."""
        self._ending = True
        await asyncio.to_thread(self._stop, grace)
        self._ended.set()

    def _stop(self, grace: float) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # ── in the thread that keeps the child, whose end would end it ──

    def _keep(self) -> None:
        began = time.monotonic()
        try:
            self._run()
        except Exception as error:
            self._tell(failure=f"{self._task} did not start: {error}")
        if self._ending:
            return
        if "failure" in self._said:
            time.sleep(TELLS)
        elif time.monotonic() - began < LASTS:
            time.sleep(PAUSE)
        os._exit(1)

    def _run(self) -> None:
        """Run the node until it ends. Its keys lie in a folder as long as that, since it reads them again."""
        with tempfile.TemporaryDirectory(prefix="flowrt-keys-") if self._keys else nullcontext("") as keys:
            if self._keys:
                save_keys(keys, self._keys)
            with tempfile.TemporaryDirectory(prefix="flowrt-") as folder:
                process = self._process = self._spawn(Path(folder), keys)
                try:
                    self._tell(address=self._listen(process), pid=process.pid)
                except ResourceError as error:
                    self._tell(**({"ended": True} if self._ending else {"failure": str(error)}))
            with process:  # which is waited for
                assert process.stdout is not None
                for line in process.stdout:  # what a user's modules print
                    print(line, end="", flush=True)

    def _tell(self, **said: Any) -> None:
        self._said |= {"host": _host(), "actor": os.getpid(), **said}
        self._known.set()

    def _listen(self, process: subprocess.Popen[str]) -> str:
        line = ""
        assert process.stdout is not None
        for said in process.stdout:
            line = said.rstrip()
            if (address := address_in(self._task, line)) is not None:
                return address
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS)
        raise ended_early(self._task, line, process.returncode)

    def _spawn(self, folder: Path, keys: str) -> subprocess.Popen[str]:
        save_token(folder / "token", self._token)
        options = {"token-file": folder / "token", **self._options} | ({"tls": keys} if keys else {})
        told = arguments(self._task, f"{self._bind()}:0", options, self._imports, self._delay, folder)
        return subprocess.Popen(
            [sys.executable, "-m", "flowrt.worker", *told],
            stdin=subprocess.PIPE,  # held open: its end tells the node that we are gone
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment(self._options["threads"], self._paths),
        )

    def _bind(self) -> str:
        """Where the node listens: on this machine's own address only where others must reach it."""
        here = _host()
        if not self._home:
            return f"[{here}]" if ":" in here else here
        if here != self._home:
            raise ResourceError(
                f"Ray placed it on {here}, and the cluster was started on {self._home} alone, within which its nodes "
                "listen; give fr.launch.ray.Cluster tls=True for more than one host"
            )
        return "127.0.0.1"


def save_keys(folder: str, keys: Mapping[str, bytes]) -> None:
    """Write keys to new files that their owner alone can read."""
    for name, content in keys.items():
        handle = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)


def _host() -> str:
    """The address by which other nodes of Ray reach this one."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
