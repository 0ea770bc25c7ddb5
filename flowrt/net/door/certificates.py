"""Certificates and private keys, as cryptography makes them where it is installed (``flowrt[tls]``).

Law: nothing here reads or writes a file; whoever asks without cryptography gets its `ModuleNotFoundError`.
"""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography import x509

_SLACK = datetime.timedelta(days=1)  # by which clocks may be behind


def new_key() -> Any:
    """A private key on the curve P-256."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def signed(
    authority: tuple[x509.Certificate | None, Any], key: Any, alternatives: Any, days: float
) -> x509.Certificate:
    """A certificate of ``key`` by an authority; without ``alternatives``, one of the authority itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID as uses

    issuer, issuing = authority
    now = datetime.datetime.now(datetime.UTC)
    name = "flowrt node" if issuer is not None else f"flowrt authority {os.urandom(4).hex()}"
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(max(now + datetime.timedelta(days=days), now - _SLACK + datetime.timedelta(seconds=1)))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), True)
        .add_extension(_usage(signs=issuer is None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing.public_key()), False)
    )
    if alternatives is not None:
        both = x509.ExtendedKeyUsage([uses.SERVER_AUTH, uses.CLIENT_AUTH])
        made = made.add_extension(alternatives, False).add_extension(both, False)
    return made.sign(issuing, hashes.SHA256())


def _usage(signs: bool) -> Any:
    from cryptography import x509

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **never)


def pem_of(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    pem: bytes = certificate.public_bytes(Encoding.PEM)
    return pem


def key_pem_of(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem
