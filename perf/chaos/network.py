"""A network of namespaces that can be cut: each node in one of its own, behind a router, and this process too.

Needs Linux, `unshare`, `nsenter` and `ip`, and root or user namespaces. Call `enter` first, at the program's start: it
begins the program anew in a namespace without any other network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Self

ENTERED = "FLOWRT_CHAOS_NAMESPACE"
CLIENT = "client"
BOTH, TO, FROM = "both", "to", "from"  # ways that packets are dropped, as seen by who is cut off


def can_enter() -> bool:
    """Whether there may be a network of namespaces here."""
    return ENTERED in os.environ or _opener() is not None


def enter() -> None:
    """Begin this program anew in a namespace of its own. Raises `OSError` where that may not be."""
    if ENTERED in os.environ:
        return
    opener = _opener()
    if opener is None:
        raise OSError("network namespaces need Linux, unshare and ip, and root or user namespaces")
    os.environ[ENTERED] = "1"
    os.execvp(opener[0], [*opener, sys.executable, *sys.argv])


def _opener() -> list[str] | None:
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        try:
            if subprocess.run([*command, "ip", "link"], capture_output=True, check=False).returncode == 0:
                return command
        except OSError:
            return None
    return None


class Network:
    """The namespaces of ``tasks`` and of this process, `CLIENT`, while the block runs."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self._numbers = {name: number for number, name in enumerate([CLIENT, *tasks], 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._rules: dict[str, list[list[str]]] = {}

    def __enter__(self) -> Self:
        try:
            for name in ("router", *self._numbers):
                if name != CLIENT:
                    self._holders[name] = _hold()
            for name, number in self._numbers.items():
                self._join(name, number)
            self._do("router", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def host(self, task: str) -> str:
        """The address of a task."""
        return f"10.9.{self._numbers[task]}.1"

    def before(self, task: str) -> list[str]:
        """What to put before a command that is to run where a task is."""
        return [] if task == CLIENT else ["nsenter", "-t", str(self._holders[task].pid), "-n"]

    def cut(self, task: str, way: str = BOTH) -> None:
        """From now on the router drops all packets `TO` a task, `FROM` it, or `BOTH`, silently."""
        rules = [["to", self.host(task)]] if way != FROM else []
        rules += [["iif", f"r{self._numbers[task]}"]] if way != TO else []
        for rule in rules:
            self._do("router", "ip", "rule", "add", *rule, "blackhole", "priority", "100")
        self._rules.setdefault(task, []).extend(rules)

    def heal(self, task: str) -> None:
        """Carry everything again."""
        for rule in self._rules.pop(task, []):
            self._do("router", "ip", "rule", "del", *rule, "blackhole", "priority", "100")

    def _join(self, name: str, number: int) -> None:
        """Join a namespace to the router."""
        near, far = f"r{number}", f"e{number}"
        self._do("router", "ip", "link", "add", near, "type", "veth", "peer", "name", far)
        pid = os.getpid() if name == CLIENT else self._holders[name].pid
        self._do("router", "ip", "link", "set", far, "netns", str(pid))
        for where, device, address in (("router", near, f"10.9.{number}.2"), (name, far, self.host(name))):
            self._do(where, "ip", "addr", "add", f"{address}/24", "dev", device)
            self._do(where, "ip", "link", "set", device, "up")
        self._do(name, "ip", "link", "set", "lo", "up")
        self._do(name, "ip", "route", "add", "default", "via", f"10.9.{number}.2")

    def _do(self, where: str, *command: str) -> None:
        done = subprocess.run([*self.before(where), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"cannot make a network to cut: {' '.join(command)}: {done.stderr.strip()}")


def _hold() -> subprocess.Popen[bytes]:
    """A process that holds a new namespace."""
    holder = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder
