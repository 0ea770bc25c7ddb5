"""TLS between machines: both ends show a certificate of the cluster's authority, from a folder that is read again.

A folder of keys holds ``ca.pem``, the authorities that are believed, ``cert.pem``, this end's certificate and what
leads from it to one of them, and ``key.pem``, the private key, which its owner alone may read. Whoever has a
certificate of these authorities belongs to the cluster; a node also shows that it may answer at the address that was
asked for. When a file of the folder changes, connections to come use it, and those that are there go on.

Without keys, a node at an address beyond this machine shows a certificate that it has made for itself. Nobody need
believe that: the token vouches for it, as both ends prove by it that they saw the same certificate (`channel_of`, in
`flowrt.net.wire.handshake`), so that whoever stands between them is found before anything is said.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import re
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from flowrt.base.errors import AuthenticationError, NodeLost
from flowrt.base.valueclass import valueclass
from flowrt.net.door.addresses import is_any, is_loopback
from flowrt.net.door.certificates import key_pem_of, new_key, pem_of, signed
from flowrt.net.door.tokens import check_private

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"
TOKEN = "token"  # which may lie beside them
MAKE = "python -m flowrt.worker keys DIR --hosts HOST ..."
RENEW = "python -m flowrt.worker keys DIR"
DAYS = 3650.0  # that a certificate is good for which the token vouches for: as long as the node runs
ANY = "*"  # the name of who may answer at any address
_PEM = "-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----"  # the first is the one that is shown
_log = logging.getLogger(__name__)


class Context(ssl.SSLContext):
    """One that knows the digest of the certificate that it shows."""

    certificate = b""


@valueclass
class Contexts:
    """What connections of either end begin with."""

    node: Context
    client: Context


class Vouched:
    """Keys that nobody made: what the token vouches for."""

    def __init__(self) -> None:
        """Make a certificate. Raises `AuthenticationError` where cryptography is missing."""
        try:
            key = new_key()
            shown = pem_of(signed((None, key), key, None, DAYS))
        except ModuleNotFoundError as error:
            raise AuthenticationError(f"TLS needs {error.name}: pip install 'flowrt[tls]'") from error
        node = _bare(ssl.PROTOCOL_TLS_SERVER)
        with TemporaryDirectory(prefix="flowrt-key-") as folder:  # its owner alone can look into it
            for name, content in ((CERT, shown), (KEY, key_pem_of(key))):
                Path(folder, name).write_bytes(content)
            node.load_cert_chain(Path(folder, CERT), Path(folder, KEY))
        node.certificate = _digest(ssl.PEM_cert_to_DER_cert(shown.decode("ascii")))
        self._contexts = Contexts(node, ASKING)

    def contexts(self) -> Contexts:
        """For a connection that begins now."""
        return self._contexts


class Keys:
    """The keys in ``folder``. Raises `AuthenticationError` that names the file where they cannot be used."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._seen = self._look()
        self._contexts = _load(self.folder)

    def contexts(self) -> Contexts:
        """For a connection that begins now. Files that changed and cannot be used are told of once, and not used."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._contexts = _load(self.folder)
            except AuthenticationError as error:
                _log.warning("%s; the keys that were read before are used on", error)
        return self._contexts

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state(self.folder / name) for name in (CA, CERT, KEY)]


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_mode


def _load(folder: Path) -> Contexts:
    _check_private(folder / KEY)
    return Contexts(_context(folder, ssl.PROTOCOL_TLS_SERVER), _context(folder, ssl.PROTOCOL_TLS_CLIENT))


def _check_private(path: Path) -> None:
    try:
        about = os.stat(path)
    except OSError as error:
        raise AuthenticationError(f"cannot read {path}: {error.strerror}; make keys by {MAKE}") from error
    check_private(about, f"the private key {path}")


def _bare(protocol: Any) -> Context:
    """One that asks for no certificate."""
    context = Context(protocol)
    context.check_hostname = False  # `check_host` does, and knows of who may answer anywhere
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing is resumed: what a node has shown once would do for longer than it is good
    context.certificate = _digest(b"")
    return context


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _context(folder: Path, protocol: Any) -> Context:
    context = _bare(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / CA)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"cannot use the authorities in {folder / CA}: {_said(error)}") from error
    try:
        context.load_cert_chain(folder / CERT, folder / KEY, password=_no_password)
        shown = re.search(_PEM, (folder / CERT).read_text(encoding="ascii"), re.DOTALL)
        context.certificate = _digest(ssl.PEM_cert_to_DER_cert(shown[0] if shown else ""))
    except (OSError, ValueError) as error:
        raise AuthenticationError(
            f"cannot use {folder / CERT} with {folder / KEY}: {_said(error)}; make keys by {MAKE}"
        ) from error
    return context


ASKING = _bare(ssl.PROTOCOL_TLS_CLIENT)  # of a client without keys


def _no_password() -> str:
    raise ValueError("the private key asks for a password")


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def check_reach(host: str, keys: Keys | None) -> None:
    """Raise `AuthenticationError` where a node would listen without keys on every network there is."""
    if keys is None and is_any(host):
        raise AuthenticationError(
            f"listening on {host}, beyond this machine, needs TLS: make keys by {MAKE}, and give --tls DIR; or --bind "
            "to the one address that the cluster knows this node by, where the token is enough"
        )


def keys_at(host: str, keys: Keys | None) -> Keys | Vouched | None:
    """What a node at ``host`` talks TLS by: ``keys``, or abroad what the token vouches for; None on loopback."""
    check_reach(host, keys)
    return keys if keys is not None or is_loopback(host) else Vouched()


# ── of a connection ──


def channel_of(transport: asyncio.BaseTransport, *, node: bool) -> bytes:
    """What both ends see of a channel: the node's certificate and the client's, of which this end is one.

    Empty where there is no TLS, as on a Unix socket.
    """
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return b""
    mine: bytes = tls.context.certificate
    theirs = _digest(tls.getpeercert(binary_form=True) or b"")
    return mine + theirs if node else theirs + mine


def check_host(transport: asyncio.BaseTransport, host: str) -> None:
    """Raise `AuthenticationError` unless the node's certificate is for ``host``."""
    shown = cast("Mapping[str, Any]", transport.get_extra_info("ssl_object").getpeercert())
    names = [str(name) for _, name in shown.get("subjectAltName", ())]
    if not any(_is_for(name, host) for name in names):
        raise AuthenticationError(
            f"it shows a certificate for {', '.join(names) or 'no host'}, not for {host}; name all hosts in {MAKE}"
        )


def _is_for(name: str, host: str) -> bool:
    if name == ANY:
        return True
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(host)
    except ValueError:
        pass
    first, _, rest = host.lower().rstrip(".").partition(".")
    return name.lower() in (f"{first}.{rest}" if rest else first, f"{ANY}.{rest}" if rest else None)


_ANOTHER = "it is of another authority: both sides need keys of one, see ca.pem"
_FIXES = {  # by OpenSSL's X509_V_ERR_*
    9: "set the clocks of both machines",  # it is not good yet
    10: f"make a new one by {RENEW}, and copy it to that node; or set the clocks of both machines",  # nor any more
    19: _ANOTHER,
    20: _ANOTHER,
}
_SAME = "both need one of the same authority, which has not expired"
_ALERTS = {  # by what the other end's OpenSSL makes of the same
    "bad certificate": "it may not be good yet by the clock there: set the clocks of both machines",
    "unknown ca": _ANOTHER,
    "certificate expired": f"make a new one by {RENEW}; or set the clocks of both machines",
}


def failure(error: ssl.SSLError) -> AuthenticationError | NodeLost:
    """What an error of TLS tells a client."""
    reason = (error.reason or "").replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        fix = _FIXES.get(error.verify_code, "start that node with --tls, too")
        return AuthenticationError(f"its certificate is refused: {error.verify_message}; {fix}")
    if "certificate required" in reason:
        return AuthenticationError("it asks for a certificate: as it was started with --tls, this side needs it, too")
    if "wrong version number" in reason or "record layer failure" in reason:
        return AuthenticationError("it does not speak TLS; start that node with --tls, too")
    if "alert" in reason:
        fix = next((fix for alert, fix in _ALERTS.items() if alert in reason), _SAME)
        return AuthenticationError(f"it refuses our certificate ({reason}); {fix}")
    return NodeLost(f"TLS failed: {reason or error}")


def told_of(error: OSError) -> str:
    """What an error while TLS was agreed upon tells a node of a client: one of few sentences."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        return f"{'it refuses our certificate' if 'alert' in reason else 'TLS failed'}: {reason}"
    return error.strerror or str(error)
