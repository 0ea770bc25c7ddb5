"""What two ends show each other before anything else: that both have the same token.

Law: the token never travels, and what opened one connection opens no other. Each end draws a nonce and seals what it is
about to say of itself (in a master's hello is its epoch, in any the tasks); each proves by an HMAC over both nonces,
both seals and what it sees of the channel that it has the token: mutual authentication in three passes, as in
ISO/IEC 9798-4. The node proves first, so an impostor hears a nonce and a seal, and no more. Then hellos must be what
was sealed. A proof can be tried against guesses of the token: a token is drawn at random, not thought up.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import TYPE_CHECKING

from flowrt.base.valueclass import valueclass
from flowrt.net.wire.frames import frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowrt.base.codec import Message

NONCE = 32  # bytes, as have seals and proofs
PROOF = 32
_HEX = re.compile(rf"[0-9a-f]{{{2 * NONCE}}}")
_CLIENT, _NODE = b"flowrt client proves", b"flowrt node proves"


@valueclass
class Opening:
    """What one end begins with: its nonce, and the seal of its hello."""

    nonce: bytes
    seal: bytes

    @classmethod
    def of(cls, token: str, nonce: bytes, hello: Message) -> Opening:
        """That of an end which will say ``hello``."""
        return cls(nonce, _mac(token, b"flowrt hello", nonce, b"".join(bytes(piece) for piece in frame(hello))))

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> Opening | None:
        """What the other end began with, if it did."""
        nonce, seal = headers.get("flowrt-nonce", ""), headers.get("flowrt-seal", "")
        if _HEX.fullmatch(nonce) and _HEX.fullmatch(seal):
            return cls(bytes.fromhex(nonce), bytes.fromhex(seal))
        return None

    def headers(self) -> dict[str, str]:
        """As it travels."""
        return {"Flowrt-Nonce": self.nonce.hex(), "Flowrt-Seal": self.seal.hex()}

    def is_of(self, token: str, hello: Message) -> bool:
        """Whether ``hello`` is what was sealed."""
        return hmac.compare_digest(self.seal, Opening.of(token, self.nonce, hello).seal)


@valueclass
class HandshakeTerms:
    """What both ends must see alike; ``channel`` tells the certificates of both where there is TLS."""

    client: Opening
    node: Opening
    channel: bytes = b""

    def client_proof(self, token: str) -> bytes:
        """The client's, after the node's."""
        return self._proof(token, _CLIENT)

    def node_proof(self, token: str) -> bytes:
        """The node's, who proves first."""
        return self._proof(token, _NODE)

    def _proof(self, token: str, who: bytes) -> bytes:
        client, node = self.client, self.node
        return _mac(token, who, client.nonce, client.seal, node.nonce, node.seal, self.channel)


def is_same(one: bytes, other: bytes) -> bool:
    """Whether two proofs are one, in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


def name_told_as(token: str, told: str) -> str:
    """The name that is meant by one which anybody may hear: only who has the token finds it."""
    return _mac(token, b"flowrt name", told.encode()).hex()[:32]


def _mac(token: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 over ``parts``, each with its length, so that no two lists of them read the same."""
    return hmac.digest(token.encode(), b"".join(len(part).to_bytes(8, "big") + part for part in parts), hashlib.sha256)
