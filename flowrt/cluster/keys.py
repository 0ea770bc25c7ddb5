"""Keys for a cluster: ``python -m flowrt.worker keys DIR --hosts HOST ...`` makes an authority and a certificate.

The folder is what ``--tls DIR`` and ``fr.Session(..., tls=DIR)`` take: ``ca.pem``, ``cert.pem`` and ``key.pem`` (see
`flowrt.net.door.tls`), a ``token``, and ``ca.key``, the authority's own key, which nodes do not need. Made again, it
has a new certificate of the same authority, which nodes that run take up by themselves.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import FlowrtError, GraphError, ResourceError
from flowrt.files import replacing
from flowrt.net.door.certificates import key_pem_of, new_key, pem_of, signed
from flowrt.net.door.tls import ANY, CA, CERT, KEY, TOKEN
from flowrt.net.door.tokens import new_token, save_token

if TYPE_CHECKING:
    import os

    from cryptography import x509

__all__ = ["ANY", "main", "make_keys"]

AUTHORITY = "ca.key"
DAYS, AUTHORITY_DAYS = 365, 3650  # that a certificate is good for
_ANOTHER = "make another authority by --new-authority"
_HERE = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.IGNORECASE)


def main(arguments: Sequence[str]) -> int:
    """Make keys as the command line says; answers the exit code."""
    given = _parser().parse_args(arguments)
    certified, known = ((Path(given.folder) / name).exists() for name in (CERT, CA))
    try:
        hosts = make_keys(given.folder, given.hosts, days=given.days, new_authority=given.new_authority)
    except FlowrtError as error:
        print(f"flowrt keys: {error}", file=sys.stderr)
        return 2
    print(f"{given.folder}: a certificate for {', '.join(hosts)}, good for {given.days:g} days")
    print(_what_next(certified, known, given.new_authority))
    return 0


def _what_next(certified: bool, known: bool, new_authority: bool) -> str:
    if known and new_authority:
        return (
            f"copy {CA} to each machine first, then {CERT} and {KEY}; once all have these, take the old authority, the "
            f"last in {CA}, out of it and copy it again: nobody needs to be started again"
        )
    if certified:
        return f"copy {CERT} and {KEY} to each machine: nobody needs to be started again"
    return f"copy all but {AUTHORITY} to each machine, readable by its owner alone, and start nodes with --tls"


def make_keys(
    folder: str | os.PathLike[str], hosts: Iterable[str] = (), *, days: float = DAYS, new_authority: bool = False
) -> list[str]:
    """Put keys into ``folder`` for nodes at ``hosts``, and on this machine; answers for which hosts they are.

    A name may begin with ``*.``, for any host of a domain, and be ``*`` for any at all, where nobody knows addresses
    beforehand: then whoever has these keys may answer for any node. Where there are keys, they are replaced by newer
    ones of the same authority, for the same hosts if none are given; a ``new_authority`` is believed beside those
    before it, whose certificates in ``ca.pem`` can go once all have the new one.
    Raises `ResourceError` where the folder cannot be written, or cryptography is not installed; `GraphError` for what
    names no host.
    """
    path = Path(folder)
    try:
        names = list(dict.fromkeys([*_HERE, *(hosts or _named_in(path / CERT) or _own_names())]))
        alternatives = _alternatives(names)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(path, new_authority)
        _check_lasts(authority[0], days)
        key = new_key()
        certificate = signed(authority, key, alternatives, days)
        _write(path / KEY, key_pem_of(key))
        _write(path / CERT, pem_of(certificate))
        if not (path / TOKEN).exists():
            save_token(path / TOKEN, new_token())
    except ModuleNotFoundError as error:
        raise ResourceError(f"making keys needs {error.name}: pip install 'flowrt[tls]'") from error
    except FileExistsError as error:
        raise ResourceError(f"cannot put keys into {path}: it is a file; name a folder, or one to be made") from error
    except OSError as error:
        raise ResourceError(f"cannot put keys into {path}: {error.strerror or error}") from error
    return names


def _own_names() -> list[str]:
    """What this machine is known by to others, as far as it knows."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names += [str(place[0]) for *_, place in socket.getaddrinfo(names[0], None)]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect(("192.0.2.1", 9))  # nothing is sent: it tells by which address others would be reached
        names.append(out.getsockname()[0])
    return names


def _named_in(path: Path) -> list[str]:
    """The hosts that the certificate at ``path`` is for; none where there is no certificate."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in found]


def _alternatives(names: Iterable[str]) -> Any:
    from cryptography import x509

    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(_checked(name)))
    return x509.SubjectAlternativeName(found)


def _checked(name: str) -> str:
    """``name``, if a host can have it, or it is a pattern that `flowrt.net.door.tls.check_host` knows."""
    if name == ANY or _HOST.fullmatch(name.removeprefix(f"{ANY}.")):
        return name
    if ANY in name:
        raise GraphError(
            f"no host matches {name!r}: write {ANY}.DOMAIN for all hosts in a domain, as in {ANY}.cluster.local, {ANY} "
            "alone for any host, or each host by name, as in node1 node2"
        )
    raise GraphError(f"{name!r} names no host: write a name or an address alone, as in node1 or 10.0.0.1")


def _authority(folder: Path, anew: bool) -> tuple[x509.Certificate, Any]:
    """The authority of a folder: its certificate, the first in its file, and key; made where there is none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    before = (folder / CA).read_bytes() if (folder / CA).exists() else b""
    if before and not anew:
        if not (folder / AUTHORITY).exists():
            raise ResourceError(
                f"{folder} has an authority's certificate, and not its key {AUTHORITY}: make keys where that is, or "
                "another authority by --new-authority"
            )
        try:
            key: Any = serialization.load_pem_private_key((folder / AUTHORITY).read_bytes(), None)
            certificate = x509.load_pem_x509_certificates(before)[0]
        except (ValueError, TypeError) as error:  # what is no PEM; a key under a password
            reason = str(error).partition(". ")[0]
            raise ResourceError(f"cannot use {folder / CA} with {folder / AUTHORITY}: {reason}; {_ANOTHER}") from error
        if key.public_key() != certificate.public_key():
            raise ResourceError(
                f"{folder / AUTHORITY} is not the key of the first certificate in {folder / CA}; {_ANOTHER}"
            )
        return certificate, key
    key = new_key()
    certificate = signed((None, key), key, None, AUTHORITY_DAYS)
    _write(folder / AUTHORITY, key_pem_of(key))
    _write(folder / CA, pem_of(certificate) + before, mode=0o644)
    return certificate, key


def _check_lasts(authority: x509.Certificate, days: float) -> None:
    """Raise `ResourceError` where a certificate would be good for longer than who signs it."""
    left = (authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    if days > left + 1 / 24:  # one that was made just now
        until = f"{authority.not_valid_after_utc:%Y-%m-%d}"
        raise ResourceError(
            f"the authority is good until {until}, which is {left:.0f} days, and the certificate would be for "
            f"{days:g}; make another by --new-authority, or give fewer --days"
        )


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a file in the place of any other, whole, so that a node that reads it meanwhile has one or the other."""
    with replacing(path, mode) as file:
        file.write(content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowrt.worker keys",
        description="Make keys for nodes that talk over TLS: an authority, a certificate that it signs, and a token.",
        epilog="Run again, it makes a new certificate of the same authority. Nodes read the files again when they "
        "change: what is connected goes on, and whoever connects next shows the new one.",
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="where to put them; what --tls and fr.Session(..., tls=DIR) take")
    add(
        "--hosts",
        nargs="+",
        default=[],
        metavar="HOST",
        help="the names and addresses that nodes are reached by, beside localhost; *.DOMAIN stands for those in a "
        "domain, * for all (default: those of the certificate before, else what this machine is known by)",
    )
    add("--days", type=_days, default=DAYS, help="until the certificate expires (default: %(default)s)")
    add(
        "--new-authority",
        action="store_true",
        help="make another authority, too; those before it are believed until they are taken out of ca.pem",
    )
    return parser


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = nan
    if not 0 < days <= AUTHORITY_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days above 0, and up to {AUTHORITY_DAYS}")
    return days
